// cuBLASLt as this process has it: jax's own copy, never linked against.
#ifndef TE_FLAX_CUDA_CUBLASLT_H_
#define TE_FLAX_CUDA_CUBLASLT_H_

#include <string>
#include <string_view>

#include "common/ffi.h"
#include "cuda/cublaslt_api.h"

namespace te_flax::cuda {

// Where to look first when jax has loaded none yet; before the first product.
void SetCublasLtPath(std::string path);

// The functions of the library, found once.
ffi::ErrorOr<const cublaslt::Api*> LoadCublasLt();

// 10000 * major + 100 * minor + patch, or 0 where the library is missing.
size_t CublasLtVersion();

// Why LoadCublasLt fails, or nothing.
std::string CublasLtProblem();

// The handle of a device, made once.
ffi::ErrorOr<cublaslt::Handle> CublasLtHandle(const cublaslt::Api& api, int device);

// "gemm: cuBLASLt's <call> must succeed, got <status>; <remedy>", or success.
ffi::Error CublasLtStatus(const cublaslt::Api& api, std::string_view call, cublaslt::Status status);

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_CUBLASLT_H_
