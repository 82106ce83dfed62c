// FFI handlers of the CPU: bind, check, describe, call the kernel table.
#include <cstring>

#include "common/dtypes.h"
#include "common/ffi.h"
#include "cpu/dispatch.h"

namespace te_flax::cpu {
namespace {

ffi::Error AmaxImpl(ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> amax) {
  TE_RETURN_IF_ERROR(CheckShape("amax", "amax", amax->dimensions(), {2}));
  if (x.element_type() != ffi::DataType::F32) {
    return Invalid("amax", "x", "be float32", "another type", kReport);
  }
  uint32_t largest = 0;
  uint32_t nonfinite = 0;
  Active().amax_f32(static_cast<const uint32_t*>(x.untyped_data()),
                    static_cast<int64_t>(x.element_count()), &largest, &nonfinite);
  float* out = amax->typed_data();
  std::memcpy(&out[0], &largest, sizeof(float));
  out[1] = nonfinite != 0 ? 1.0f : 0.0f;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Amax, AmaxImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()           // x [D..]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // amax [2]

}  // namespace te_flax::cpu
