// A pipeline gives the same bits however its prompts are cut into chunks, batched with others, spread over stages, or begun
// behind shared prefix blocks; and a step whose bounds do not hold is refused.
#include "stage_driver.h"

static char tiny_path[1024];
static uint32_t text[100]; // token ids

static void setup(void)
{
	snprintf(tiny_path, sizeof tiny_path, "%s/golden/tiny/llama-quantised.gguf", TEST_DATA_DIR);
	for (uint32_t i = 0; i < 100; i++)
		text[i] = (i * 37 + 11) % 250;
}

static struct driver_options options(int n_stages)
{
	return (struct driver_options){.model = tiny_path, .n_stages = n_stages, .max_batch_tokens = 512, .max_seqs = 32,
	                               .max_context = 160, .block_size = 16, .threads = 2, .kv_dtype = DTYPE_F16};
}

// The answer that everything is compared with: 40 prompt tokens, 12 sampled ones, all logits.
static void run_alone(struct driver_seq *s, struct driver_options o, uint32_t chunk)
{
	static struct driver d;
	driver_open(&d, &o);
	driver_seq_init(s, 3, text, 40);
	s->want_logits = true;
	driver_generate(&d, s, chunk, 12);
	driver_close(&d);
}

static void expect_same(const struct driver_seq *a, const struct driver_seq *b, uint32_t vocab_rows, const char *what)
{
	for (uint32_t i = 0; i < 12; i++) {
		cr_expect_eq(a->out[i], b->out[i], "%s: token %u is %u, expected %u", what, i, b->out[i], a->out[i]);
		cr_expect(!memcmp(&a->logprob[i], &b->logprob[i], sizeof(float)), "%s: log-probability %u is %a, expected %a",
		          what, i, b->logprob[i], a->logprob[i]);
	}
	if (b->logits)
		for (size_t i = 0; i < 51ul * vocab_rows; i++)
			cr_assert(!memcmp(&a->logits[i], &b->logits[i], sizeof(float)), "%s: logit %zu is %a, expected %a", what, i,
			          b->logits[i], a->logits[i]);
}

static struct driver_seq want, got;
enum { VOCAB_ROWS = 268 };

Test(stage, chunks_of_any_size_give_the_same_bits, .init = setup)
{
	uint32_t chunks[] = {1, 3, 16, 512};
	run_alone(&want, options(1), 40);
	for (int i = 0; i < 4; i++) {
		char what[32];
		snprintf(what, sizeof what, "chunk %u", chunks[i]);
		run_alone(&got, options(1), chunks[i]);
		expect_same(&want, &got, VOCAB_ROWS, what);
		free(got.logits);
	}
	free(want.logits);
}

Test(stage, any_number_of_stages_gives_the_same_bits, .init = setup)
{
	run_alone(&want, options(1), 40);
	for (int n = 2; n <= 4; n++) {
		char what[32];
		snprintf(what, sizeof what, "%d stages", n);
		run_alone(&got, options(n), 7);
		expect_same(&want, &got, VOCAB_ROWS, what);
		free(got.logits);
	}
	free(want.logits);
}

Test(stage, any_number_of_threads_gives_the_same_bits, .init = setup)
{
	struct driver_options o = options(1);
	run_alone(&want, o, 40);
	o.threads = 1;
	run_alone(&got, o, 40);
	expect_same(&want, &got, VOCAB_ROWS, "1 thread");
	free(want.logits);
	free(got.logits);
}

Test(stage, a_sequence_in_a_batch_of_sixteen_gives_the_bits_that_it_gives_alone, .init = setup)
{
	static struct driver d;
	static struct driver_seq seq[16];
	struct driver_seq *all[16];
	struct driver_options o = options(2);
	run_alone(&want, o, 40);
	driver_open(&d, &o);
	for (uint32_t i = 0; i < 16; i++) { // others are shorter and longer, so rows and lengths are mixed
		driver_seq_init(&seq[i], i, text + (i == 9 ? 0 : i), i == 9 ? 40 : 5 + i * 3);
		all[i] = &seq[i];
	}
	while (seq[9].n_out < 12)
		driver_step(&d, all, 16, 11);
	driver_close(&d);
	expect_same(&want, &seq[9], VOCAB_ROWS, "batch of 16");
	free(want.logits);
}

Test(stage, a_shared_prefix_gives_the_bits_of_computing_it_again, .init = setup)
{
	static struct driver d;
	static struct driver_seq first, second;
	struct driver_options o = options(2);
	run_alone(&want, o, 40);
	driver_open(&d, &o);
	driver_seq_init(&first, 0, text, 40);
	driver_generate(&d, &first, 40, 2);
	driver_seq_init(&second, 1, text, 40);
	second.done = 32; // two full blocks of the first one
	uint32_t shared[2] = {first.block[0], first.block[1]};
	driver_step_shared(&d, &second, shared, 2);
	driver_generate(&d, &second, 40, 12);
	driver_close(&d);
	expect_same(&want, &second, VOCAB_ROWS, "shared prefix");
	free(want.logits);
}

Test(stage, a_slot_that_ended_can_be_used_again_in_the_next_step, .init = setup)
{
	static struct driver d;
	static struct driver_seq other;
	struct driver_options o = options(2);
	run_alone(&want, o, 40);
	driver_open(&d, &o);
	driver_seq_init(&other, 3, text + 7, 60);
	driver_generate(&d, &other, 60, 4);
	driver_end(&d, &other);
	driver_seq_init(&got, 3, text, 40);
	driver_generate(&d, &got, 40, 12);
	driver_close(&d);
	expect_same(&want, &got, VOCAB_ROWS, "second owner");
	free(want.logits);
}

