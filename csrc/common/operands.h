// The operands, results and attributes of a handler that serves several variants of an op.
#ifndef TE_FLAX_COMMON_OPERANDS_H_
#define TE_FLAX_COMMON_OPERANDS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtypes.h"
#include "common/ffi.h"

namespace te_flax {

// Buffers of one call in the order of the op's signature.
struct Operands {
  std::vector<ffi::AnyBuffer> args;
  std::vector<ffi::AnyBuffer> rets;
};

inline ffi::ErrorOr<Operands> Collect(std::string_view where, ffi::RemainingArgs args,
                                      ffi::RemainingRets rets, size_t n_args, size_t n_rets) {
  if (args.size() != n_args || rets.size() != n_rets) {
    const auto counts = [](size_t a, size_t r) {
      return std::to_string(a) + " and " + std::to_string(r);
    };
    return ffi::Unexpected(Invalid(where, "the numbers of operands and results",
                                   "be " + counts(n_args, n_rets), counts(args.size(), rets.size()),
                                   kReport));
  }
  Operands all;
  for (size_t i = 0; i < n_args; ++i) {
    TE_ASSIGN_OR_RETURN(arg, args.get<ffi::AnyBuffer>(i));
    all.args.push_back(arg);
  }
  for (size_t i = 0; i < n_rets; ++i) {
    TE_ASSIGN_OR_RETURN(ret, rets.get<ffi::AnyBuffer>(i));
    all.rets.push_back(*ret);
  }
  return all;
}

// An attribute that only some variants have.
template <typename T>
T AttrOr(const ffi::Dictionary& attrs, std::string_view name, T otherwise) {
  return attrs.contains<T>(name) ? *attrs.get<T>(name) : otherwise;
}

template <typename T>
ffi::ErrorOr<T> Attr(std::string_view where, const ffi::Dictionary& attrs, std::string_view name) {
  if (!attrs.contains<T>(name)) {
    return ffi::Unexpected(
        Invalid(where, name, "be an attribute of the type in the op", "none", kReport));
  }
  return attrs.get<T>(name);
}

// The call of a quantizer whose copies have a scale for each block of 32: [noop f32[1]] x [previous
// results] -> [row, row_scale] [col, col_scale] amax.
struct MxCall {
  bool noop, row, col;
  int64_t k_ndim;
  Operands all;
  const ffi::AnyBuffer& x() const { return all.args[noop ? 1 : 0]; }
};

inline ffi::ErrorOr<MxCall> ReadMxCall(std::string_view where, ffi::RemainingArgs args,
                                       ffi::RemainingRets rets, const ffi::Dictionary& attrs) {
  MxCall call = {AttrOr(attrs, "noop", false),
                 AttrOr(attrs, "row", false),
                 AttrOr(attrs, "col", false),
                 0,
                 {}};
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  const size_t n_rets = 2 * (size_t{call.row} + size_t{call.col}) + 1;
  TE_ASSIGN_OR_RETURN(all, Collect(where, args, rets, call.noop ? 2 + n_rets : 1, n_rets));
  call.k_ndim = k_ndim;
  call.all = all;
  return call;
}

inline ffi::Error CheckCount(std::string_view where, std::string_view argument,
                             const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) {
  const auto got = static_cast<int64_t>(buffer.element_count());
  if (buffer.element_type() == type && got == count) return ffi::Error::Success();
  return Invalid(
      where, argument, "have " + std::to_string(count) + " elements of its type",
      std::to_string(got) + " of type " + std::to_string(static_cast<int>(buffer.element_type())),
      kReport);
}

// An N-D array seen as a matrix: the last k_ndim dims are its columns.
struct Extent {
  int64_t rows;
  int64_t cols;
  int64_t size() const { return rows * cols; }
};

inline ffi::ErrorOr<Extent> AsExtent(std::string_view where, const ffi::AnyBuffer& array,
                                     int64_t k_ndim) {
  const Dims dims = array.dimensions();
  const auto ndim = static_cast<int64_t>(dims.size());
  if (k_ndim < 0 || k_ndim > ndim) {
    return ffi::Unexpected(Invalid(where, "k_ndim", "be in 0.." + std::to_string(ndim),
                                   std::to_string(k_ndim), kReport));
  }
  const size_t split = dims.size() - static_cast<size_t>(k_ndim);
  return Extent{Product(dims, 0, split), Product(dims, split, dims.size())};
}

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_OPERANDS_H_
