// nanobind module te_flax._C: the CPU handlers as capsules, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "common/ffi.h"
#include "cpu/dispatch.h"

namespace nb = nanobind;

namespace te_flax::cpu {
#define X(name, symbol) XLA_FFI_DECLARE_HANDLER_SYMBOL(symbol);
#include "common/handlers.def"
#undef X
}  // namespace te_flax::cpu

NB_MODULE(_C, m) {
  m.doc() = "CPU handlers of te_flax and what they were built with.";
  m.def(
      "registrations",
      [] {
        nb::dict handlers;
#define X(name, symbol) \
  handlers[#name] = nb::capsule(reinterpret_cast<void*>(te_flax::cpu::symbol));
#include "common/handlers.def"
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
        info["compiler"] = TE_FLAX_COMPILER;
        return info;
      },
      nb::sig("def build_info() -> dict[str, object]"),
      "Returns the te_flax version, the XLA FFI API and the compiler of this build.");
  m.def(
      "simd_level", [] { return te_flax::cpu::Active().name; },
      "Returns the instruction set in use; a TE_FLAX_SIMD that this CPU lacks raises ValueError.");
  m.def("testing", &te_flax::cpu::SetTesting, nb::arg("simd") = "auto", nb::arg("threads") = 0,
        nb::arg("ieee") = false,
        "For tests: the instruction set, the number of threads (0: the pool's) and the float mode\n"
        "(ieee: subnormals are not flushed by the hardware) of all later handler calls in this\n"
        "process. testing() restores the defaults. No handler may be running.");
}
