// RoPE: the table against known values, q/k norm and rotation against double precision, and the cache bit for bit.
#include "op_check.h"
#include "kernels/rope_table.h"

static const struct {
	int rows, heads, kv_heads, dim, rope_dim, block_size;
	bool interleaved, norm;
	enum dtype kv;
} cases[] = {
	{1, 9, 3, 64, 64, 16, true, false, DTYPE_F16},  {40, 9, 3, 64, 64, 16, false, false, DTYPE_F16},
	{5, 4, 4, 80, 32, 1, false, false, DTYPE_BF16}, {7, 8, 1, 128, 128, 256, false, true, DTYPE_F32},
	{3, 2, 2, 6, 4, 3, true, true, DTYPE_BF16},     {3, 2, 2, 7, 2, 5, true, false, DTYPE_F16},
	{70, 14, 2, 96, 96, 7, true, true, DTYPE_BF16}, {2, 4, 2, 256, 64, 16, false, true, DTYPE_F16},
};

static void reference_head(double *x, int d, const float *norm, float eps, bool interleaved, int rope_dim,
                           const float *cos_sin)
{
	double sum = 0;
	for (int i = 0; i < d; i++)
		sum += x[i] * x[i];
	if (norm)
		for (int i = 0; i < d; i++)
			x[i] = x[i] / sqrt(sum / d + (double)eps) * (double)norm[i];
	for (int i = 0; i < rope_dim / 2; i++) {
		int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + rope_dim / 2;
		double c = (double)cos_sin[2 * i], s = (double)cos_sin[2 * i + 1], u = x[a], v = x[b];
		x[a] = u * c - v * s;
		x[b] = v * c + u * s;
	}
}

Test(rope, rotates_like_double_precision_and_writes_the_cache_where_the_slots_say)
{
	enum { POSITIONS = 500 };
	for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
		struct op_random random = {c + 10};
		int rows = cases[c].rows, heads = cases[c].heads, kvh = cases[c].kv_heads, d = cases[c].dim;
		int bs = cases[c].block_size, blocks = (rows * 3 + bs - 1) / bs + 1;
		enum dtype t = cases[c].kv;
		size_t nq = (size_t)(rows * heads * d), nk = (size_t)(rows * kvh * d);
		size_t cache = (size_t)(blocks * bs * kvh * d);
		float *q = op_random_floats(&random, nq, 1), *k = op_random_floats(&random, nk, 1);
		float *v = op_random_floats(&random, nk, 1);
		float *qn = op_random_floats(&random, (size_t)d, 1), *kn = op_random_floats(&random, (size_t)d, 1);
		float *table = malloc(sizeof(float) * (size_t)(POSITIONS * cases[c].rope_dim));
		rope_table(table, &(struct rope_table_options){
		                          .rope_dim = cases[c].rope_dim, .max_position = POSITIONS, .theta = 10000});
		int32_t *position = malloc(sizeof(int32_t) * (size_t)rows), *slot = malloc(sizeof(int32_t) * (size_t)rows);
		for (int r = 0; r < rows; r++) {
			position[r] = op_random_below(&random, POSITIONS);
			slot[r] = bs + 3 * (rows - 1 - r) % (rows * 3); // block 0 stays untouched
			if (slot[r] >= blocks * bs)
				slot[r] = blocks * bs - 1 - r;
		}
		double *eq = malloc(nq * sizeof(double)), *ek = malloc(nk * sizeof(double));
		for (size_t i = 0; i < nq; i++)
			eq[i] = (double)q[i];
		for (size_t i = 0; i < nk; i++)
			ek[i] = (double)k[i];
		for (int r = 0; r < rows; r++) {
			const float *cs = table + position[r] * cases[c].rope_dim;
			for (int h = 0; h < heads; h++)
				reference_head(eq + (r * heads + h) * d, d, cases[c].norm ? qn : NULL, 1e-6f, cases[c].interleaved,
				               cases[c].rope_dim, cs);
			for (int h = 0; h < kvh; h++)
				reference_head(ek + (r * kvh + h) * d, d, cases[c].norm ? kn : NULL, 1e-6f, cases[c].interleaved,
				               cases[c].rope_dim, cs);
		}
		float *first_q = NULL;
		FOR_EACH_ISA(isa) {
			struct ops_context *x = op_context(isa, 2);
			float *q2 = memcpy(malloc(nq * 4), q, nq * 4), *k2 = memcpy(malloc(nk * 4), k, nk * 4);
			char *kc = malloc(cache * 4), *vc = malloc(cache * 4);
			memset(kc, 0x5a, cache * 4);
			memset(vc, 0x5a, cache * 4);
			cpu_rope_kv(x, &(struct rope_kv_args){
			                       .n_rows = rows, .n_heads = heads, .q = q2, .k = k2, .v = v,
			                       .q_norm = cases[c].norm ? qn : NULL, .k_norm = cases[c].norm ? kn : NULL,
			                       .norm_eps = 1e-6f, .interleaved = cases[c].interleaved,
			                       .rope_dim = cases[c].rope_dim, .cos_sin = table, .position = position, .slot = slot,
			                       .kv = {kc, vc, t, bs, kvh, d}});
			op_assert_close(q2, eq, nq, 2e-6, 0.5, "%s case %zu q", op_isa_name[isa], c);
			op_assert_close(k2, ek, nk, 2e-6, 0.5, "%s case %zu k", op_isa_name[isa], c);
			if (first_q)
				op_assert_same_bits(q2, first_q, nq, "%s case %zu q", op_isa_name[isa], c);
			else
				first_q = memcpy(malloc(nq * 4), q2, nq * 4);
			char *ekc = malloc(cache * 4), *evc = malloc(cache * 4);
			memset(ekc, 0x5a, cache * 4);
			memset(evc, 0x5a, cache * 4);
			for (int r = 0; r < rows; r++)
				for (int h = 0; h < kvh; h++)
					for (int i = 0; i < d; i++) {
						size_t at = (size_t)(((slot[r] / bs * kvh + h) * bs + slot[r] % bs) * d + i);
						op_put(ekc, at, t, k2[(r * kvh + h) * d + i]);
						op_put(evc, at, t, v[(r * kvh + h) * d + i]);
					}
			op_assert_same_bits(kc, ekc, cache * 4, "%s case %zu cache of k, byte", op_isa_name[isa], c);
			op_assert_same_bits(vc, evc, cache * 4, "%s case %zu cache of v, byte", op_isa_name[isa], c);
			free(q2);
			free(k2);
			free(kc);
			free(vc);
			free(ekc);
			free(evc);
			ops_cpu()->destroy(&x);
		}
		free(first_q);
		free(q);
		free(k);
		free(v);
		free(qn);
		free(kn);
		free(table);
		free(position);
		free(slot);
		free(eq);
		free(ek);
	}
}

