// One call of a variant of a fused op, read and checked the same way on every platform; see Variant
// of te_flax/ops/_fused.py.
#ifndef TE_FLAX_COMMON_FUSED_H_
#define TE_FLAX_COMMON_FUSED_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/operands.h"

namespace te_flax {

enum class Scaling { kNone, kTensor, kMxfp8 };

inline ffi::ErrorOr<Float> NamedFloat(std::string_view where, std::string_view name) {
  if (name == "float32") return Float::kF32;
  if (name == "bfloat16") return Float::kBf16;
  if (name == "float16") return Float::kF16;
  return ffi::Unexpected(
      Invalid(where, "out_dtype", "be float32, bfloat16 or float16", name, kReport));
}

inline ffi::ErrorOr<Scaling> NamedScaling(std::string_view where, std::string_view name) {
  if (name == "none") return Scaling::kNone;
  if (name == "tensor") return Scaling::kTensor;
  if (name == "mxfp8") return Scaling::kMxfp8;
  return ffi::Unexpected(Invalid(where, "scaling", "be none, tensor or mxfp8", name, kReport));
}

// What a variant takes and returns: a pointer does not tell, for an empty array may have none.
struct Has {
  bool noop = false;  // its flag is all.args[0]
  bool h = false;
  bool row = false;
  bool col = false;
  bool dbias = false;
  bool scales = false;
  size_t Count() const {
    return size_t{h} + (size_t{row} + size_t{col}) * (1 + size_t{scales}) + size_t{dbias} + 1;
  }
};

// Null: not a result of the variant, or empty. scale may lie in device memory.
struct FusedCall {
  std::string_view where;
  Has has;
  Operands all;                        // without the workspace
  std::vector<ffi::AnyBuffer> own;     // operands of the family
  std::vector<ffi::AnyBuffer> extras;  // results of the family, behind amax
  Scaling scaling = Scaling::kNone;
  const float* scale = nullptr;
  Float dtype = Float::kF32;  // of h
  char* h = nullptr;
  uint8_t* row = nullptr;
  uint8_t* row_scale = nullptr;
  uint8_t* col = nullptr;
  uint8_t* col_scale = nullptr;
  Format row_format = Format::kE4M3;
  Format col_format = Format::kE4M3;
  bool row_values = false;  // bfloat16 values in place of codes
  bool col_values = false;
  float* dbias = nullptr;
  void* amax = nullptr;
  char* workspace = nullptr;
  int64_t workspace_bytes = 0;
  std::vector<ffi::AnyBuffer> results;  // h to amax, for CheckResults
  int64_t Bytes() const { return dtype == Float::kF32 ? 4 : 2; }
};

// h as a matrix [rows, slices * cols]. The backward pass of a gated activation has two slices of
// columns, computed together.
struct FusedShape {
  int64_t rows;
  int64_t slices;
  int64_t cols;
  int64_t Width() const { return slices * cols; }
};

// Which variants have scratch memory as a last result behind those of the op.
enum class Workspace { kNever, kForSums, kAlways };

template <typename T>
T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

inline ffi::Error AssignResults(const ffi::Dictionary& attrs, FusedCall* call) {
  const Has& has = call->has;
  size_t at = 0;
  const auto next = [&]() -> const ffi::AnyBuffer& { return call->results[at++]; };
  if (has.h) call->h = Data<char>(next());
  for (const bool is_row : {true, false}) {
    if (!(is_row ? has.row : has.col)) continue;
    const ffi::AnyBuffer& codes = next();
    TE_ASSIGN_OR_RETURN(held,
                        HeldBy(call->where, is_row ? "row" : "col", codes.element_type(), attrs));
    (is_row ? call->row_format : call->col_format) = held.format;
    (is_row ? call->row_values : call->col_values) = held.values;
    (is_row ? call->row : call->col) = Data<uint8_t>(codes);
    if (has.scales) (is_row ? call->row_scale : call->col_scale) = Data<uint8_t>(next());
  }
  if (has.dbias) call->dbias = Data<float>(next());
  call->amax = next().untyped_data();
  return ffi::Error::Success();
}

inline ffi::Error TakeWorkspace(FusedCall* call) {
  const ffi::AnyBuffer workspace = call->all.rets.back();
  call->all.rets.pop_back();
  call->workspace = Data<char>(workspace);
  call->workspace_bytes = static_cast<int64_t>(workspace.size_bytes());
  return CheckCount(call->where, "workspace", workspace, ffi::DataType::U8, call->workspace_bytes);
}

// Reads operands, results and attributes: [noop] `n_own` operands [scale] [previous results];
// [h] [row, row_scale] [col, col_scale] [dbias] amax, `n_extras` results [workspace].
inline ffi::Error ReadFused(std::string_view where, ffi::RemainingArgs args,
                            ffi::RemainingRets rets, const ffi::Dictionary& attrs, size_t n_own,
                            size_t n_extras, Workspace workspace, FusedCall* call) {
  call->where = where;
  TE_ASSIGN_OR_RETURN(scaling_name, Attr<std::string_view>(where, attrs, "scaling"));
  TE_ASSIGN_OR_RETURN(scaling, NamedScaling(where, scaling_name));
  TE_ASSIGN_OR_RETURN(dtype_name, Attr<std::string_view>(where, attrs, "out_dtype"));
  TE_ASSIGN_OR_RETURN(dtype, NamedFloat(where, dtype_name));
  call->scaling = scaling;
  call->dtype = dtype;
  const auto flag = [&](std::string_view name) { return AttrOr(attrs, name, false); };
  const Has has = {flag("noop"), flag("h"),     flag("row"),
                   flag("col"),  flag("dbias"), scaling == Scaling::kMxfp8};
  call->has = has;
  const bool scratch =
      workspace == Workspace::kAlways || (workspace == Workspace::kForSums && has.dbias);
  const size_t n_rets = has.Count() + n_extras;
  const size_t n_scale = scaling == Scaling::kTensor;
  const size_t n_args = n_own + n_scale + (has.noop ? 1 + n_rets : 0);
  TE_ASSIGN_OR_RETURN(all, Collect(where, args, rets, n_args, n_rets + scratch));
  call->all = std::move(all);
  if (scratch) TE_RETURN_IF_ERROR(TakeWorkspace(call));
  const auto own = call->all.args.begin() + has.noop;
  call->own.assign(own, own + static_cast<ptrdiff_t>(n_own));
  if (scaling == Scaling::kTensor) {
    const ffi::AnyBuffer& scale = own[static_cast<ptrdiff_t>(n_own)];
    TE_RETURN_IF_ERROR(CheckCount(where, "scale", scale, ffi::DataType::F32, 1));
    call->scale = Data<const float>(scale);
  }
  const auto extras = call->all.rets.begin() + static_cast<ptrdiff_t>(has.Count());
  call->results.assign(call->all.rets.begin(), extras);
  call->extras.assign(extras, call->all.rets.end());
  return AssignResults(attrs, call);
}

// Checks the sizes of all results but the extras.
inline ffi::Error CheckResults(const FusedCall& call, const FusedShape& shape) {
  constexpr ffi::DataType kTypes[] = {ffi::DataType::F32, ffi::DataType::BF16, ffi::DataType::F16};
  constexpr int64_t kBlock = 32;
  const int64_t size = shape.rows * shape.Width();
  size_t at = 0;
  const auto check = [&](bool there, std::string_view name, ffi::DataType type, int64_t count) {
    if (!there) return ffi::Error::Success();
    return CheckCount(call.where, name, call.results[at++], type, count);
  };
  const auto code = [](Format format, bool values) {
    if (values) return ffi::DataType::BF16;
    return format == Format::kE4M3 ? ffi::DataType::F8E4M3FN : ffi::DataType::F8E5M2;
  };
  const auto blocks = [](int64_t n) { return (n + kBlock - 1) / kBlock; };
  constexpr ffi::DataType kByte = ffi::DataType::U8;
  const Has& has = call.has;
  TE_RETURN_IF_ERROR(check(has.h, "h", kTypes[static_cast<int>(call.dtype)], size));
  TE_RETURN_IF_ERROR(check(has.row, "row", code(call.row_format, call.row_values), size));
  TE_RETURN_IF_ERROR(
      check(has.row && has.scales, "row_scale", kByte, shape.rows * blocks(shape.Width())));
  TE_RETURN_IF_ERROR(check(has.col, "col", code(call.col_format, call.col_values), size));
  TE_RETURN_IF_ERROR(
      check(has.col && has.scales, "col_scale", kByte, blocks(shape.rows) * shape.Width()));
  TE_RETURN_IF_ERROR(check(has.dbias, "dbias", ffi::DataType::F32, shape.Width()));
  return check(true, "amax", ffi::DataType::F32, 2);
}

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_FUSED_H_
