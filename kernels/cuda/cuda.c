// Owns the CUDA context (device, stream, scratch) and the table of operations. The surprising decision: a failing call
// ends the process. After an illegal address nothing on the device can be trusted; the coordinator replays elsewhere.
#include "kernels/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>

void cuda_failed(const char *call, const char *file, int line, const char *text)
{
	log_error("%s:%d: %s: %s", file, line, call, text);
	_Exit(STATUS_FATAL);
}

static void destroy(struct ops_context **context)
{
	struct ops_context *c = *context;
	*context = NULL;
	if (!c)
		return;
	if (c->stream) {
		cudaStreamSynchronize(c->stream);
		cudaStreamDestroy(c->stream);
	}
	for (int i = 0; i < c->n_plans; i++) {
		cublasLtMatmulDescDestroy(c->plans[i].operation);
		cublasLtMatrixLayoutDestroy(c->plans[i].w);
		cublasLtMatrixLayoutDestroy(c->plans[i].x);
		cublasLtMatrixLayoutDestroy(c->plans[i].y);
	}
	if (c->lt)
		cublasLtDestroy(c->lt);
	cudaFree(c->lt_workspace);
	for (size_t i = 0; i < sizeof c->scratch / sizeof *c->scratch; i++)
		cudaFree(c->scratch[i]);
	cudaFree(c->counts);
	cudaFreeHost(c->pinned);
	free(c);
}

static enum status set_up(struct ops_context *c, struct error *e)
{
	struct cudaDeviceProp p;
	cudaError_t failed = cudaSetDevice(c->device);
	if (failed == cudaSuccess)
		failed = cudaGetDeviceProperties(&p, c->device);
	if (failed != cudaSuccess)
		return error_set(e, STATUS_UNAVAILABLE, "cuda:%d: %s", c->device, cudaGetErrorString(failed));
	if (p.major < 8)
		return error_set(e, STATUS_UNAVAILABLE, "cuda:%d (%s): expected compute capability 8.0 or later, found %d.%d",
		                 c->device, p.name, p.major, p.minor);
	c->multiprocessors = p.multiProcessorCount;
	snprintf(c->description, sizeof c->description, "%.100s, compute capability %d.%d, activations %s", p.name, p.major,
	         p.minor, dtype_info(c->act)->name);
	int priority_low = 0, priority_high = 0;
	cudaDeviceGetStreamPriorityRange(&priority_low, &priority_high);
	failed = cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, priority_low);
	if (failed == cudaSuccess)
		failed = cudaMalloc(&c->lt_workspace, CUDA_LT_WORKSPACE);
	if (failed != cudaSuccess)
		return error_set(e, STATUS_UNAVAILABLE, "cuda:%d: %s", c->device, cudaGetErrorString(failed));
	if (cublasLtCreate(&c->lt) != CUBLAS_STATUS_SUCCESS)
		return error_set(e, STATUS_UNAVAILABLE, "cuda:%d: cuBLASLt does not start", c->device);
	return STATUS_OK;
}

static enum status create(struct ops_context **out, const struct ops_options *o, struct error *e)
{
	*out = NULL;
	if (o->act != DTYPE_F32 && o->act != DTYPE_F16 && o->act != DTYPE_BF16)
		return error_set(e, STATUS_USAGE, "activations on a GPU: expected f32, f16 or bf16, found %s",
		                 dtype_info(o->act)->name);
	struct ops_context *c = xcalloc(1, sizeof *c);
	c->device = o->device;
	c->act = o->act;
	c->max_rows = o->max_rows;
	enum status status;
	TRY_GOTO(set_up(c, e), out);
out:
	if (status != STATUS_OK)
		destroy(&c);
	*out = c;
	return status;
}

static const char *describe(const struct ops_context *c)
{
	return c->description;
}

static enum ops_isa isa_in_use(const struct ops_context *c)
{
	return ISA_AUTO;
}

static void *alloc(struct ops_context *c, size_t bytes)
{
	void *p = NULL;
	if (cudaMalloc(&p, bytes ? bytes : 1) != cudaSuccess) {
		cudaGetLastError(); // no room is an answer, not a fault
		return NULL;
	}
	CUDA_MUST(cudaMemsetAsync(p, 0, bytes, c->stream));
	CUDA_MUST(cudaStreamSynchronize(c->stream));
	return p;
}

static void release(struct ops_context *c, void *p)
{
	CUDA_MUST(cudaStreamSynchronize(c->stream));
	CUDA_MUST(cudaFree(p));
}

static bool must_grow(size_t have, size_t *bytes)
{
	if (*bytes <= have)
		return false;
	*bytes = (*bytes + *bytes / 4 + 255) / 256 * 256;
	return true;
}

void *cuda_scratch(struct ops_context *c, enum cuda_scratch_use use, size_t bytes)
{
	if (must_grow(c->scratch_bytes[use], &bytes)) {
		CUDA_MUST(cudaStreamSynchronize(c->stream));
		CUDA_MUST(cudaFree(c->scratch[use]));
		CUDA_MUST(cudaMalloc(&c->scratch[use], bytes));
		c->scratch_bytes[use] = bytes;
	}
	return c->scratch[use];
}

void *cuda_pinned(struct ops_context *c, size_t bytes)
{
	if (must_grow(c->pinned_bytes, &bytes)) {
		CUDA_MUST(cudaStreamSynchronize(c->stream));
		CUDA_MUST(cudaFreeHost(c->pinned));
		CUDA_MUST(cudaMallocHost(&c->pinned, bytes));
		c->pinned_bytes = bytes;
	}
	return c->pinned;
}

int32_t *cuda_counts(struct ops_context *c, size_t elements)
{
	size_t bytes = elements * sizeof *c->counts;
	if (must_grow(c->counts_bytes, &bytes)) {
		CUDA_MUST(cudaStreamSynchronize(c->stream));
		CUDA_MUST(cudaFree(c->counts));
		CUDA_MUST(cudaMalloc((void **)&c->counts, bytes));
		CUDA_MUST(cudaMemsetAsync(c->counts, 0, bytes, c->stream));
		c->counts_bytes = bytes;
	}
	return c->counts;
}

void cuda_attention(struct ops_context *c, const struct attention_args *a)
{
	if (a->n_rows < 1)
		return;
	if (c->act == a->kv.dtype && (c->act == DTYPE_BF16 ? cuda_attention_bf16(c, a) : c->act == DTYPE_F16 && cuda_attention_f16(c, a)))
		return;
	cuda_attention_any(c, a);
}

const struct ops *ops_cuda(void)
{
	static const struct ops table = {
		.name = "cuda",
		.create = create,
		.destroy = destroy,
		.describe = describe,
		.isa = isa_in_use,
		.measure = cuda_measure,
		.alloc = alloc,
		.free = release,
		.weight_supported = cuda_weight_supported,
		.weight_create = cuda_weight_create,
		.weight_destroy = cuda_weight_destroy,
		.weight_bytes = cuda_weight_bytes,
		.weight_borrows = cuda_weight_borrows,
		.weight_bytes_predicted = cuda_weight_bytes_predicted,
		.embed = cuda_embed,
		.rms_norm = cuda_rms_norm,
		.matmul = cuda_matmul,
		.rope_kv = cuda_rope_kv,
		.attention = cuda_attention,
		.sample = cuda_sample,
	};
	return &table;
}
