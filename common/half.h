// float16 as bits. The surprising decision: no use of _Float16, since clang 14 refuses it on processors without its own
// half-precision arithmetic, and the fuzz targets are built with clang. Vector code uses the F16C instructions instead.
#ifndef STAGECOACH_COMMON_HALF_H
#define STAGECOACH_COMMON_HALF_H

#include <stdint.h>
#include <string.h>

static inline float half_to_float(uint16_t h)
{
	// The exponent moves from bias 15 to bias 127 by one multiplication, which also makes subnormals exact.
	uint32_t u = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
	float f;
	if ((h & 0x7c00) == 0x7c00) {
		u |= 0x7f800000;
		memcpy(&f, &u, 4);
	} else {
		memcpy(&f, &u, 4);
		f *= 0x1p112f;
	}
	memcpy(&u, &f, 4);
	u |= sign;
	memcpy(&f, &u, 4);
	return f;
}

// Round to nearest, ties to even; overflow becomes infinity, NaN stays NaN.
static inline uint16_t half_from_float(float f)
{
	uint32_t u;
	memcpy(&u, &f, 4);
	uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
	u &= 0x7fffffff;
	if (u > 0x7f800000)
		return sign | 0x7e00;
	if (u >= 0x477ff000) // 65520 and above
		return sign | 0x7c00;
	if (u < 0x38800000) { // below 2^-14: let the adder round at 2^-24
		float a;
		memcpy(&a, &u, 4);
		a += 0.5f;
		memcpy(&u, &a, 4);
		return (uint16_t)(sign | (u - 0x3f000000));
	}
	u += 0xfff + (u >> 13 & 1);
	return (uint16_t)(sign | ((u - 0x38000000) >> 13));
}

#endif
