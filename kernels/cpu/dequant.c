// The element layouts of model files; see dequant.h. Scalar on purpose: it runs once per weight at load, and once per
// looked-up embedding row.
#include "kernels/cpu/dequant.h"

#include <string.h>

#include "common/status.h"
#include "kernels/cpu/cpu.h"

static uint16_t load_u16(const uint8_t *p)
{
	uint16_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

static uint32_t load_u32(const uint8_t *p)
{
	uint32_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

static void read_nibbles(const uint8_t *p, uint8_t *q)
{
	for (int i = 0; i < 16; i++) {
		q[i] = p[i] & 15;
		q[i + 16] = p[i] >> 4;
	}
}

static void add_fifth_bits(uint32_t bits, uint8_t *q)
{
	for (int i = 0; i < 32; i++)
		q[i] |= (bits >> i & 1) << 4;
}

// The eight 6-bit scales and minimums of Q4_K and Q5_K share 12 bytes.
static void read_k_scale(const uint8_t *s, int i, uint8_t *scale, uint8_t *minimum)
{
	if (i < 4) {
		*scale = s[i] & 63;
		*minimum = s[i + 4] & 63;
	} else {
		*scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
		*minimum = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
	}
}

int quant_offset(enum dtype t)
{
	switch (t) {
	case DTYPE_Q4_0: return 8;
	case DTYPE_Q5_0: return 16;
	case DTYPE_Q6_K: return 32;
	case DTYPE_Q8_0: return 128;
	default: return 0;
	}
}

// block 32: the scale is one float16, perhaps with a minimum, and quants follow.
static const uint8_t *read_simple_scale(const uint8_t *p, bool minimum, struct quant_block *b)
{
	b->raw_d = load_u16(p);
	b->scale[0] = b->scale[1] = cpu_half_to_float(b->raw_d);
	if (!minimum)
		return p + 2;
	b->raw_m = load_u16(p + 2);
	b->minimum = cpu_half_to_float(b->raw_m);
	return p + 4;
}

static void read_k(const uint8_t *p, int sub, bool fifth, struct quant_block *b)
{
	b->raw_d = load_u16(p);
	b->raw_m = load_u16(p + 2);
	read_k_scale(p + 4, sub, &b->raw_scale[0], &b->raw_minimum);
	b->raw_scale[1] = b->raw_scale[0];
	b->scale[0] = b->scale[1] = cpu_half_to_float(b->raw_d) * (float)b->raw_scale[0];
	b->minimum = -(cpu_half_to_float(b->raw_m) * (float)b->raw_minimum);
	const uint8_t *high = p + 16, *low = (fifth ? high + 32 : high) + 32 * (sub / 2);
	for (int i = 0; i < 32; i++) {
		b->q[i] = low[i] >> 4 * (sub & 1) & 15;
		if (fifth)
			b->q[i] |= (high[i] >> sub & 1) << 4;
	}
}

static void read_6k(const uint8_t *p, int sub, struct quant_block *b)
{
	int half = sub / 4, quarter = sub % 4;
	const uint8_t *low = p + 64 * half + 32 * (quarter & 1), *high = p + 128 + 32 * half;
	for (int i = 0; i < 32; i++)
		b->q[i] = (low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4;
	b->raw_d = load_u16(p + 208);
	for (int i = 0; i < 2; i++) {
		b->raw_scale[i] = p[192 + 2 * sub + i];
		b->scale[i] = cpu_half_to_float(b->raw_d) * (float)(int8_t)b->raw_scale[i];
	}
}

void quant_read(enum dtype t, const void *row, int64_t index, struct quant_block *b)
{
	const struct dtype_info *info = dtype_info(t);
	const int subs = info->block_elements / 32;
	const uint8_t *p = (const uint8_t *)row + index / (subs ? subs : 1) * info->block_bytes;
	b->minimum = 0;
	b->raw_m = 0;
	b->raw_minimum = b->raw_scale[0] = b->raw_scale[1] = 0;
	switch (t) {
	case DTYPE_Q4_0:
	case DTYPE_Q4_1:
		read_nibbles(read_simple_scale(p, t == DTYPE_Q4_1, b), b->q);
		break;
	case DTYPE_Q5_0:
	case DTYPE_Q5_1:
		p = read_simple_scale(p, t == DTYPE_Q5_1, b);
		read_nibbles(p + 4, b->q);
		add_fifth_bits(load_u32(p), b->q);
		break;
	case DTYPE_Q8_0:
		p = read_simple_scale(p, false, b);
		for (int i = 0; i < 32; i++)
			b->q[i] = p[i] ^ 0x80;
		break;
	case DTYPE_Q4_K:
	case DTYPE_Q5_K:
		read_k(p, (int)(index % 8), t == DTYPE_Q5_K, b);
		break;
	case DTYPE_Q6_K:
		read_6k(p, (int)(index % 8), b);
		break;
	default:
		ASSERT(!"a quantised type");
	}
}

void dequant_row(enum dtype t, const void *row, int64_t n, float *out)
{
	struct quant_block b;
	switch (t) {
	case DTYPE_F32:
		memcpy(out, row, (size_t)n * sizeof *out);
		return;
	case DTYPE_F16:
		for (int64_t i = 0; i < n; i++)
			out[i] = cpu_half_to_float(load_u16((const uint8_t *)row + 2 * i));
		return;
	case DTYPE_BF16:
		for (int64_t i = 0; i < n; i++)
			out[i] = cpu_bfloat_to_float(load_u16((const uint8_t *)row + 2 * i));
		return;
	default:
		for (int64_t i = 0; i < n / 32; i++, out += 32) {
			quant_read(t, row, i, &b);
			for (int j = 0; j < 32; j++)
				out[j] = b.scale[j / 16] * (float)(b.q[j] - quant_offset(t)) + b.minimum;
		}
	}
}
