// What every CUDA handler needs around its kernel launch. Nothing here allocates device memory.
#ifndef TE_FLAX_CUDA_LAUNCH_H_
#define TE_FLAX_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "common/operands.h"

namespace te_flax::cuda {

// "<where>: the CUDA call must succeed, got <error>; <remedy>", or success.
ffi::Error CudaStatus(std::string_view where, cudaError_t status);

// Blocks of a grid for `items`, at most `limit`: kernels with a limit stride over the rest.
inline unsigned Blocks(int64_t items, int64_t per_block, int64_t limit = INT32_MAX) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

constexpr int64_t kMaxFlatBlocks = 1 << 15;  // of the kernels that stride over a flat array

inline bool AlignedTo(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Writes zeros, unless noop (may be null) is set on the device when the stream gets there.
ffi::Error Clear(std::string_view where, cudaStream_t stream, const uint32_t* noop, void* to,
                 int64_t bytes);

// The flag of the noop variants, whose operands are noop, x, ..., previous results. The results
// are made equal to the previous ones first: XLA aliases them, so that costs nothing.
ffi::ErrorOr<const uint32_t*> TakeNoop(std::string_view where, cudaStream_t stream,
                                       const Operands& all);

// Calls fn with an integral_constant of the type, for kernels that are templates over it.
template <typename Fn>
void WithFloat(Float dtype, Fn fn) {
  switch (dtype) {
    case Float::kF32:
      return fn(std::integral_constant<Float, Float::kF32>());
    case Float::kBf16:
      return fn(std::integral_constant<Float, Float::kBf16>());
    case Float::kF16:
      return fn(std::integral_constant<Float, Float::kF16>());
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_LAUNCH_H_