Test(stage, truncating_and_running_again_gives_the_same_bits, .init = setup)
{
	static struct driver d;
	struct driver_options o = options(2);
	run_alone(&want, o, 40);
	driver_open(&d, &o);
	driver_seq_init(&got, 3, text, 40);
	driver_generate(&d, &got, 40, 6);
	got.done = 21;
	got.n_out = 0;
	got.n_blocks = 2; // what 21 tokens need
	got.truncate = true;
	driver_generate(&d, &got, 40, 12);
	driver_close(&d);
	expect_same(&want, &got, VOCAB_ROWS, "after truncation");
	free(want.logits);
}

Test(stage, dummy_weights_do_not_depend_on_the_split)
{
	for (int i = 0; i < 2; i++) {
		static struct driver_seq one, three;
		struct driver_options o = options(1);
		snprintf(tiny_path, sizeof tiny_path, "%s/golden/tiny/%s", TEST_DATA_DIR, i ? "qwen3" : "qwen2");
		for (uint32_t t = 0; t < 40; t++)
			text[t] = (t * 13 + 5) % 200;
		o.dummy = true;
		run_alone(&one, o, 40);
		o.n_stages = 2;
		run_alone(&three, o, 9);
		expect_same(&one, &three, VOCAB_ROWS, tiny_path);
		free(one.logits);
		free(three.logits);
	}
}

// Runs one made-up step on a fresh stage and expects a refusal that names `expected`.
static void refuse(struct message_step step, const char *expected)
{
	static struct driver d;
	struct error e = {""};
	struct driver_options o = options(1);
	driver_open(&d, &o);
	struct message m = {.type = MESSAGE_STEP, .epoch = 1, .step = 1, .step_ = step}, result;
	cr_expect_eq(stage_run(d.stage[0], &m, &result, &e), STATUS_INVALID);
	cr_expect(strstr(e.text, expected), "expected \"%s\" in \"%s\"", expected, e.text);
	driver_close(&d);
}

Test(stage, a_step_whose_bounds_do_not_hold_is_refused, .init = setup)
{
	uint32_t blocks[64] = {0}, tokens[600] = {0}, bad_block = DRIVER_BLOCKS, bad_token = VOCAB_ROWS, end = 5;
	struct step_new fresh = {.slot = 1, .sampling = {.repetition_penalty = 1, .top_p = 1}};
	struct step_new outside = {.slot = 32, .sampling = {.repetition_penalty = 1, .top_p = 1}};
	struct step_seq q = {.slot = 1, .n_tokens = 1, .n_blocks = {1}};
	struct message_step base = {.n_new = 1, .news = &fresh, .n_seqs = 1, .seqs = &q, .n_tokens = 600, .tokens = tokens,
	                            .n_blocks = 64, .blocks = blocks};
	struct message_step s = base;
	s.n_new = 0;
	refuse(s, "slot 1 is not in use");
	s = base;
	s.news = &outside;
	refuse(s, "new slot 32");
	s = base;
	s.n_ends = 1;
	s.ends = &end;
	refuse(s, "slot 5 is not in use");
	q.n_blocks[0] = 0;
	refuse(base, "do not fit");
	q.n_blocks[0] = 11;
	refuse(base, "a table holds 10");
	q.n_blocks[0] = 65;
	refuse(base, "blocks 0 and 65 more of 64");
	q.n_blocks[0] = 1;
	s = base;
	s.n_blocks = 1;
	s.blocks = &bad_block;
	refuse(s, "block 512 of 512");
	s = base;
	s.n_tokens = 1;
	s.tokens = &bad_token;
	refuse(s, "token 268 of a vocabulary of 268");
	q.first_token = 600;
	refuse(base, "tokens 600");
	q.first_token = 0;
	q.n_tokens = 600;
	refuse(base, "rows");
	q.n_tokens = 17;
	refuse(base, "do not fit");
	q.n_tokens = 1;
	q.by_reference = true;
	q.ref_step = 7;
	refuse(base, "step 7");
	q.by_reference = false;
	q.start = 1u << 31;
	refuse(base, "context");
}

Test(stage, a_gap_in_step_numbers_is_refused, .init = setup)
{
	static struct driver d;
	struct error e = {""};
	struct driver_options o = options(1);
	driver_open(&d, &o);
	struct message m = {.type = MESSAGE_STEP, .epoch = 1, .step = 2}, result;
	cr_expect_eq(stage_run(d.stage[0], &m, &result, &e), STATUS_INVALID);
	cr_expect(strstr(e.text, "step 2 came after step 0"), "%s", e.text);
	driver_close(&d);
}

Test(stage, penalties_count_the_tokens_that_were_named_by_reference, .init = setup)
{
	static struct driver d;
	static struct driver_seq a, b;
	struct driver_options o = options(2);
	driver_open(&d, &o);
	driver_seq_init(&a, 0, text, 40);
	a.sampling.repetition_penalty = 1.7f;
	a.sampling.presence_penalty = 0.5f;
	driver_generate(&d, &a, 40, 10);
	// The same tokens given as a prompt, as a replay does: what is sampled next has to be the same.
	uint32_t replay[64];
	memcpy(replay, text, 40 * sizeof *text);
	memcpy(replay + 40, a.out, 9 * sizeof *text);
	driver_seq_init(&b, 1, replay, 49);
	b.sampling = a.sampling;
	b.prompt_counts = 40;
	driver_generate(&d, &b, 13, 1);
	cr_expect_eq(b.out[0], a.out[9]);
	cr_expect(!memcmp(&b.logprob[0], &a.logprob[9], sizeof(float)));
	driver_close(&d);
}
