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
  const int64_t blocks = CeilDiv(items, per_block);
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

// Of LaunchWithAmax(). Plain quantizers of more rounds are faster where the GPU hands out its
// blocks one by one, fused kernels are not, and these need the barrier for dbias.
constexpr int64_t kPlainRounds = 4;
constexpr int64_t kFusedRounds = INT32_MAX;
constexpr int64_t kMaxFlatBlocks = 1 << 15;  // of the kernels that stride over a flat array

inline bool AlignedTo(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Writes zeros, unless noop (may be null) is set on the device when the stream gets there.
ffi::Error Clear(std::string_view where, cudaStream_t stream, const uint32_t* noop, void* to,
                 int64_t bytes);

// Launches a kernel that strides over `blocks` blocks and ends with Amax::Store(amax, cooperative).
// A grid of at most `rounds` rounds is launched cooperatively, as many blocks as the GPU holds at
// once, and needs no launch to clear amax.
template <typename Kernel, typename... Values>
ffi::Error LaunchWithAmax(std::string_view where, cudaStream_t stream, const uint32_t* noop,
                          uint32_t* amax, int64_t rounds, Kernel* kernel, int64_t blocks,
                          int threads, const Values&... values) {
  static_assert(std::is_same_v<Kernel, void(Values..., bool)>);
  int device = 0, processors = 0, resident = 0;
  TE_RETURN_IF_ERROR(CudaStatus(where, cudaGetDevice(&device)));
  TE_RETURN_IF_ERROR(CudaStatus(
      where, cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)));
  const auto* entry = reinterpret_cast<const void*>(kernel);
  TE_RETURN_IF_ERROR(CudaStatus(
      where, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, entry, threads, 0)));
  const int64_t round = int64_t{processors} * resident;
  const bool cooperative = CeilDiv(blocks, round) <= rounds;
  const auto address = [](const auto& value) {
    return const_cast<void*>(static_cast<const void*>(&value));
  };
  void* parameters[] = {address(values)..., address(cooperative)};
  if (cooperative) {
    return CudaStatus(where, cudaLaunchCooperativeKernel(entry, dim3(Blocks(blocks, 1, round)),
                                                         dim3(threads), parameters, 0, stream));
  }
  TE_RETURN_IF_ERROR(Clear(where, stream, noop, amax, 2 * sizeof(float)));
  return CudaStatus(where, cudaLaunchKernel(entry, dim3(Blocks(blocks, 1)), dim3(threads),
                                            parameters, 0, stream));
}

// The flag of the noop variants, whose operands are noop, x, ..., previous results. The results
// are made equal to the previous ones first: XLA aliases them, so that costs nothing.
ffi::ErrorOr<const uint32_t*> TakeNoop(std::string_view where, cudaStream_t stream,
                                       const Operands& all);

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_LAUNCH_H_
