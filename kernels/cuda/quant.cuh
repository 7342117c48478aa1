// How quantised matrices lie on a GPU, and how a lane of a warp turns its share of a tile into operands of m16n8k16.
//
// A tile is 16 rows by 64 columns, read by one warp in whole 16-byte words. Lane 4g+c holds rows g and g+8; in step j
// (0..3) columns 16j+4c .. 16j+4c+3. Those four columns are the tensor core's columns 2c, 2c+1, 2c+8, 2c+9: any order
// will do, as long as x is read in the same one. Operand a0 is row g, columns +0, +1; a1 row g+8, the same; a2 and a3
// columns +2, +3. Quants enter as whole numbers, which bfloat16 holds exactly up to 256, and the scale of each 16 or 32
// columns multiplies the float32 sum: no weight is ever rounded.
//
// Word j of the low plane: nibble i holds the first column of operand a_i in step j, nibble i+4 the second (for Q8_0 two
// words a step: bytes 0, 2 are a0 or a2, bytes 1, 3 are a1 or a3). High bits lie at the same places.
#ifndef STAGECOACH_KERNELS_QUANT_CUH
#define STAGECOACH_KERNELS_QUANT_CUH

#include "kernels/cuda/device.cuh"

enum quant_scales { SCALES_HALF, SCALES_HALF_MIN, SCALES_K, SCALES_6K };

template <enum dtype Q> struct quant;
#define QUANT(type, low_words, high_bits, shift, kind, scale_bytes_, super_bytes_)                                     \
	template <> struct quant<type> {                                                                               \
		static const int words = low_words, high = high_bits, offset = shift;                                  \
		static const enum quant_scales scales = kind;                                                          \
		static const int scale_bytes = scale_bytes_, super_bytes = super_bytes_; /* per pair of rows */        \
		static const bool minimum = kind == SCALES_HALF_MIN || kind == SCALES_K;                               \
	}
QUANT(DTYPE_Q4_0, 4, 0, 8, SCALES_HALF, 8, 0);
QUANT(DTYPE_Q4_1, 4, 0, 0, SCALES_HALF_MIN, 16, 0);
QUANT(DTYPE_Q5_0, 4, 1, 16, SCALES_HALF, 8, 0);
QUANT(DTYPE_Q5_1, 4, 1, 0, SCALES_HALF_MIN, 16, 0);
QUANT(DTYPE_Q8_0, 8, 0, 0, SCALES_HALF, 8, 0);
QUANT(DTYPE_Q4_K, 4, 0, 0, SCALES_K, 8, 8);
QUANT(DTYPE_Q5_K, 4, 1, 0, SCALES_K, 8, 8);
QUANT(DTYPE_Q6_K, 4, 2, 32, SCALES_6K, 8, 4);
#undef QUANT

template <typename F> static inline bool with_quant(enum dtype t, F f)
{
#define CASE(type)                                                                                                     \
	case type: f(quant<type>()); return true
	switch (t) {
		CASE(DTYPE_Q4_0);
		CASE(DTYPE_Q4_1);
		CASE(DTYPE_Q5_0);
		CASE(DTYPE_Q5_1);
		CASE(DTYPE_Q8_0);
		CASE(DTYPE_Q4_K);
		CASE(DTYPE_Q5_K);
		CASE(DTYPE_Q6_K);
	default: return false;
	}
#undef CASE
}

// What one lane reads of one tile.
template <typename Q> struct quant_lane {
	uint32_t low[Q::words], high[Q::high ? Q::high : 1];
	uint32_t scale[4], super[2];
};

// A lane's view of 16 rows; load() takes its words of one tile.
template <typename Q> struct quant_row {
	const uint4 *low;
	const uint32_t *high, *scale, *super;

	__device__ inline quant_row(const struct cuda_planes &p, int64_t row_tile, int64_t k_tiles, int lane)
	{
		int64_t tile = row_tile * k_tiles, g = lane / 4;
		low = p.low + tile * (Q::words / 4) * 32 + lane;
		high = p.high + (tile * 32 + lane) * Q::high;
		scale = (const uint32_t *)(p.scale + (tile * 8 + g) * Q::scale_bytes);
		super = (const uint32_t *)(p.super + (row_tile * (k_tiles / 4) * 8 + g) * Q::super_bytes);
	}

	__device__ inline void load(quant_lane<Q> &l, int tile) const
	{
#pragma unroll
		for (int i = 0; i < Q::words / 4; i++) {
			uint4 v = load_stream(low + (tile * (Q::words / 4) + i) * 32);
			l.low[4 * i] = v.x;
			l.low[4 * i + 1] = v.y;
			l.low[4 * i + 2] = v.z;
			l.low[4 * i + 3] = v.w;
		}
		if constexpr (Q::high == 1)
			l.high[0] = __ldg(high + tile * 32);
		if constexpr (Q::high == 2) {
			uint2 v = __ldg((const uint2 *)(high + tile * 64));
			l.high[0] = v.x;
			l.high[1] = v.y;
		}
		if constexpr (Q::scale_bytes == 8) {
			uint2 v = __ldg((const uint2 *)(scale + tile * 16));
			l.scale[0] = v.x;
			l.scale[1] = v.y;
		} else {
			uint4 v = __ldg((const uint4 *)(scale + tile * 32));
			l.scale[0] = v.x;
			l.scale[1] = v.y;
			l.scale[2] = v.z;
			l.scale[3] = v.w;
		}
		if constexpr (Q::super_bytes == 4)
			l.super[0] = __ldg(super + tile / 4 * 8);
		if constexpr (Q::super_bytes == 8) {
			uint2 v = __ldg((const uint2 *)(super + tile / 4 * 16));
			l.super[0] = v.x;
			l.super[1] = v.y;
		}
	}
};

