// The rule that turns an amax into a scale, from the attributes of an op.
#ifndef TE_FLAX_CUDA_SCALE_RULE_H_
#define TE_FLAX_CUDA_SCALE_RULE_H_

#include <cmath>
#include <string>
#include <string_view>

#include "common/ffi.h"
#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {

inline ffi::ErrorOr<ScaleRule> MakeScaleRule(std::string_view where, std::string_view format,
                                             int64_t margin, bool power_of_2, float epsilon) {
  if (format != "e4m3" && format != "e5m2") {
    return ffi::Unexpected(Invalid(where, "format", "be e4m3 or e5m2", format, kReport));
  }
  if (margin < 0 || margin > 126) {
    return ffi::Unexpected(
        Invalid(where, "margin", "be in 0..126", std::to_string(margin), kReport));
  }
  return ScaleRule{format == "e4m3" ? 448.0f : 57344.0f,
                   std::ldexp(1.0f, -static_cast<int>(margin)), epsilon >= 0x1p-126f ? epsilon : 0,
                   power_of_2};
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_SCALE_RULE_H_
