// nanobind module te_flax._cuda: the CUDA handlers as capsules, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "common/ffi.h"
#include "cuda/cublaslt.h"
#include "cuda/gemm_plan.h"

namespace nb = nanobind;

namespace te_flax::cuda {
#define X(name, symbol) XLA_FFI_DECLARE_HANDLER_SYMBOL(symbol);
#include "common/handlers_cuda.def"
#undef X
XLA_FFI_DECLARE_HANDLER_SYMBOL(GemmInitialize);
}  // namespace te_flax::cuda

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA handlers of te_flax and what they were built with.";
  m.def(
      "registrations",
      [] {
        nb::dict handlers;
#define X(name, symbol) \
  handlers[#name] = nb::capsule(reinterpret_cast<void*>(te_flax::cuda::symbol));
#include "common/handlers_cuda.def"
#undef X
        nb::dict gemm;
        gemm["initialize"] = nb::capsule(reinterpret_cast<void*>(te_flax::cuda::GemmInitialize));
        gemm["execute"] = handlers["gemm"];
        handlers["gemm"] = gemm;
        return handlers;
      },
      nb::sig("def registrations() -> dict[str, object]"),
      "Returns the XLA FFI handler of each name: a capsule, or one for each stage.");
  m.def(
      "build_info",
      [] {
        nb::dict info;
        info["version"] = TE_FLAX_VERSION;
        info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
        info["cuda"] = TE_FLAX_CUDA_VERSION;
        info["archs"] = TE_FLAX_CUDA_ARCHS;
        return info;
      },
      nb::sig("def build_info() -> dict[str, object]"),
      "Returns the te_flax version, the XLA FFI API, nvcc's version and the GPU architectures.");
  m.def("configure_gemm", &te_flax::cuda::ConfigureGemm, nb::arg("autotune"), nb::arg("cache_file"),
        "Sets whether algorithms are timed, and the file that keeps them (empty: none). Forgets\n"
        "those that this process chose.");
  m.def("set_cublaslt_path", &te_flax::cuda::SetCublasLtPath, nb::arg("path"),
        "Names the library to load where jax has loaded none yet.");
  m.def(
      "cublaslt",
      [] {
        return nb::make_tuple(te_flax::cuda::CublasLtVersion(), te_flax::cuda::CublasLtProblem());
      },
      nb::sig("def cublaslt() -> tuple[int, str]"),
      "Returns the version of cuBLASLt, such as 130100, or 0 and why it does not load.");
}
