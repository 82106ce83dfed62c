// Zeros that a device flag can hold back. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_CLEAR_CUH_
#define TE_FLAX_CUDA_KERNELS_CLEAR_CUH_

#include "cuda/kernels/numerics.cuh"

namespace te_flax::cuda {

template <int kThreads>
__global__ void ClearKernel(const uint32_t* noop, uint8_t* to, int64_t bytes) {
  if (Skips(noop)) return;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes; i += step) to[i] = 0;
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_CLEAR_CUH_
