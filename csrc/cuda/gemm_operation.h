// One product as cuBLASLt describes it.
#ifndef TE_FLAX_CUDA_GEMM_OPERATION_H_
#define TE_FLAX_CUDA_GEMM_OPERATION_H_

#include <string_view>
#include <vector>

#include "cuda/gemm_plan.h"

namespace te_flax::cuda {

// cuBLASLt's descriptors of one product.
class Operation {
 public:
  explicit Operation(const cublaslt::Api& api) : api_(api) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (desc_ != nullptr) api_.DescDestroy(desc_);
    for (cublaslt::Layout layout : {a_, b_, d_}) {
      if (layout != nullptr) api_.LayoutDestroy(layout);
    }
  }

  ffi::Error Init(const Matmul& p, const MatmulBuffers& at) {
    TE_RETURN_IF_ERROR(
        Check("MatmulDescCreate", api_.DescCreate(&desc_, cublaslt::kComputeF32, CUDA_R_32F)));
    TE_RETURN_IF_ERROR(Set(cublaslt::kTransA, p.trans_a ? cublaslt::kOpT : cublaslt::kOpN));
    TE_RETURN_IF_ERROR(Set(cublaslt::kTransB, p.trans_b ? cublaslt::kOpT : cublaslt::kOpN));
    if (p.fast) TE_RETURN_IF_ERROR(Set(cublaslt::kFastAccum, int8_t{1}));
    if (p.a_scale != kUnscaled) {
      TE_RETURN_IF_ERROR(
          SetScale(cublaslt::kAScaleMode, cublaslt::kAScalePointer, p.a_scale, at.a_scale));
      TE_RETURN_IF_ERROR(
          SetScale(cublaslt::kBScaleMode, cublaslt::kBScalePointer, p.b_scale, at.b_scale));
    }
    if (p.epilogue != cublaslt::kEpilogueNone) TE_RETURN_IF_ERROR(SetEpilogue(p, at));
    TE_RETURN_IF_ERROR(Create(&a_, p.a, p.trans_a ? p.k : p.m, p.trans_a ? p.m : p.k));
    TE_RETURN_IF_ERROR(Create(&b_, p.b, p.trans_b ? p.n : p.k, p.trans_b ? p.k : p.n));
    return Create(&d_, p.d, p.m, p.n);
  }

  // At most `count` candidates, the most promising first.
  ffi::ErrorOr<std::vector<cublaslt::Algo>> Candidates(cublaslt::Handle handle, int count) {
    cublaslt::Preference preference = nullptr;
    TE_RETURN_IF_ERROR(Check("MatmulPreferenceCreate", api_.PreferenceCreate(&preference)));
    const uint64_t bytes = kLibraryBytes;
    cublaslt::Status status =
        api_.PreferenceSet(preference, cublaslt::kMaxWorkspace, &bytes, sizeof(bytes));
    const auto set = [&](int attribute, uint32_t value) {
      if (status == cublaslt::kSuccess) {
        status = api_.PreferenceSet(preference, attribute, &value, sizeof(value));
      }
    };
    // Partial sums in a narrower type of D would break the bound.
    set(cublaslt::kReductionMask, cublaslt::kReduceInComputeType);
    for (int i = cublaslt::kMinAlignmentA; i <= cublaslt::kMinAlignmentD; ++i) {
      set(i, kPointerAlignment);
    }
    std::vector<cublaslt::HeuristicResult> found(static_cast<size_t>(count));
    int n = 0;
    if (status == cublaslt::kSuccess) {
      status =
          api_.GetHeuristic(handle, desc_, a_, b_, d_, d_, preference, count, found.data(), &n);
    }
    api_.PreferenceDestroy(preference);
    TE_RETURN_IF_ERROR(Check("MatmulAlgoGetHeuristic", status));
    std::vector<cublaslt::Algo> algos;
    for (int i = 0; i < n; ++i) {
      const cublaslt::HeuristicResult& r = found[static_cast<size_t>(i)];
      if (r.state == cublaslt::kSuccess && r.workspace <= size_t{kLibraryBytes})
        algos.push_back(r.algo);
    }
    return algos;
  }

  bool Runs(cublaslt::Handle handle, const cublaslt::Algo& algo) {
    cublaslt::HeuristicResult result;
    return api_.AlgoCheck(handle, desc_, a_, b_, d_, d_, &algo, &result) == cublaslt::kSuccess &&
           result.workspace <= size_t{kLibraryBytes};
  }

  cublaslt::Status Run(cublaslt::Handle handle, const MatmulBuffers& at, const cublaslt::Algo& algo,
                       cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    return api_.Matmul(handle, desc_, &one, at.a, a_, at.b, b_, &zero, at.d, d_, at.d, d_, &algo,
                       at.workspace, size_t{kLibraryBytes}, stream);
  }

 private:
  ffi::Error Check(std::string_view call, cublaslt::Status status) {
    return CublasLtStatus(api_, call, status);
  }

  template <typename T>
  ffi::Error Set(int attribute, T value) {
    return Check("MatmulDescSetAttribute", api_.DescSet(desc_, attribute, &value, sizeof(value)));
  }

  ffi::Error SetScale(int mode, int pointer, int32_t scale, const void* values) {
    // Libraries before 12.8 have one mode and no attribute for it.
    if (scale != cublaslt::kScaleTensor) TE_RETURN_IF_ERROR(Set(mode, scale));
    return Set(pointer, values);
  }

  ffi::Error SetEpilogue(const Matmul& p, const MatmulBuffers& at) {
    TE_RETURN_IF_ERROR(Set(cublaslt::kEpilogue, p.epilogue));
    if (p.epilogue & cublaslt::kEpilogueBias) {
      TE_RETURN_IF_ERROR(Set(cublaslt::kBiasType, static_cast<int32_t>(p.bias)));
      TE_RETURN_IF_ERROR(Set(cublaslt::kBiasPointer, at.bias));
    }
    if (p.epilogue & cublaslt::kEpilogueAux) {
      TE_RETURN_IF_ERROR(Set(cublaslt::kAuxPointer, at.aux));
      TE_RETURN_IF_ERROR(Set(cublaslt::kAuxLd, p.m));
    }
    return ffi::Error::Success();
  }

  ffi::Error Create(cublaslt::Layout* layout, cudaDataType type, int64_t rows, int64_t cols) {
    return Check("MatrixLayoutCreate", api_.LayoutCreate(layout, type, static_cast<uint64_t>(rows),
                                                         static_cast<uint64_t>(cols), rows));
  }

  const cublaslt::Api& api_;
  cublaslt::Desc desc_ = nullptr;
  cublaslt::Layout a_ = nullptr, b_ = nullptr, d_ = nullptr;
};

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_GEMM_OPERATION_H_
