// Sums of h over its rows in one fixed order, whatever kernel makes h: rows r, r + 4, .., r + 28 of
// 32 rows one by one, these four sums pairwise, four such blocks one by one, and then the blocks
// of 128 rows in JoinColumns. Raw pointers, no XLA or nanobind includes.
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

constexpr int kJoinRows = 8;

// result[first..] = the sum of parts[n, width] in the columns of a block, one for each kJoinRows
// threads: rows r, r + kJoinRows, .. one by one, then these sums. All threads of the block get
// here.
template <int kThreads>
__device__ inline void JoinColumns(const float* parts, int64_t n, int64_t width, int64_t first,
                                   float* result) {
  constexpr int kColumns = kThreads / kJoinRows;
  __shared__ float sums[kJoinRows][kColumns];
  const int row = static_cast<int>(threadIdx.x) / kColumns;
  const int lane = static_cast<int>(threadIdx.x) % kColumns;
  const int64_t column = first + lane;
  float sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int64_t r = row; r < n; r += kJoinRows) {
      sum = AddFtz(sum, __ldcg(parts + r * width + column));
    }
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row == 0 && column < width) {
#pragma unroll
    for (int r = 1; r < kJoinRows; ++r) sum = AddFtz(sum, sums[r][lane]);
    result[column] = QuietFloat(sum);
  }
  __syncthreads();
}

// dbias from the partial sums of all blocks, behind the barrier of a cooperative grid.
template <int kThreads>
__device__ inline void JoinSums(const Outputs& out, int64_t width) {
  constexpr int kColumns = kThreads / kJoinRows;
  const int64_t n = (out.m + kSumRows - 1) / kSumRows;
  for (int64_t first = int64_t{blockIdx.x} * kColumns; first < width;
       first += int64_t{gridDim.x} * kColumns) {
    JoinColumns<kThreads>(out.sums, n, width, first, out.dbias);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_COLUMN_SUM_CUH_
