// Embedding, RMS norm, and the step of q/k norm, RoPE and the write of K and V, on a GPU against the CPU.
#include "gpu_check.h"

static const enum dtype weights[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0,
                                     DTYPE_Q5_1, DTYPE_Q8_0, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
enum { WEIGHTS = sizeof weights / sizeof *weights };

Test(gpu_embed, rows_of_every_type_equal_the_cpus)
{
	enum { VOCAB = 77, COLS = 768, ROWS = 9 };
	static const int32_t ids[ROWS] = {0, 76, 15, 16, 16, 31, 8, 7, 64};
	struct ops_context *cpu = gpu_reference();
	int32_t *device_ids = gpu_copy(ids, sizeof ids);
	for (int w = 0; w < WEIGHTS; w++) {
		struct error e = {""};
		void *data = random_weight(weights[w], VOCAB, COLS, 3);
		struct weight_source s = {.dtype = weights[w], .rows = VOCAB, .cols = COLS, .data = data};
		struct weight *wc, *wg;
		cr_assert_eq(ops_cpu()->weight_create(cpu, &wc, &s, true, false, &e), STATUS_OK, "%s", e.text);
		float *expected = op_poisoned(ROWS * COLS);
		ops_cpu()->embed(cpu, &(struct embed_args){.table = wc, .n_rows = ROWS, .ids = ids, .out = expected});
		for (int a = 0; a < GPU_ACTS; a++) {
			struct ops_context *c = gpu_context(gpu_acts[a]);
			cr_assert_eq(ops_cuda()->weight_create(c, &wg, &s, true, false, &e), STATUS_OK, "%s", e.text);
			cr_assert_eq(ops_cuda()->weight_bytes(wg), ops_cuda()->weight_bytes_predicted(&s, true, false));
			void *out = gpu_poisoned(ROWS * COLS * op_type_bytes(gpu_acts[a]));
			ops_cuda()->embed(c, &(struct embed_args){.table = wg, .n_rows = ROWS, .ids = device_ids, .out = out});
			float *found = gpu_read(out, ROWS * COLS, gpu_acts[a]);
			char what[64];
			snprintf(what, sizeof what, "%s as %s", dtype_info(weights[w])->name, dtype_info(gpu_acts[a])->name);
			gpu_compare(found, expected, ROWS * COLS, gpu_tolerance[gpu_acts[a]], what);
			free(found);
			cudaFree(out);
			ops_cuda()->weight_destroy(c, &wg);
			ops_cuda()->destroy(&c);
		}
		free(expected);
		ops_cpu()->weight_destroy(cpu, &wc);
		free(data);
	}
}

Test(gpu_rms_norm, rows_of_any_width_and_order_equal_the_cpus)
{
	static const struct { int rows, cols; bool indexed; } cases[] = {
		{1, 1, false}, {3, 33, true}, {7, 576, false}, {5, 4096, true}, {2, 8192, false}};
	static const int32_t index[] = {6, 0, 3, 3, 1};
	struct ops_context *cpu = gpu_reference();
	int32_t *device_index = gpu_copy(index, sizeof index);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		for (int a = 0; a < GPU_ACTS; a++) {
			int rows = cases[i].rows, cols = cases[i].cols;
			size_t n = (size_t)rows * (size_t)cols, all = cases[i].indexed ? 7 * (size_t)cols : n;
			struct op_random r = {(uint64_t)i};
			float *x = op_random_floats(&r, all, 3), *w = op_random_floats(&r, (size_t)cols, 1), *y = op_poisoned(n);
			struct ops_context *c = gpu_context(gpu_acts[a]);
			void *dx = gpu_floats(x, all, gpu_acts[a]), *dw = gpu_copy(w, (size_t)cols * sizeof *w);
			void *dy = gpu_poisoned(n * op_type_bytes(gpu_acts[a]));
			struct rms_norm_args args = {.n_rows = rows, .cols = cols, .eps = 1e-5f, .x = x, .weight = w, .out = y,
			                             .row_index = cases[i].indexed ? index : NULL};
			ops_cpu()->rms_norm(cpu, &args);
			args.x = dx;
			args.weight = dw;
			args.out = dy;
			args.row_index = cases[i].indexed ? device_index : NULL;
			ops_cuda()->rms_norm(c, &args);
			float *found = gpu_read(dy, n, gpu_acts[a]);
			char what[64];
			snprintf(what, sizeof what, "%d x %d as %s", rows, cols, dtype_info(gpu_acts[a])->name);
			gpu_compare(found, y, n, gpu_tolerance[gpu_acts[a]], what);
			free(found);
			free(x);
			free(w);
			free(y);
			ops_cuda()->destroy(&c);
		}
}

static void check_rope(int heads, int kv_heads, int dim, int rope_dim, bool interleaved, bool norm, int block_size,
                       enum dtype act, enum dtype kv)
{
	enum { ROWS = 6, BLOCKS = 5, POSITIONS = 40 };
	static const int32_t position[ROWS] = {0, 1, 39, 7, 7, 20};
	int32_t slot[ROWS];
	struct op_random r = {(uint64_t)(dim + heads)};
	for (int i = 0; i < ROWS; i++)
		slot[i] = (i * 11 + 3) % (BLOCKS * block_size);
	size_t nq = (size_t)(ROWS * heads * dim), nk = (size_t)(ROWS * kv_heads * dim);
	size_t cache = (size_t)(BLOCKS * block_size * kv_heads * dim);
	float *q = op_random_floats(&r, nq, 1), *k = op_random_floats(&r, nk, 1), *v = op_random_floats(&r, nk, 1);
	float *qn = op_random_floats(&r, (size_t)dim, 1), *kn = op_random_floats(&r, (size_t)dim, 1);
	float *cs = op_random_floats(&r, (size_t)(POSITIONS * rope_dim), 1);
	float *ck = calloc(cache, sizeof *ck), *cv = calloc(cache, sizeof *cv);
	struct ops_context *cpu = gpu_reference(), *c = gpu_context(act);
	struct rope_kv_args args = {
		.n_rows = ROWS, .n_heads = heads, .norm_eps = 1e-6f, .interleaved = interleaved, .rope_dim = rope_dim,
		.q = gpu_floats(q, nq, act), .k = gpu_floats(k, nk, act), .v = gpu_floats(v, nk, act),
		.q_norm = norm ? gpu_copy(qn, (size_t)dim * 4) : NULL, .k_norm = norm ? gpu_copy(kn, (size_t)dim * 4) : NULL,
		.cos_sin = gpu_copy(cs, (size_t)(POSITIONS * rope_dim) * 4), .position = gpu_copy(position, sizeof position),
		.slot = gpu_copy(slot, sizeof slot),
		.kv = {gpu_floats(ck, cache, kv), gpu_floats(cv, cache, kv), kv, block_size, kv_heads, dim}};
	void *dq = args.q;
	struct kv_view pages = args.kv;
	ops_cuda()->rope_kv(c, &args);
	args.q = q, args.k = k, args.v = v, args.position = position, args.slot = slot, args.cos_sin = cs;
	args.q_norm = norm ? qn : NULL;
	args.k_norm = norm ? kn : NULL;
	args.kv = (struct kv_view){ck, cv, DTYPE_F32, block_size, kv_heads, dim};
	ops_cpu()->rope_kv(cpu, &args);
	float *fq = gpu_read(dq, nq, act), *fk = gpu_read(pages.k, cache, kv), *fv = gpu_read(pages.v, cache, kv);
	gpu_compare(fq, q, nq, gpu_tolerance[act], "q");
	gpu_compare(fk, ck, cache, gpu_tolerance[kv], "k");
	gpu_compare(fv, cv, cache, gpu_tolerance[kv], "v");
	ops_cuda()->destroy(&c);
}

Test(gpu_rope, q_and_the_pages_of_k_and_v_equal_the_cpus)
{
	static const enum dtype kv[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
	for (int a = 0; a < GPU_ACTS; a++)
		for (int k = 0; k < 3; k++) {
			check_rope(9, 3, 64, 64, false, false, 16, gpu_acts[a], kv[k]);
			check_rope(8, 1, 128, 128, true, true, 32, gpu_acts[a], kv[k]);
			check_rope(3, 3, 80, 32, false, true, 7, gpu_acts[a], kv[k]);
		}
}
