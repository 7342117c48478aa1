// Logits of tiny random models of every architecture and file format against float32 references made by transformers
// (tests/golden/README.md), and the rule that they are the same bits however a prompt is cut, batched or staged.
#include <dirent.h>
#include <math.h>

#include "stage_driver.h"

struct reference {
	uint32_t n_prompts, vocab_rows;
	struct { uint32_t n; int32_t *ids; float *logits; } prompt[8];
};

static void read_exactly(FILE *f, void *to, size_t bytes)
{
	cr_assert_eq(fread(to, 1, bytes, f), bytes);
}

static void reference_read(struct reference *r, const char *name)
{
	char path[1024], magic[8];
	uint32_t version;
	snprintf(path, sizeof path, "%s/golden/tiny/%s.ref", TEST_DATA_DIR, name);
	FILE *f = fopen(path, "rb");
	cr_assert_not_null(f, "%s", path);
	read_exactly(f, magic, 8);
	cr_assert(!memcmp(magic, "SCLOGITS", 8));
	read_exactly(f, &version, 4);
	cr_assert_eq(version, 1);
	read_exactly(f, &r->n_prompts, 4);
	read_exactly(f, &r->vocab_rows, 4);
	cr_assert_leq(r->n_prompts, 8);
	for (uint32_t i = 0; i < r->n_prompts; i++) {
		read_exactly(f, &r->prompt[i].n, 4);
		r->prompt[i].ids = malloc(r->prompt[i].n * 4ul);
		r->prompt[i].logits = malloc(4ul * r->prompt[i].n * r->vocab_rows);
		read_exactly(f, r->prompt[i].ids, r->prompt[i].n * 4ul);
		read_exactly(f, r->prompt[i].logits, 4ul * r->prompt[i].n * r->vocab_rows);
	}
	fclose(f);
}

static void reference_free(struct reference *r)
{
	for (uint32_t i = 0; i < r->n_prompts; i++) {
		free(r->prompt[i].ids);
		free(r->prompt[i].logits);
	}
}

static struct driver_options tiny_options(const char *path)
{
	return (struct driver_options){.model = path, .n_stages = 1, .max_batch_tokens = 512, .max_seqs = 32,
	                               .max_context = 128, .block_size = 16, .kv_dtype = DTYPE_F32};
}

// Relative error of all logits of the model's prompts, as the norm of the difference over the norm of the reference.
static double logits_error(const char *name, const char *suffix, struct driver_options o)
{
	static struct driver d;
	static struct driver_seq s;
	struct reference r;
	char path[1024];
	reference_read(&r, name);
	snprintf(path, sizeof path, "%s/golden/tiny/%s%s", TEST_DATA_DIR, name, suffix);
	o.model = path;
	driver_open(&d, &o);
	cr_assert_eq((uint32_t)d.config.vocab_rows, r.vocab_rows);
	double difference = 0, norm = 0;
	for (uint32_t p = 0; p < r.n_prompts; p++) {
		driver_seq_init(&s, p, (const uint32_t *)r.prompt[p].ids, r.prompt[p].n);
		s.want_logits = true;
		driver_generate(&d, &s, 512, 1);
		for (size_t i = 0; i < (size_t)r.prompt[p].n * r.vocab_rows; i++) {
			double x = s.logits[i] - r.prompt[p].logits[i];
			difference += x * x;
			norm += (double)r.prompt[p].logits[i] * r.prompt[p].logits[i];
		}
		driver_end(&d, &s);
		free(s.logits);
	}
	driver_close(&d);
	reference_free(&r);
	return sqrt(difference / norm);
}

static const char *const plain[] = {"llama", "llama-tied-llama3-rope", "llama-linear-rope", "llama-head-dim", "mistral",
                                    "qwen2", "qwen3"};
static const char *const quantised[] = {"llama-quantised", "llama-k-quantised"};
enum { N_PLAIN = sizeof plain / sizeof *plain, N_QUANTISED = sizeof quantised / sizeof *quantised };

Test(golden, gguf_models_give_the_logits_of_the_float32_reference)
{
	for (int i = 0; i < N_PLAIN; i++) {
		double error = logits_error(plain[i], ".gguf", tiny_options(NULL));
		cr_expect_lt(error, 1e-3, "%s: relative error %g", plain[i], error);
	}
}

Test(golden, folders_give_the_logits_of_the_float32_reference)
{
	for (int i = 0; i < N_PLAIN; i++) {
		double error = logits_error(plain[i], "", tiny_options(NULL));
		cr_expect_lt(error, 1e-3, "%s: relative error %g", plain[i], error);
	}
}

Test(golden, quantised_models_give_the_logits_of_their_dequantised_weights)
{
	for (int i = 0; i < N_QUANTISED; i++) {
		double error = logits_error(quantised[i], ".gguf", tiny_options(NULL));
		cr_expect_lt(error, 1e-3, "%s: relative error %g", quantised[i], error);
	}
}

Test(golden, the_portable_kernels_give_them_too)
{
	struct driver_options o = tiny_options(NULL);
	o.isa = ISA_PORTABLE;
	for (int i = 0; i < N_PLAIN; i++) {
		double error = logits_error(plain[i], ".gguf", o);
		cr_expect_lt(error, 1e-3, "%s: relative error %g", plain[i], error);
	}
}

Test(golden, half_precision_kv_stays_close)
{
	struct driver_options o = tiny_options(NULL);
	o.kv_dtype = DTYPE_F16;
	for (int i = 0; i < N_PLAIN; i++) {
		double error = logits_error(plain[i], ".gguf", o);
		cr_expect_lt(error, 3e-3, "%s: relative error %g", plain[i], error);
	}
}
