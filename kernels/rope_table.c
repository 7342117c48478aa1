// Owns the numerics of RoPE frequencies. The surprising decision: scalar / tensor is written as reciprocal times scalar,
// since that is how torch evaluates it, and the last bit matters (see the header).
#include "kernels/rope_table.h"

#include <math.h>

static float llama3(const struct rope_table_options *o, float f)
{
	float context = (float)o->original_context;
	float low_wavelength = (float)((double)o->original_context / o->low_freq_factor);
	float high_wavelength = (float)((double)o->original_context / o->high_freq_factor);
	float wavelength = 1.0f / f * (float)(2 * M_PI);
	if (wavelength > low_wavelength)
		return f / o->factor;
	if (wavelength < high_wavelength)
		return f;
	float smooth = (1.0f / wavelength * context - o->low_freq_factor) /
	               (float)((double)o->high_freq_factor - o->low_freq_factor);
	return (1.0f - smooth) * f / o->factor + smooth * f;
}

void rope_frequencies(float *out, const struct rope_table_options *o)
{
	for (int i = 0; i < o->rope_dim / 2; i++) {
		float f = 1.0f / powf(o->theta, (float)(2 * i) / (float)o->rope_dim);
		if (o->factors)
			f /= o->factors[i];
		if (o->scaling == ROPE_SCALING_LINEAR)
			f /= o->factor;
		else if (o->scaling == ROPE_SCALING_LLAMA3)
			f = llama3(o, f);
		out[i] = f;
	}
}

void rope_table(float *out, const struct rope_table_options *o)
{
	int half = o->rope_dim / 2;
	// The frequencies stand in the row of position 0 until that row is written, last.
	float *frequency = out;
	rope_frequencies(frequency, o);
	for (int64_t p = o->max_position - 1; p >= 0; p--)
		for (int i = half - 1; i >= 0; i--) {
			float angle = (float)p * frequency[i];
			float *to = out + (p * half + i) * 2;
			to[0] = cosf(angle);
			to[1] = sinf(angle);
		}
}
