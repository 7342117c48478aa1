// Matrix products: our own kernels up to 8 rows (64 of quantised weights), cuBLASLt beyond. What our kernels lack (float32, 16-bit weights of the
// other type) and large batches of quantised weights go through a plain copy of some rows of the matrix at a time, in the
// activations' type. The surprising decision: a bias is written into y first and the product added, so that the result is
// rounded once and cuBLASLt needs no epilogue.
#include "kernels/cuda/cuda.h"

#include <string.h>

static void lt_failed(const char *what, cublasStatus_t s)
{
	cuda_failed(what, __FILE__, __LINE__, cublasLtGetStatusString(s));
}

#define LT_MUST(call)                                                                                                  \
	do {                                                                                                           \
		cublasStatus_t lt_status_ = (call);                                                                    \
		if (lt_status_ != CUBLAS_STATUS_SUCCESS)                                                               \
			lt_failed(#call, lt_status_);                                                                  \
	} while (0)

static cudaDataType_t lt_type(enum dtype t)
{
	return t == DTYPE_F32 ? CUDA_R_32F : t == DTYPE_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static bool same_plan(const struct cuda_plan *p, const struct cuda_plan *q)
{
	return p->rows == q->rows && p->cols == q->cols && p->n == q->n && p->stride == q->stride && p->in == q->in &&
	       p->out == q->out && p->add == q->add;
}

static void make_plan(struct ops_context *c, struct cuda_plan *p)
{
	cublasOperation_t transposed = CUBLAS_OP_T;
	cublasLtMatmulPreference_t preference;
	cublasLtMatmulHeuristicResult_t found;
	int n_found = 0;
	size_t workspace = CUDA_LT_WORKSPACE;
	LT_MUST(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	LT_MUST(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
	LT_MUST(cublasLtMatrixLayoutCreate(&p->w, p->in, (uint64_t)p->cols, (uint64_t)p->rows, p->cols));
	LT_MUST(cublasLtMatrixLayoutCreate(&p->x, p->in, (uint64_t)p->cols, (uint64_t)p->n, p->cols));
	LT_MUST(cublasLtMatrixLayoutCreate(&p->y, p->out, (uint64_t)p->rows, (uint64_t)p->n, p->stride));
	LT_MUST(cublasLtMatmulPreferenceCreate(&preference));
	LT_MUST(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
	                                             sizeof workspace));
	LT_MUST(cublasLtMatmulAlgoGetHeuristic(c->lt, p->operation, p->w, p->x, p->y, p->y, preference, 1, &found, &n_found));
	if (n_found < 1)
		lt_failed("an algorithm for a matrix product", CUBLAS_STATUS_NOT_SUPPORTED);
	p->algorithm = found.algo;
	cublasLtMatmulPreferenceDestroy(preference);
}

static void drop_plan(struct cuda_plan *p)
{
	cublasLtMatmulDescDestroy(p->operation);
	cublasLtMatrixLayoutDestroy(p->w);
	cublasLtMatrixLayoutDestroy(p->x);
	cublasLtMatrixLayoutDestroy(p->y);
}

// Plans are kept in order of last use.
static const struct cuda_plan *find_plan(struct ops_context *c, const struct cuda_plan *wanted)
{
	int at = 0;
	while (at < c->n_plans && !same_plan(&c->plans[at], wanted))
		at++;
	struct cuda_plan p = *wanted;
	if (at < c->n_plans) {
		p = c->plans[at];
	} else {
		make_plan(c, &p);
		if (c->n_plans == CUDA_PLANS)
			drop_plan(&c->plans[--at]);
		else
			c->n_plans++;
	}
	memmove(c->plans + 1, c->plans, (size_t)at * sizeof p);
	c->plans[0] = p;
	return &c->plans[0];
}

// y[n, rows] (+)= x[n, cols] w[rows, cols]^T with rows of y `stride` apart.
static void multiply_plain(struct ops_context *c, const void *w, int64_t rows, int64_t cols, const void *x, int n,
                           void *y, int64_t stride, bool y_float32, bool add)
{
	const struct cuda_plan *p = find_plan(c, &(struct cuda_plan){
		.rows = rows, .cols = cols, .n = n, .stride = stride, .in = lt_type(c->act),
		.out = y_float32 ? CUDA_R_32F : lt_type(c->act), .add = add});
	float one = 1, kept = add ? 1 : 0;
	LT_MUST(cublasLtMatmul(c->lt, p->operation, &one, w, p->w, x, p->x, &kept, y, p->y, y, p->y, &p->algorithm,
	                       c->lt_workspace, CUDA_LT_WORKSPACE, c->stream));
}

static void multiply_large(struct ops_context *c, const struct weight *w, const float *bias, const void *x, int n,
                           void *y, bool y_float32, bool add)
{
	if (bias) {
		ASSERT(!add);
		cuda_fill_bias(c, y, y_float32, bias, n, w->rows);
		add = true;
	}
	if (w->dtype == c->act) {
		multiply_plain(c, w->memory, w->rows, w->cols, x, n, y, w->rows, y_float32, add);
		return;
	}
	int64_t chunk = CUDA_DEQUANT_ELEMENTS / w->cols / CUDA_TILE_ROWS * CUDA_TILE_ROWS;
	chunk = chunk < CUDA_TILE_ROWS ? CUDA_TILE_ROWS : chunk > w->rows ? w->rows : chunk;
	size_t y_bytes = y_float32 ? sizeof(float) : cuda_dtype_bytes(c->act);
	void *plain = cuda_scratch(c, SCRATCH_DEQUANT, (size_t)chunk * (size_t)w->cols * cuda_dtype_bytes(c->act));
	for (int64_t first = 0; first < w->rows; first += chunk) {
		int64_t rows = w->rows - first < chunk ? w->rows - first : chunk;
		cuda_weight_expand(c, w, first, rows, plain);
		multiply_plain(c, plain, rows, w->cols, x, n, (char *)y + (size_t)first * y_bytes, w->rows, y_float32, add);
	}
}

static bool multiply_eight(struct ops_context *c, enum dtype t, const struct cuda_matvec *m)
{
	if (t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16)
		return cuda_matvec_plain(c, t, m);
	if (m->cols % 4 || c->act == DTYPE_F32)
		return false;
	return c->act == DTYPE_F16 ? cuda_matvec_quant_f16(c, t, m) : cuda_matvec_quant_bf16(c, t, m);
}

// Any number of rows, 8 at a time.
static bool multiply_small(struct ops_context *c, enum dtype t, const struct cuda_matvec *all)
{
	size_t size = cuda_dtype_bytes(c->act), y_size = all->y_float32 ? sizeof(float) : size;
	for (int row = 0; row < all->n_rows; row += CUDA_MATVEC_ROWS) {
		struct cuda_matvec m = *all;
		m.n_rows = all->n_rows - row < CUDA_MATVEC_ROWS ? all->n_rows - row : CUDA_MATVEC_ROWS;
		m.x = (const char *)all->x + (size_t)row * (size_t)all->cols * size;
		for (int p = 0; p < m.n_parts; p++)
			if (m.part[p].y)
				m.part[p].y = (char *)m.part[p].y + (size_t)row * (size_t)m.part[p].rows * y_size;
		if (!multiply_eight(c, t, &m))
			return false;
	}
	return true;
}

static struct cuda_matvec_part part_of(const struct matmul_args *a, int i)
{
	const struct weight *w = a->part[i].w;
	return (struct cuda_matvec_part){w->memory, w->planes, a->part[i].bias, a->part[i].y, w->rows};
}

// Neighbouring parts of one type share a launch.
static int small_group(struct ops_context *c, const struct matmul_args *a, int first)
{
	enum dtype t = a->part[first].w->dtype;
	struct cuda_matvec m = {.n_rows = a->n_rows, .cols = a->part[0].w->cols, .k_tiles = a->part[first].w->k_tiles,
	                        .x = a->x, .swiglu = a->swiglu, .add = a->add, .y_float32 = a->y_float32};
	while (first + m.n_parts < a->n_parts && a->part[first + m.n_parts].w->dtype == t) {
		m.part[m.n_parts] = part_of(a, first + m.n_parts);
		m.n_parts++;
	}
	if (a->swiglu && m.n_parts < 2)
		return 0;
	return multiply_small(c, t, &m) ? m.n_parts : 0;
}

static void gated_large(struct ops_context *c, const struct matmul_args *a)
{
	int64_t rows = a->part[0].w->rows;
	size_t bytes = (size_t)a->n_rows * (size_t)rows * cuda_dtype_bytes(c->act);
	char *both = cuda_scratch(c, SCRATCH_MATMUL, 2 * bytes);
	for (int i = 0; i < 2; i++)
		multiply_large(c, a->part[i].w, a->part[i].bias, a->x, a->n_rows, both + (size_t)i * bytes, false, false);
	cuda_silu_mul(c, a->part[0].y, both, both + bytes, (int64_t)a->n_rows * rows);
}

void cuda_matmul(struct ops_context *c, const struct matmul_args *a)
{
	if (a->n_rows < 1)
		return;
	ASSERT(a->n_parts >= 1 && a->n_parts <= 3);
	ASSERT(!a->swiglu || (a->n_parts == 2 && a->part[0].w->rows == a->part[1].w->rows && !a->y_float32));
	ASSERT(!a->add || (a->n_parts == 1 && !a->swiglu));
	for (int i = 0; i < a->n_parts; i++)
		ASSERT(a->part[i].w->cols == a->part[0].w->cols);
	for (int i = 0; i < a->n_parts;) {
		bool quantised = a->part[i].w->k_tiles > 0;
		int done = a->n_rows <= (quantised ? CUDA_QUANT_ROWS : CUDA_MATVEC_ROWS) ? small_group(c, a, i) : 0;
		if (!done && a->swiglu) {
			gated_large(c, a);
			done = 2;
		} else if (!done) {
			const struct weight *w = a->part[i].w;
			const float *bias = a->part[i].bias;
			multiply_large(c, w, a->add ? NULL : bias, a->x, a->n_rows, a->part[i].y, a->y_float32, a->add);
			if (a->add && bias)
				cuda_add_bias(c, a->part[i].y, a->y_float32, bias, a->n_rows, w->rows);
			done = 1;
		}
		i += done;
	}
}