Test(rope, values_round_to_the_nearest_even_and_infinities_and_nans_stay)
{
	const float special[] = {1.00048828125f, 1.00146484375f, 65504, 65519.996f, 65520, 1e-8f, 2.98023223876953125e-8f,
	                         6e-8f, INFINITY, -INFINITY, 0.0f, -0.0f, 1.00390625f, 1.01171875f, 3.3895314e38f, 1e-40f};
	enum { N = sizeof(special) / sizeof(special[0]) };
	const enum dtype types[] = {DTYPE_F16, DTYPE_BF16};
	float table[2] = {1, 0}, q[N + 1] = {0}, k[N + 1] = {0}, v[N + 1];
	int32_t zero = 0;
	memcpy(v, special, sizeof(special));
	v[N] = NAN;
	FOR_EACH_ISA(isa) for (int t = 0; t < 2; t++) {
		struct ops_context *x = op_context(isa, 1);
		uint16_t kc[N + 1], vc[N + 1];
		cpu_rope_kv(x, &(struct rope_kv_args){.n_rows = 1, .n_heads = 1, .q = q, .k = k, .v = v, .rope_dim = 2,
		                                      .cos_sin = table, .position = &zero, .slot = &zero,
		                                      .kv = {kc, vc, types[t], 1, 1, N + 1}});
		for (int i = 0; i < N; i++) {
			uint16_t e = types[t] == DTYPE_F16 ? op_half(special[i]) : op_bfloat(special[i]);
			cr_assert_eq(vc[i], e, "%s type %d: %.9g became %04x, expected %04x", op_isa_name[isa], t,
			             (double)special[i], vc[i], e);
		}
		cr_assert(isnan(types[t] == DTYPE_F16 ? cpu_half_to_float(vc[N]) : cpu_bfloat_to_float(vc[N])));
		ops_cpu()->destroy(&x);
	}
}

// Computed with torch 2 and transformers 5 (float32): cos and sin of LlamaRotaryEmbedding at some positions.
#include "../golden/rope.h"

Test(rope, tables_equal_those_of_transformers)
{
	for (size_t c = 0; c < sizeof(rope_golden) / sizeof(rope_golden[0]); c++) {
		const struct rope_golden *g = &rope_golden[c];
		struct rope_table_options o = {.rope_dim = g->dim, .max_position = g->position + 1, .theta = g->theta,
		                               .scaling = g->scaling, .factor = g->factor,
		                               .low_freq_factor = g->low, .high_freq_factor = g->high,
		                               .original_context = g->original_context};
		float *table = malloc(sizeof(float) * (size_t)(o.max_position * o.rope_dim));
		rope_table(table, &o);
		float *row = table + (int64_t)g->position * g->dim;
		for (int i = 0; i < g->dim / 2; i++) {
			cr_assert(fabsf(row[2 * i] - g->cosine[i]) <= 1e-6f, "case %zu: cosine %d is %.9g, expected %.9g", c, i,
			          (double)row[2 * i], (double)g->cosine[i]);
			cr_assert(fabsf(row[2 * i + 1] - g->sine[i]) <= 1e-6f, "case %zu: sine %d is %.9g, expected %.9g", c, i,
			          (double)row[2 * i + 1], (double)g->sine[i]);
		}
		free(table);
	}
}

Test(rope, factors_divide_the_frequencies)
{
	enum { DIM = 64 };
	float factors[DIM / 2], plain[DIM / 2], scaled[DIM / 2];
	for (int i = 0; i < DIM / 2; i++)
		factors[i] = 1 + (float)i / 4;
	rope_frequencies(plain, &(struct rope_table_options){.rope_dim = DIM, .theta = 10000});
	rope_frequencies(scaled, &(struct rope_table_options){.rope_dim = DIM, .theta = 10000, .factors = factors});
	for (int i = 0; i < DIM / 2; i++)
		cr_assert_eq(scaled[i], plain[i] / factors[i]);
}
