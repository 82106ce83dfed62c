// nanobind module te_flax._cuda: the CUDA handlers as capsules, and what was built.
#include <nanobind/nanobind.h>

#include "common/ffi.h"

namespace nb = nanobind;

namespace te_flax::cuda {
#define X(name, symbol) XLA_FFI_DECLARE_HANDLER_SYMBOL(symbol);
#include "common/handlers_cuda.def"
#undef X
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
        return handlers;
      },
      nb::sig("def registrations() -> dict[str, object]"),
      "Returns the XLA FFI handler of each name, as a capsule.");
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
}
