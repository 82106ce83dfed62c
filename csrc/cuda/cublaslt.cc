#include "cuda/cublaslt.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define TE_FLAX_CUBLASLT_HEADER 1
#endif

namespace te_flax::cuda {
namespace {

#ifdef TE_FLAX_CUBLASLT_HEADER
namespace lt = ::te_flax::cublaslt;
static_assert(sizeof(lt::Algo) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(lt::HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(lt::HeuristicResult, state) ==
              offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(lt::kSuccess == CUBLAS_STATUS_SUCCESS && lt::kComputeF32 == CUBLAS_COMPUTE_32F);
static_assert(lt::kOpN == CUBLAS_OP_N && lt::kOpT == CUBLAS_OP_T);
static_assert(lt::kTransA == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(lt::kTransB == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(lt::kEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(lt::kBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(lt::kAuxPointer == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
static_assert(lt::kAuxLd == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
static_assert(lt::kAScalePointer == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
static_assert(lt::kBScalePointer == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
static_assert(lt::kFastAccum == CUBLASLT_MATMUL_DESC_FAST_ACCUM);
static_assert(lt::kBiasType == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
static_assert(lt::kEpilogueNone == CUBLASLT_EPILOGUE_DEFAULT);
static_assert(lt::kEpilogueBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(lt::kEpilogueGelu == CUBLASLT_EPILOGUE_GELU);
static_assert((lt::kEpilogueGelu | lt::kEpilogueAux) == CUBLASLT_EPILOGUE_GELU_AUX);
static_assert(lt::kMaxWorkspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(lt::kReductionMask == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
static_assert(lt::kMinAlignmentA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(lt::kMinAlignmentD == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(lt::kReduceInComputeType == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
#if CUBLAS_VERSION >= 120900
static_assert(lt::kAScaleMode == CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
static_assert(lt::kBScaleMode == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(lt::kScaleTensor == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
static_assert(lt::kScaleVec32 == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
static_assert(lt::kScaleVec128 == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
static_assert(lt::kScaleBlock128 == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
#endif
#endif  // TE_FLAX_CUBLASLT_HEADER

std::string& Path() {
  static auto* path = new std::string;
  return *path;
}

struct Library {
  cublaslt::Api api = {};
  std::string problem;
};

// jax resolves the name in the same order, later perhaps: a name that is loaded is not resolved
// again.
void* Open() {
  const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
  if (void* loaded = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_NOW)) return loaded;
  void* wheel = Path().empty() ? nullptr : dlopen(Path().c_str(), RTLD_NOW);
  return wheel != nullptr ? wheel : dlopen(name.c_str(), RTLD_NOW);
}

Library Load() {
  Library library;
  void* opened = Open();
  if (opened == nullptr) {
    const char* why = dlerror();
    library.problem = why == nullptr ? "no such file" : why;
    return library;
  }
  const auto find = [&](auto* function, const char* name) {
    *reinterpret_cast<void**>(function) = dlsym(opened, name);
    if (*function == nullptr) library.problem = std::string("a library without ") + name;
  };
  cublaslt::Api& api = library.api;
  find(&api.GetVersion, "cublasLtGetVersion");
  find(&api.GetStatusName, "cublasLtGetStatusName");
  find(&api.Create, "cublasLtCreate");
  find(&api.DescCreate, "cublasLtMatmulDescCreate");
  find(&api.DescDestroy, "cublasLtMatmulDescDestroy");
  find(&api.DescSet, "cublasLtMatmulDescSetAttribute");
  find(&api.LayoutCreate, "cublasLtMatrixLayoutCreate");
  find(&api.LayoutDestroy, "cublasLtMatrixLayoutDestroy");
  find(&api.PreferenceCreate, "cublasLtMatmulPreferenceCreate");
  find(&api.PreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
  find(&api.PreferenceSet, "cublasLtMatmulPreferenceSetAttribute");
  find(&api.GetHeuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(&api.AlgoCheck, "cublasLtMatmulAlgoCheck");
  find(&api.Matmul, "cublasLtMatmul");
  return library;
}

const Library& Loaded() {
  static const auto* library = new Library(Load());
  return *library;
}

}  // namespace

void SetCublasLtPath(std::string path) { Path() = std::move(path); }

std::string CublasLtProblem() { return Loaded().problem; }

size_t CublasLtVersion() { return Loaded().problem.empty() ? Loaded().api.GetVersion() : 0; }

ffi::ErrorOr<const cublaslt::Api*> LoadCublasLt() {
  const Library& library = Loaded();
  if (library.problem.empty()) return &library.api;
  return ffi::Unexpected(Invalid("gemm", "cuBLASLt", "be loadable", library.problem,
                                 "install the nvidia-cublas that jax's CUDA plugin needs"));
}

ffi::Error CublasLtStatus(const cublaslt::Api& api, std::string_view call,
                          cublaslt::Status status) {
  if (status == cublaslt::kSuccess) return ffi::Error::Success();
  std::string text = "gemm: cuBLASLt's ";
  text.append(call).append(" must succeed, got ").append(api.GetStatusName(status));
  text.append(" from version ").append(std::to_string(api.GetVersion())).append("; ");
  return ffi::Error::Internal(text.append(kReport));
}

ffi::ErrorOr<cublaslt::Handle> CublasLtHandle(const cublaslt::Api& api, int device) {
  static auto* mutex = new std::mutex;
  static auto* handles = new std::map<int, cublaslt::Handle>;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto known = handles->find(device);
  if (known != handles->end()) return known->second;
  cublaslt::Handle handle = nullptr;
  TE_RETURN_IF_ERROR(CublasLtStatus(api, "Create", api.Create(&handle)));
  (*handles)[device] = handle;
  return handle;
}

}  // namespace te_flax::cuda
