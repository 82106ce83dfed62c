// What the forward and backward handlers of the norms share.
#ifndef TE_FLAX_CUDA_NORM_H_
#define TE_FLAX_CUDA_NORM_H_

#include "common/norm.h"
#include "cuda/fused.h"
#include "cuda/kernels/norm.cuh"

namespace te_flax::cuda {

// What is added to gamma; -0 changes nothing.
inline float CentreOf(const NormOptions& options) { return options.zero_centered ? 1.0f : -0.0f; }

// An operand of `count` elements, in rows of k.
inline ffi::ErrorOr<Array> TakeArray(std::string_view where, std::string_view name,
                                     const ffi::AnyBuffer& buffer, int64_t count, int64_t k) {
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, name, buffer.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, buffer.element_type(), count));
  const bool whole_rows = count == k || k % kPack == 0;
  return Array{buffer.untyped_data(), dtype, whole_rows && AlignedTo(buffer.untyped_data(), 16)};
}

inline ffi::ErrorOr<float*> Floats(std::string_view where, std::string_view name,
                                   const ffi::AnyBuffer& buffer, int64_t count) {
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, ffi::DataType::F32, count));
  return Data<float>(buffer);
}

// Calls fn with the type that kernels read arrays of type `in` as, and that of h. Arrays of other
// types than h are read as float32.
template <typename Fn>
auto WithTypes(Float in, Float out, Fn fn) {
  return WithFloat(out, [&](auto type) {
    if (in == out) return fn(type, type);
    return fn(std::integral_constant<Float, Float::kF32>(), type);
  });
}

// Calls fn with the number of threads that share a row, and whether these hold less than a row.
template <typename Fn>
void WithTeam(int64_t k, Fn fn) {
  constexpr std::false_type kHolds;
  if (k <= kSlice) return fn(std::integral_constant<int, 32>(), kHolds);
  if (k <= 2 * kSlice) return fn(std::integral_constant<int, 64>(), kHolds);
  if (k <= 4 * kSlice) return fn(std::integral_constant<int, 128>(), kHolds);
  if (k <= 8 * kSlice) return fn(std::integral_constant<int, 256>(), kHolds);
  if (k <= 16 * kSlice) return fn(std::integral_constant<int, 512>(), kHolds);
  fn(std::integral_constant<int, 512>(), std::true_type());
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_NORM_H_
