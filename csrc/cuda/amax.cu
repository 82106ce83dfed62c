// amax on CUDA: check, describe, configure, launch.
#include <algorithm>

#include "common/ffi.h"
#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {
namespace {

ffi::Error CudaError(const char* where, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(where) + ": CUDA reports " + cudaGetErrorString(status));
}

ffi::Error AmaxImpl(cudaStream_t stream, ffi::AnyBuffer x,
                    ffi::Result<ffi::Buffer<ffi::F32>> amax) {
  TE_RETURN_IF_ERROR(CheckShape("amax", "amax", amax->dimensions(), {2}));
  if (x.element_type() != ffi::DataType::F32) {
    return Invalid("amax", "x", "be float32", "another type", kReport);
  }
  const int64_t n = static_cast<int64_t>(x.element_count());
  constexpr int64_t kThreads = 256;
  constexpr int64_t kMaxBlocks = 1024;
  TE_RETURN_IF_ERROR(
      CudaError("amax", cudaMemsetAsync(amax->untyped_data(), 0, 2 * sizeof(float), stream)));
  if (n == 0) return ffi::Error::Success();
  const int blocks = static_cast<int>(std::min((n + kThreads - 1) / kThreads, kMaxBlocks));
  AmaxF32Kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint32_t*>(x.untyped_data()), n,
                                                 static_cast<uint32_t*>(amax->untyped_data()));
  return CudaError("amax", cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Amax, AmaxImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()          // x [D..]
                                  .Ret<ffi::Buffer<ffi::F32>>(),  // amax [2]
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
