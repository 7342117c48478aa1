#include "kernels/cuda/attention_mma.cuh"

bool cuda_attention_f16(struct ops_context *c, const struct attention_args *a)
{
	return attention_mma<half>(c, a);
}
