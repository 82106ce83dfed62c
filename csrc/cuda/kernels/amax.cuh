// Largest finite magnitude of an array. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_AMAX_CUH_
#define TE_FLAX_CUDA_KERNELS_AMAX_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace te_flax::cuda {

// amax[0] = bits of the largest finite |x| (values below 2^-126 count as 0), amax[1] = bits of
// 1.0f when a NaN or Inf is met. Both start as 0; non-negative floats order like their bits.
__global__ void AmaxF32Kernel(const uint32_t* __restrict__ x, int64_t n, uint32_t* amax) {
  uint32_t largest = 0;
  bool special = false;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    const uint32_t magnitude = x[i] & 0x7fffffffu;
    const bool finite = magnitude < 0x7f800000u;
    if (finite && magnitude >= 0x00800000u) largest = max(largest, magnitude);
    special |= !finite;
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  special = __any_sync(0xffffffffu, special);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&amax[0], largest);
    if (special) atomicMax(&amax[1], 0x3f800000u);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_AMAX_CUH_
