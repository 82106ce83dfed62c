// The array types that handlers meet, and the switch over them.
#ifndef TE_FLAX_COMMON_DTYPES_H_
#define TE_FLAX_COMMON_DTYPES_H_

#include <cstdint>
#include <string_view>

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

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_DTYPES_H_
