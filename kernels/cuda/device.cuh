// Small pieces that kernels share: conversions, reductions, tensor-core products, and the choice of a type at launch.
#ifndef STAGECOACH_KERNELS_DEVICE_CUH
#define STAGECOACH_KERNELS_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "kernels/cuda/cuda.h"

typedef __nv_bfloat16 bfloat;
typedef __nv_fp8_e4m3 fp8;

static __device__ inline float to_float(float x) { return x; }
static __device__ inline float to_float(half x) { return __half2float(x); }
static __device__ inline float to_float(bfloat x) { return __bfloat162float(x); }
static __device__ inline float to_float(fp8 x) { return (float)x; }

template <typename T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline half from_float<half>(float x) { return __float2half_rn(x); }
template <> __device__ inline bfloat from_float<bfloat>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ inline fp8 from_float<fp8>(float x) { return fp8(x); } // saturates at 448

template <typename T> __device__ inline uint32_t pack2(float low, float high);
template <> __device__ inline uint32_t pack2<half>(float low, float high)
{
	half2 v = __floats2half2_rn(low, high);
	return *reinterpret_cast<uint32_t *>(&v);
}
template <> __device__ inline uint32_t pack2<bfloat>(float low, float high)
{
	__nv_bfloat162 v = __floats2bfloat162_rn(low, high);
	return *reinterpret_cast<uint32_t *>(&v);
}

// Read once: past the first cache, first to leave the second.
static __device__ inline uint4 load_stream(const void *p)
{
	uint4 v;
	asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
	             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
	return v;
}

static __device__ inline uint4 zero4()
{
	return make_uint4(0, 0, 0, 0);
}

// d += A B with A [16, 16] and B [16, 8]. Lane 4g+c holds of A: rows g and g+8, columns 2c, 2c+1 (a0, a1) and 2c+8,
// 2c+9 (a2, a3); of B: column g, rows 2c, 2c+1 (b0) and 2c+8, 2c+9 (b1); of d: rows g (d0, d1) and g+8, columns 2c, 2c+1.
template <typename T>
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<bfloat>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                   uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
	             "{%0,%1,%2,%3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
	             "{%0,%1,%2,%3};"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
	             : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ inline float warp_sum(float x)
{
	for (int i = 16; i > 0; i /= 2)
		x += __shfl_xor_sync(0xffffffff, x, i);
	return x;
}

// The sum over a block of up to 1,024 threads, in every thread, always in the same order.
static __device__ inline float block_sum(float x)
{
	__shared__ float part[32];
	int warps = (blockDim.x + 31) / 32;
	x = warp_sum(x);
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		part[threadIdx.x / 32] = x;
	__syncthreads();
	return warp_sum((int)(threadIdx.x % 32) < warps ? part[threadIdx.x % 32] : 0.0f);
}

#define CUDA_LAUNCHED() CUDA_MUST(cudaGetLastError())

// Calls f with a value of the activation type: with_act(c, [&](auto t) { using T = decltype(t); ... }).
template <typename F> static inline void with_act(const struct ops_context *c, F f)
{
	switch (c->act) {
	case DTYPE_F32: f(float()); break;
	case DTYPE_F16: f(half()); break;
	case DTYPE_BF16: f(bfloat()); break;
	default: cuda_failed("type of activations", __FILE__, __LINE__, dtype_info(c->act)->name);
	}
}

template <typename F> static inline void with_kv(enum dtype t, F f)
{
	switch (t) {
	case DTYPE_F32: f(float()); break;
	case DTYPE_F16: f(half()); break;
	case DTYPE_BF16: f(bfloat()); break;
	case DTYPE_FP8: f(fp8()); break;
	default: cuda_failed("type of KV", __FILE__, __LINE__, dtype_info(t)->name);
	}
}

#endif
