// The operand x of the activations and their attributes, read the same way on every platform.
#ifndef TE_FLAX_COMMON_ACTIVATION_H_
#define TE_FLAX_COMMON_ACTIVATION_H_

#include <iterator>
#include <string>
#include <string_view>

#include "common/operands.h"

namespace te_flax {

// x [rows, slices, cols] and what to make of it.
struct ActivationCall {
  Activation activation;
  int slices;
  float limit, alpha, offset;
  int64_t rows, cols;
  Float dtype;
  const void* x;
};

inline ffi::ErrorOr<Activation> NamedActivation(std::string_view where, std::string_view name,
                                                int64_t slices) {
  constexpr std::string_view kNames[] = {"gelu", "gelu_exact",   "quick_gelu", "silu",
                                         "relu", "squared_relu", "linear"};
  if (name == "clamped_silu,clamped_linear" && slices == 2) return Activation::kClampedSilu;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    const std::string wanted = std::string(kNames[i]) + (slices == 2 ? ",linear" : "");
    if (name == wanted) return static_cast<Activation>(i);
  }
  return ffi::Unexpected(Invalid(
      where, "activation", "be known, for " + std::to_string(slices) + " slices", name, kReport));
}

// x is [M.., A, K..], without the A if it is 1.
inline ffi::ErrorOr<ActivationCall> ReadActivation(std::string_view where, const ffi::AnyBuffer& x,
                                                   const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(name, Attr<std::string_view>(where, attrs, "activation"));
  const int64_t slices = name.find(',') == name.npos ? 1 : 2;
  TE_ASSIGN_OR_RETURN(extent, AsExtent(where, x, k_ndim));
  TE_ASSIGN_OR_RETURN(whole, AsExtent(where, x, k_ndim + slices - 1));
  TE_ASSIGN_OR_RETURN(activation, NamedActivation(where, name, slices));
  TE_ASSIGN_OR_RETURN(limit, Attr<float>(where, attrs, "limit"));
  TE_ASSIGN_OR_RETURN(alpha, Attr<float>(where, attrs, "alpha"));
  TE_ASSIGN_OR_RETURN(offset, Attr<float>(where, attrs, "offset"));
  return ActivationCall{
      activation, static_cast<int>(slices), limit, alpha, offset, whole.rows, extent.cols,
      dtype,      x.untyped_data()};
}

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_ACTIVATION_H_
