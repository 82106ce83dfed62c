// What stands around a matrix product: padded copies, scales in the library's order, the last sum.
// Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_GEMM_CUH_
#define TE_FLAX_CUDA_KERNELS_GEMM_CUH_

#include "cuda/kernels/dequantize.cuh"
#include "cuda/kernels/mxfp8_sink.cuh"

namespace te_flax::cuda {

constexpr int kGemmThreads = 256;
constexpr int kScaleTile = 32;

__device__ inline int64_t FirstThread() { return int64_t{blockIdx.x} * kGemmThreads + threadIdx.x; }
__device__ inline int64_t AllThreads() { return int64_t{gridDim.x} * kGemmThreads; }

// i / n; a 64-bit division costs more than the rest of a loop.
__device__ inline int64_t Divide(int64_t i, int64_t n) {
  return i <= UINT32_MAX && n <= UINT32_MAX ? static_cast<uint32_t>(i) / static_cast<uint32_t>(n)
                                            : i / n;
}

// to [to_rows, to_cols] = from [rows, cols], with zeros where it has nothing. T: one element.
template <typename T>
__global__ void __launch_bounds__(kGemmThreads)
    PadKernel(const T* __restrict__ from, int64_t rows, int64_t cols, T* to, int64_t to_rows,
              int64_t to_cols) {
  for (int64_t i = FirstThread(); i < to_rows * to_cols; i += AllThreads()) {
    const int64_t r = Divide(i, to_cols), c = i - r * to_cols;
    to[i] = r < rows && c < cols ? from[r * cols + c] : T{0};
  }
}

// to [blocks, to_rows] = the transpose of from [rows, blocks], zeros beyond row `rows`.
// One block of 32 x 8 threads turns a tile of 32 x 32.
__global__ void __launch_bounds__(kGemmThreads)
    TransposeScalesKernel(const float* __restrict__ from, int64_t rows, int64_t blocks, float* to,
                          int64_t to_rows) {
  __shared__ float tile[kScaleTile][kScaleTile + 1];
  const int64_t across = (blocks + kScaleTile - 1) / kScaleTile;
  const int64_t r0 = blockIdx.x / across * kScaleTile, c0 = blockIdx.x % across * kScaleTile;
  const int x = threadIdx.x % kScaleTile, y0 = threadIdx.x / kScaleTile;
  constexpr int kStep = kGemmThreads / kScaleTile;
  for (int y = y0; y < kScaleTile; y += kStep) {
    const int64_t r = r0 + y, c = c0 + x;
    tile[y][x] = r < rows && c < blocks ? from[r * blocks + c] : 0.0f;
  }
  __syncthreads();
  for (int y = y0; y < kScaleTile; y += kStep) {
    const int64_t r = r0 + x, c = c0 + y;
    if (r < to_rows && c < blocks) to[c * to_rows + r] = tile[x][y];
  }
}

// to: the e8m0 scales from [rows, blocks] in tiles of 128 x 4, zeros in what is missing.
__global__ void __launch_bounds__(kGemmThreads)
    SwizzleScalesKernel(const uint8_t* __restrict__ from, int64_t rows, int64_t blocks,
                        uint8_t* to) {
  const int64_t to_blocks = (blocks + 3) / 4 * 4, to_rows = (rows + 127) / 128 * 128;
  for (int64_t i = FirstThread(); i < to_rows * to_blocks; i += AllThreads()) {
    const int64_t r = Divide(i, to_blocks), c = i - r * to_blocks;
    to[SwizzledIndex(r, c, blocks)] = r < rows && c < blocks ? from[r * blocks + c] : uint8_t{0};
  }
}

__device__ inline float BiasAt(const void* bias, Float type, int64_t i) {
  switch (type) {
    case Float::kF32:
      return static_cast<const float*>(bias)[i];
    case Float::kBf16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[i]);
    default:
      return __half2float(static_cast<const __half*>(bias)[i]);
  }
}

// out [m, n] = (sum [*, sum_cols] * lhs_scale) * rhs_scale + bias [n], rounded once. No sum: zeros;
// scales, both or none, and bias where they are not null. out may be the sum.
struct GemmFinish {
  const float* sum;
  int64_t sum_cols;
  const float* lhs_scale;
  const float* rhs_scale;
  const void* bias;
  Float bias_type;
  void* out;
  int64_t m, n;
};

template <Float dtype>
__global__ void __launch_bounds__(kGemmThreads) FinishKernel(GemmFinish p) {
  for (int64_t i = FirstThread(); i < p.m * p.n; i += AllThreads()) {
    const int64_t r = Divide(i, p.n), c = i - r * p.n;
    float v = p.sum == nullptr ? 0.0f : p.sum[r * p.sum_cols + c];
    if (p.lhs_scale != nullptr) v = __fmul_rn(__fmul_rn(v, *p.lhs_scale), *p.rhs_scale);
    if (p.bias != nullptr) v = __fadd_rn(v, BiasAt(p.bias, p.bias_type, c));
    const uint32_t bits = Narrow<dtype>(v);
    if constexpr (dtype == Float::kF32) {
      static_cast<uint32_t*>(p.out)[i] = bits;
    } else {
      static_cast<uint16_t*>(p.out)[i] = static_cast<uint16_t>(bits);
    }
  }
}

// Pseudo-random words of which every byte, bf16 and f16 is a finite number of ordinary size: the
// operands on which algorithms are timed. Constant data would let the GPU clock higher.
__global__ void __launch_bounds__(kGemmThreads) FillKernel(uint32_t* to, int64_t words) {
  for (int64_t i = FirstThread(); i < words; i += AllThreads()) {
    uint32_t h = static_cast<uint32_t>(i) * 0x9e3779b9u;
    h = (h ^ (h >> 15)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    to[i] = (h & 0x8fff8fffu & 0xbfbfbfbfu) | 0x30003000u;
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_GEMM_CUH_
