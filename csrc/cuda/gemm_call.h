// One call of a matrix product: its operands, and how it maps to cuBLASLt.
#ifndef TE_FLAX_CUDA_GEMM_CALL_H_
#define TE_FLAX_CUDA_GEMM_CALL_H_

#include <cstdint>
#include <string_view>

#include "common/operands.h"
#include "cuda/gemm_plan.h"

namespace te_flax::cuda {

enum class Scaling { kNone, kTensor, kMxfp8, kBlock1d, kBlock2d };

constexpr int64_t kRegion = 256;  // alignment of each part of the scratch memory

inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Hands out parts of a buffer, and counts on beyond its end: what it gives must be checked before
// it is used.
class Scratch {
 public:
  explicit Scratch(void* base) : base_(static_cast<char*>(base)) {
    used_ = RoundUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) % kRegion), kRegion) -
            static_cast<int64_t>(reinterpret_cast<uintptr_t>(base) % kRegion);
  }

  void* Take(int64_t bytes) {
    void* taken = base_ + used_;
    used_ += RoundUp(bytes, kRegion);
    return taken;
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_;
};

// One operand as a matrix: `rows` by the contraction, which lies along its rows or its columns.
struct Side {
  std::string_view name;
  const void* data = nullptr;
  const void* scale = nullptr;
  cudaDataType type = CUDA_R_16BF;
  bool last = true;  // the contraction is the contiguous dim
  int64_t rows = 0;
  int64_t scale_rows = 1;  // rows that share a scale of block scaling

  // What cuBLASLt reads instead; null where it reads the operand itself.
  void* copy = nullptr;
  void* scale_copy = nullptr;
  int64_t padded_rows = 0;
};

// One call, and how it is computed.
struct Call {
  Scaling scaling = Scaling::kNone;
  Side lhs, rhs;
  int64_t k = 0, padded_k = 0;
  const void* bias = nullptr;
  Float bias_type = Float::kF32;
  void* out = nullptr;
  Float out_type = Float::kF32;
  bool fast = false;
  bool widened = false;  // MXFP8 operands become bf16
  float* sum = nullptr;  // where cuBLASLt cannot write the result itself
  Matmul matmul;
  MatmulBuffers at;

  int64_t m() const { return lhs.rows; }
  int64_t n() const { return rhs.rows; }
};

// Reads a call of the handler and lays out its scratch memory; an error where that is too small.
ffi::ErrorOr<Call> Describe(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                            const ffi::Dictionary& attrs);

// Buffers for a product of this size and these types, in scratch memory; one over nothing has no
// use but its size.
MatmulBuffers TuningBuffers(const Matmul& p, Scratch* scratch);

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_GEMM_CALL_H_
