// Sums of h over its rows in one fixed order, whatever kernel makes h: rows r, r + 4, .., r + 28 of
// 32 rows one by one, these four sums pairwise, four such blocks one by one, and then the blocks
// of 128 rows in JoinSums. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_COLUMN_SUM_CUH_
#define TE_FLAX_CUDA_KERNELS_COLUMN_SUM_CUH_

#include "cuda/kernels/source.cuh"

namespace te_flax::cuda {

constexpr int kSumRows = 128;  // of h in one row of Outputs::sums

// a + b, where subnormal terms and sums are zeros.
__device__ inline float AddFtz(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// The sums of one lane, over its rows in ascending order.
struct LaneSums {
  float of[kPack] = {};

  template <Float dtype>
  __device__ void Add(const Pack<dtype>& pack) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) of[j] = AddFtz(of[j], __uint_as_float(pack.Bits(j)));
  }

  // Joins the lanes that differ in this bit of their number.
  __device__ void Join(int distance) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      of[j] = AddFtz(of[j], __shfl_xor_sync(~0u, of[j], distance));
    }
  }

  __device__ void Store(float* to) const {
#pragma unroll
    for (int j = 0; j < kPack; ++j) to[j] = of[j];
  }
};

constexpr int kJoinColumns = 32;  // that one block makes

// Results of the kernel below, one or two.
struct Joined {
  float* first;
  float* second = nullptr;
};

// result[width] = the sum of parts[n, width]: rows r, r + kRows, .. one by one, then these sums.
// The second result's parts lie behind those of the first.
template <int kRows>
__global__ void __launch_bounds__(kJoinColumns* kRows)
    JoinSumsKernel(const uint32_t* noop, const float* __restrict__ parts, int64_t n, int64_t width,
                   Joined results) {
  if (Skips(noop)) return;
  float* const result = blockIdx.y == 0 ? results.first : results.second;
  parts += blockIdx.y * n * width;
  __shared__ float sums[kRows][kJoinColumns];
  const int64_t column = int64_t{blockIdx.x} * kJoinColumns + threadIdx.x;
  float sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int64_t r = threadIdx.y; r < n; r += kRows) {
      sum = AddFtz(sum, __ldg(parts + r * width + column));
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
  for (int r = 1; r < kRows; ++r) sum = AddFtz(sum, sums[r][threadIdx.x]);
  result[column] = QuietFloat(sum);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_COLUMN_SUM_CUH_
