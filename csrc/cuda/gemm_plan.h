// Products through cuBLASLt: their description, the choice of an algorithm, and the call.
#ifndef TE_FLAX_CUDA_GEMM_PLAN_H_
#define TE_FLAX_CUDA_GEMM_PLAN_H_

#include <cstdint>
#include <string>

#include "cuda/cublaslt.h"

namespace te_flax::cuda {

constexpr int64_t kLibraryBytes = int64_t{32} << 20;  // scratch of cuBLASLt: its advice for sm_90
constexpr int kPointerAlignment = 16;                 // of all operands, at least

// How an operand is scaled: cuBLASLt's scale modes, or not at all.
constexpr int32_t kUnscaled = -1;

// D[m, n] = op(A) op(B), all column-major and without gaps; op(A) is [m, k]. A row-major product
// out = lhs rhs is D with A = rhs and B = lhs.
struct Matmul {
  int64_t m = 0, n = 0, k = 0;
  bool trans_a = false, trans_b = false;
  cudaDataType a = CUDA_R_16BF, b = CUDA_R_16BF, d = CUDA_R_16BF, bias = CUDA_R_16BF;
  int32_t a_scale = kUnscaled, b_scale = kUnscaled;
  bool fast = false;  // FP8 accumulation
  uint32_t epilogue = cublaslt::kEpilogueNone;

  // Equal where the same algorithm may run; without spaces.
  std::string Key() const;
};

struct MatmulBuffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
  const void* bias = nullptr;
  void* aux = nullptr;  // of an epilogue with one: [m, n] of D's type, before the GELU
  void* d = nullptr;
  void* workspace = nullptr;  // kLibraryBytes
};

// Process-wide settings, before the first product. An empty file: nothing is stored.
void ConfigureGemm(bool autotune, std::string cache_file);

// Whether the algorithm of a product is settled on the current device, or cannot be now: the stream
// is being captured.
ffi::ErrorOr<bool> IsSettled(const Matmul& matmul, cudaStream_t stream);

// Settles it on scratch buffers, whose contents it overwrites: the algorithm that another device of
// the name settled on, else the cache file's, else the fastest of the candidates, without timing
// the heuristic's first. It has run on the current device when this returns, so that no kernel is
// loaded while a stream is captured.
ffi::Error Settle(const Matmul& matmul, const MatmulBuffers& scratch, cudaStream_t stream);

// Settles on another device's choice or the heuristic's first, without scratch buffers.
ffi::Error SettleUntimed(const Matmul& matmul, const MatmulBuffers& buffers);

// Enqueues the product, with the algorithm that is known, else with the heuristic's first.
ffi::Error RunMatmul(const Matmul& matmul, const MatmulBuffers& buffers, cudaStream_t stream);

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_GEMM_PLAN_H_