static __device__ inline float half_of(uint32_t pair, int i)
{
	return __half2float(__ushort_as_half((unsigned short)(i ? pair >> 16 : pair & 0xffff)));
}

// Scale and minimum of rows g (0) and g+8 (1) in step j.
template <typename Q>
__device__ inline void quant_scale(const quant_lane<Q> &l, int j, float (&scale)[2], float (&minimum)[2])
{
#pragma unroll
	for (int r = 0; r < 2; r++) {
		minimum[r] = 0;
		if (Q::scales == SCALES_6K) {
			scale[r] = half_of(l.super[0], r) * (float)(int8_t)(l.scale[j / 2] >> (16 * (j % 2) + 8 * r));
		} else if (Q::scales == SCALES_K) {
			scale[r] = half_of(l.super[0], r) * (float)(l.scale[0] >> (16 * (j / 2) + 8 * r) & 255);
			minimum[r] = -(half_of(l.super[1], r) * (float)(l.scale[1] >> (16 * (j / 2) + 8 * r) & 255));
		} else {
			scale[r] = half_of(l.scale[j / 2], r);
			if (Q::scales == SCALES_HALF_MIN)
				minimum[r] = half_of(l.scale[2 + j / 2], r);
		}
	}
}

// Two whole numbers below 128 (bfloat16) or 256 (half) in the low bits of each half of q, less `offset`.
template <typename T> __device__ inline uint32_t quant_numbers(uint32_t q, int offset);
template <> __device__ inline uint32_t quant_numbers<half>(uint32_t q, int offset)
{
	q |= 0x64006400; // 1024 + q
	half2 base = __half2half2(__int2half_rn(1024 + offset)), v = __hsub2(*reinterpret_cast<half2 *>(&q), base);
	return *reinterpret_cast<uint32_t *>(&v);
}
template <> __device__ inline uint32_t quant_numbers<bfloat>(uint32_t q, int offset)
{
	q |= 0x43004300; // 128 + q
	__nv_bfloat162 base = __bfloat162bfloat162(__int2bfloat16_rn(128 + offset));
	__nv_bfloat162 v = __hsub2(*reinterpret_cast<__nv_bfloat162 *>(&q), base);
	return *reinterpret_cast<uint32_t *>(&v);
}

// Two signed bytes, at bits 0..7 and 16..23.
template <typename T> __device__ inline uint32_t quant_bytes(uint32_t q);
template <> __device__ inline uint32_t quant_bytes<half>(uint32_t q)
{
	return quant_numbers<half>(q ^ 0x00800080, 128);
}
template <> __device__ inline uint32_t quant_bytes<bfloat>(uint32_t q)
{
	// bfloat16 has 7 bits behind the point: 128 + the low seven bits, less 128 or, if the sign bit is set, 256.
	uint32_t low = (q & 0x007f007f) | 0x43004300, less = (q & 0x00800080) | 0x43004300;
	__nv_bfloat162 v = __hsub2(*reinterpret_cast<__nv_bfloat162 *>(&low), *reinterpret_cast<__nv_bfloat162 *>(&less));
	return *reinterpret_cast<uint32_t *>(&v);
}

// Operands of step j as whole numbers, less the offset.
template <typename T, typename Q>
__device__ inline void quant_operands(const quant_lane<Q> &l, int j, uint32_t (&a)[4])
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		if constexpr (Q::words == 8) {
			a[i] = quant_bytes<T>(l.low[2 * j + i / 2] >> 8 * (i % 2) & 0x00ff00ff);
		} else {
			uint32_t q = l.low[j] >> 4 * i & 0x000f000f;
			if constexpr (Q::high == 1)
				q |= (l.high[0] >> (4 * j + i) & 0x00010001) << 4;
			if constexpr (Q::high == 2)
				q |= (l.high[j / 2] >> 2 * (4 * (j % 2) + i) & 0x00030003) << 4;
			a[i] = quant_numbers<T>(q, Q::offset);
		}
	}
}

#endif
