// Clearing, noop and status of the CUDA handlers.
#include "cuda/kernels/clear.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {

ffi::Error CudaStatus(std::string_view where, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  std::string text(where);
  text.append(": the CUDA call must succeed, got ").append(cudaGetErrorName(status));
  text.append(" (").append(cudaGetErrorString(status)).append("); ").append(kReport);
  return ffi::Error::Internal(std::move(text));
}

ffi::Error Clear(std::string_view where, cudaStream_t stream, const uint32_t* noop, void* to,
                 int64_t bytes) {
  if (bytes == 0) return ffi::Error::Success();
  if (noop == nullptr) {
    return CudaStatus(where, cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream));
  }
  constexpr int kThreads = 128;
  ClearKernel<kThreads><<<Blocks(bytes, kThreads, kMaxFlatBlocks), kThreads, 0, stream>>>(
      noop, static_cast<uint8_t*>(to), bytes);
  return CudaStatus(where, cudaGetLastError());
}

ffi::ErrorOr<const uint32_t*> TakeNoop(std::string_view where, cudaStream_t stream,
                                       const Operands& all) {
  TE_RETURN_IF_ERROR(CheckCount(where, "noop", all.args[0], ffi::DataType::F32, 1));
  const size_t first = all.args.size() - all.rets.size();
  for (size_t i = 0; i < all.rets.size(); ++i) {
    const ffi::AnyBuffer& previous = all.args[first + i];
    const ffi::AnyBuffer& result = all.rets[i];
    TE_RETURN_IF_ERROR(CheckCount(where, "the previous result", previous, result.element_type(),
                                  static_cast<int64_t>(result.element_count())));
    if (result.untyped_data() == previous.untyped_data() || result.size_bytes() == 0) continue;
    TE_RETURN_IF_ERROR(
        CudaStatus(where, cudaMemcpyAsync(result.untyped_data(), previous.untyped_data(),
                                          result.size_bytes(), cudaMemcpyDeviceToDevice, stream)));
  }
  return static_cast<const uint32_t*>(all.args[0].untyped_data());
}

}  // namespace te_flax::cuda
