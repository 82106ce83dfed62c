// The amax histories of one GEMM: scales from them, and new entries in front of them.
#ifndef TE_FLAX_CUDA_KERNELS_HISTORY_CUH_
#define TE_FLAX_CUDA_KERNELS_HISTORY_CUH_

#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {

constexpr int kHistoryThreads = 256;
constexpr int64_t kMaxEntries = 65535;  // of one launch: a grid's second dim
constexpr int kExponents = 255;         // slots of a letter: one for each power of two,
constexpr int kMantissa = 23;           // one for each mantissa bit, and the non-finite flag
constexpr int kLetterSize = kExponents + kMantissa + 1;

struct ScaledHistory {
  const float* history;  // [n, length]
  float* scale;          // [n]
  float* scale_inv;      // [n]
  ScaleRule rule;
};

struct HistoryToScaleCall {
  ScaledHistory operands[3];
  int64_t length, window;
};

__device__ inline uint32_t BlockMax(uint32_t seen) {
  __shared__ uint32_t warps[kHistoryThreads / 32];
  seen = __reduce_max_sync(~0u, seen);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = seen;
  __syncthreads();
  for (const uint32_t w : warps) seen = max(seen, w);
  return seen;
}

// Block (i, b) serves operand i of entry b.
__global__ void __launch_bounds__(kHistoryThreads) HistoryToScaleKernel(HistoryToScaleCall p) {
  const ScaledHistory& to = p.operands[blockIdx.x];
  const float* history = to.history + blockIdx.y * p.length;
  uint32_t seen = 0;  // non-negative floats order like their bits, NaN above Inf
  for (int64_t i = threadIdx.x; i < p.window; i += kHistoryThreads) {
    const uint32_t bits = __float_as_uint(history[i]);
    if (bits >> 31 == 0) seen = max(seen, bits);
  }
  const float amax = __uint_as_float(BlockMax(seen));
  if (threadIdx.x == 0) ScaleOf(amax, to.rule, &to.scale[blockIdx.y], &to.scale_inv[blockIdx.y]);
}

// new[0] = amax, new[i] = old[i - 1], or new = old where amax is 0. `to` may be `from`: chunks go
// from the end to the front, and all threads have read a chunk before any writes it.
__device__ inline void PushFront(const float* from, float* to, int64_t length, float amax) {
  const bool keep = !(amax > 0);
  if (keep && from == to) return;
  const int64_t chunks = (length + kHistoryThreads - 1) / kHistoryThreads;
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t i = chunk * kHistoryThreads + threadIdx.x;
    float entry = 0.0f;
    if (i < length) entry = keep ? from[i] : i == 0 ? amax : from[i - 1];
    __syncthreads();
    if (i < length) to[i] = entry;
    __syncthreads();
  }
}

struct PushAmaxesCall {
  const float* from[2];
  float* to[2];
  const float* amax[2];  // [n, 2]
  const int32_t* nonfinite;
  int32_t* new_nonfinite;
  int64_t length;
};

// Block (i, b) pushes operand i of entry b; block (0, b) counts for both.
__global__ void __launch_bounds__(kHistoryThreads) PushAmaxesKernel(PushAmaxesCall p) {
  const int64_t entry = blockIdx.y;
  const int which = blockIdx.x;
  PushFront(p.from[which] + entry * p.length, p.to[which] + entry * p.length, p.length,
            MulFtz(p.amax[which][2 * entry], 1.0f));
  if (which == 0 && threadIdx.x == 0) {
    const int more = (p.amax[0][2 * entry + 1] > 0) + (p.amax[1][2 * entry + 1] > 0);
    p.new_nonfinite[entry] = p.nonfinite[entry] + more;
  }
}

struct PushLetterCall {
  const float* letter;  // [n, kLetterSize]
  const float* from;
  float* to;
  const int32_t* nonfinite;
  int32_t* new_nonfinite;
  int64_t length;
};

// The amax that a letter names: see te_flax/ops/history.py.
__device__ inline float DecodeLetter(const float* letter) {
  int top = -1, occupied = 0;
  bool plain = true;
  uint32_t mantissa = 0;
  for (int i = threadIdx.x; i < kExponents + kMantissa; i += kHistoryThreads) {
    const float slot = letter[i];
    if (i < kExponents) {
      if (slot > 0) top = i, plain &= slot == 1, ++occupied;
    } else {
      plain &= slot == 0 || slot == 1;
      if (slot == 1) mantissa |= 1u << (i - kExponents);
    }
  }
  __shared__ int tops[kHistoryThreads / 32], counts[kHistoryThreads / 32];
  __shared__ uint32_t mantissas[kHistoryThreads / 32];
  const int warp = threadIdx.x / 32;
  const int warp_top = __reduce_max_sync(~0u, top);
  const int warp_count = __reduce_add_sync(~0u, occupied);
  const uint32_t warp_mantissa = __reduce_or_sync(~0u, mantissa);
  if (threadIdx.x % 32 == 0) {
    tops[warp] = warp_top, counts[warp] = warp_count, mantissas[warp] = warp_mantissa;
  }
  const bool single = __syncthreads_and(plain);
  int highest = -1, slots = 0;
  uint32_t digits = 0;
  for (int w = 0; w < kHistoryThreads / 32; ++w) {
    highest = max(highest, tops[w]);
    slots += counts[w];
    digits |= mantissas[w];
  }
  if (highest < 0) return 0.0f;
  const uint32_t above = static_cast<uint32_t>(highest + 1) << kMantissa;
  if (single && slots == 1) {
    return __uint_as_float((above - (digits != 0 ? 1u << kMantissa : 0u)) | digits);
  }
  return __uint_as_float(highest == kExponents - 1 ? kInf - 1 : above);
}

__global__ void __launch_bounds__(kHistoryThreads) PushLetterKernel(PushLetterCall p) {
  const int64_t entry = blockIdx.x;
  const float* letter = p.letter + entry * kLetterSize;
  const float amax = DecodeLetter(letter);
  PushFront(p.from + entry * p.length, p.to + entry * p.length, p.length, amax);
  if (threadIdx.x == 0) {
    p.new_nonfinite[entry] = p.nonfinite[entry] + (letter[kLetterSize - 1] > 0);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_HISTORY_CUH_
