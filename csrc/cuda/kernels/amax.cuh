// Largest finite magnitude of an array, and the scale that a magnitude asks for.
#ifndef TE_FLAX_CUDA_KERNELS_AMAX_CUH_
#define TE_FLAX_CUDA_KERNELS_AMAX_CUH_

#include <cooperative_groups.h>

#include "cuda/kernels/numerics.cuh"

namespace te_flax::cuda {

// What one thread has seen: bits of the largest finite magnitude, and 1.0f after a NaN or Inf.
struct Amax {
  uint32_t finite = 0;
  uint32_t nonfinite = 0;

  // Joins eight elements whose largest magnitude has the bits `largest`.
  template <Float dtype>
  __device__ void Join(uint32_t largest, const Pack<dtype>& pack) {
    if (largest >= kInf) {  // rare: look again for the largest finite one
      nonfinite = kOne;
      largest = 0;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const uint32_t a = pack.Bits(j) & kAbs;
        if (a < kInf) largest = max(largest, a);
      }
    }
    finite = max(finite, largest);
  }

  __device__ void Join(const Amax& other) {
    finite = max(finite, other.finite);
    nonfinite |= other.nonfinite;
  }

  // Joins all threads of the grid into result[2] in device memory. All blocks get here; where they
  // were launched cooperatively the result is zeroed here, otherwise it starts as zeros. The host
  // says which: after a cooperative launch is_valid() can be true in a grid that is none.
  __device__ void Store(uint32_t* result, bool cooperative) {
    JoinBlock();
    if (cooperative) {
      if (blockIdx.x == 0 && threadIdx.x == 0) result[0] = result[1] = 0;
      cooperative_groups::this_grid().sync();
    }
    if (threadIdx.x == 0) Raise(result);
  }

  // The same for a result that starts as zeros. The barrier above would cost the norms registers.
  __device__ void StoreIntoZeros(uint32_t* result) {
    JoinBlock();
    if (threadIdx.x == 0) Raise(result);
  }

 private:
  // Thread 0 has what its block has seen.
  __device__ void JoinBlock() {
    __shared__ uint32_t warps[2][32];
    finite = __reduce_max_sync(~0u, Flush(finite));
    nonfinite = __reduce_or_sync(~0u, nonfinite);
    if (threadIdx.x % 32 == 0) {
      warps[0][threadIdx.x / 32] = finite;
      warps[1][threadIdx.x / 32] = nonfinite;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) {
      finite = max(finite, warps[0][w]);
      nonfinite |= warps[1][w];
    }
  }

  // Non-negative floats order like their bits, and a maximum does not depend on the order. Most
  // blocks raise nothing: a read is cheaper than an atomic on one address.
  __device__ void Raise(uint32_t* result) const {
    if (finite > __ldcg(result)) atomicMax(result, finite);
    if (nonfinite != 0) atomicMax(result + 1, kOne);
  }
};

constexpr int kFlatThreads = 256;
constexpr int kFlatPacks = 4;  // independent loads in flight per thread
constexpr int64_t kFlatPerBlock = int64_t{kFlatThreads} * kFlatPacks * kPack;

// Grid-stride walk over the packs of a flat array: calls visit(index, valid, pack).
template <Float dtype, typename Visit>
__device__ inline void WalkFlat(const void* __restrict__ x, int64_t n, bool aligned, Visit visit) {
  constexpr int64_t kStep = int64_t{kFlatThreads} * kPack;
  for (int64_t base = blockIdx.x * kStep * kFlatPacks; base < n;
       base += gridDim.x * kStep * kFlatPacks) {
    const int64_t first = base + int64_t{threadIdx.x} * kPack;
    Pack<dtype> packs[kFlatPacks];
    int valid[kFlatPacks];
#pragma unroll
    for (int i = 0; i < kFlatPacks; ++i) {
      const int64_t left = n - (first + i * kStep);
      valid[i] = static_cast<int>(left < 0 ? 0 : left < kPack ? left : kPack);
      packs[i].Load(x, first + i * kStep, valid[i], aligned);
    }
#pragma unroll
    for (int i = 0; i < kFlatPacks; ++i) visit(first + i * kStep, valid[i], packs[i]);
  }
}

template <Float dtype>
__global__ void __launch_bounds__(kFlatThreads)
    AmaxKernel(const void* __restrict__ x, int64_t n, bool aligned, uint32_t* amax,
               bool cooperative) {
  Amax seen;
  WalkFlat<dtype>(x, n, aligned, [&](int64_t, int, const Pack<dtype>& pack) {
    seen.Join(pack.Abs().Largest(), pack);
  });
  seen.Store(amax, cooperative);
}

struct ScaleRule {
  float fp8_max;
  float margin_factor;  // 2^-margin
  float epsilon;        // 0 or at least 2^-126
  bool power_of_2;
};

// scale = clamp(fp8_max / max(amax, epsilon) * 2^-margin), scale_inv = 1 / scale; 1 where amax is
// 0 or not finite. Both divisions are IEEE.
inline __device__ void ScaleOf(float amax, const ScaleRule& rule, float* scale, float* scale_inv) {
  *scale = *scale_inv = 1.0f;
  const uint32_t bits = Flush(__float_as_uint(amax));
  if ((bits & kAbs) >= kInf) return;
  const float a = fmaxf(__uint_as_float(bits), rule.epsilon);
  if (!(a > 0.0f)) return;
  const float wanted = __fmul_rn(__fdiv_rn(rule.fp8_max, a), rule.margin_factor);
  float s = fminf(fmaxf(wanted, 0x1p-126f), 0x1p126f);
  if (rule.power_of_2) s = __uint_as_float(__float_as_uint(s) & kInf);
  *scale = s;
  *scale_inv = __fdiv_rn(1.0f, s);
}

template <int kThreads>
__global__ void AmaxToScaleKernel(const float* __restrict__ amax, int64_t n, ScaleRule rule,
                                  float* scale, float* scale_inv) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    ScaleOf(amax[i], rule, &scale[i], &scale_inv[i]);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_AMAX_CUH_
