// The attributes of the norms, read the same way on every platform.
#ifndef TE_FLAX_COMMON_NORM_H_
#define TE_FLAX_COMMON_NORM_H_

#include <cstdint>
#include <string_view>

#include "common/operands.h"

namespace te_flax {

struct NormOptions {
  bool layernorm;
  bool zero_centered;  // the factor is 1 + gamma
  int64_t k_ndim;
};

inline ffi::ErrorOr<NormOptions> ReadNormOptions(std::string_view where,
                                                 const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(kind, Attr<std::string_view>(where, attrs, "kind"));
  TE_ASSIGN_OR_RETURN(zero_centered, Attr<bool>(where, attrs, "zero_centered_gamma"));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  if (kind != "layernorm" && kind != "rmsnorm") {
    return ffi::Unexpected(Invalid(where, "kind", "be layernorm or rmsnorm", kind, kReport));
  }
  return NormOptions{kind == "layernorm", zero_centered, k_ndim};
}

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_NORM_H_
