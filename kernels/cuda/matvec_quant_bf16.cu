#include "kernels/cuda/matvec_quant.cuh"

bool cuda_matvec_quant_bf16(struct ops_context *c, enum dtype weights, const struct cuda_matvec *m)
{
	return matvec_quant<bfloat>(c, weights, m);
}
