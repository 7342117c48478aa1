#include "kernels/cuda/matvec_quant.cuh"

bool cuda_matvec_quant_f16(struct ops_context *c, enum dtype weights, const struct cuda_matvec *m)
{
	return matvec_quant<half>(c, weights, m);
}
