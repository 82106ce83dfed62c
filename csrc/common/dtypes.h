// The array types that handlers meet, and the switch over them.
#ifndef TE_FLAX_COMMON_DTYPES_H_
#define TE_FLAX_COMMON_DTYPES_H_

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "common/ffi.h"
#include "common/formats.h"

namespace te_flax {

inline ffi::ErrorOr<Float> FloatOf(std::string_view where, std::string_view argument,
                                   ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Float::kF32;
    case ffi::DataType::BF16:
      return Float::kBf16;
    case ffi::DataType::F16:
      return Float::kF16;
    default:
      return ffi::Unexpected(Invalid(where, argument, "be float32, bfloat16 or float16",
                                     "type " + std::to_string(static_cast<int>(type)), kReport));
  }
}

inline ffi::ErrorOr<Format> FormatOf(std::string_view where, std::string_view argument,
                                     ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F8E4M3FN:
      return Format::kE4M3;
    case ffi::DataType::F8E5M2:
      return Format::kE5M2;
    default:
      return ffi::Unexpected(Invalid(where, argument, "be float8_e4m3fn or float8_e5m2",
                                     "type " + std::to_string(static_cast<int>(type)), kReport));
  }
}

// What a copy holds: codes of a format, or their values in bfloat16.
struct Held {
  Format format;
  bool values;
};

// Of the copy "row" or "col". Values do not show the format of their codes: an attribute does.
inline ffi::ErrorOr<Held> HeldBy(std::string_view where, std::string_view copy, ffi::DataType type,
                                 const ffi::Dictionary& attrs) {
  const bool values = type == ffi::DataType::BF16;
  if (values) {
    const std::string name = std::string(copy) + "_format";
    if (!attrs.contains<std::string_view>(name)) {
      return ffi::Unexpected(Invalid(where, name, "be given with values", "none", kReport));
    }
    type = *attrs.get<std::string_view>(name) == "e4m3" ? ffi::DataType::F8E4M3FN
                                                        : ffi::DataType::F8E5M2;
  }
  TE_ASSIGN_OR_RETURN(format, FormatOf(where, copy, type));
  return Held{format, values};
}

// Calls fn with an integral_constant of the type, for kernels that are templates over it.
template <typename Fn>
auto WithFloat(Float dtype, Fn fn) {
  switch (dtype) {
    case Float::kBf16:
      return fn(std::integral_constant<Float, Float::kBf16>());
    case Float::kF16:
      return fn(std::integral_constant<Float, Float::kF16>());
    case Float::kF32:
      break;
  }
  return fn(std::integral_constant<Float, Float::kF32>());
}

// The FP6 format that an attribute names.
inline ffi::ErrorOr<Format> Fp6Of(std::string_view where, std::string_view attr,
                                  const ffi::Dictionary& attrs) {
  const bool given = attrs.contains<std::string_view>(attr);
  const std::string_view name = given ? *attrs.get<std::string_view>(attr) : "none";
  if (name == "e2m3") return Format::kE2M3;
  if (name == "e3m2") return Format::kE3M2;
  return ffi::Unexpected(Invalid(where, attr, "be e2m3 or e3m2", name, kReport));
}

// Calls fn with an integral_constant of the FP6 format.
template <typename Fn>
auto WithFp6(Format format, Fn fn) {
  if (format == Format::kE2M3) return fn(std::integral_constant<Format, Format::kE2M3>());
  return fn(std::integral_constant<Format, Format::kE3M2>());
}

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_DTYPES_H_
