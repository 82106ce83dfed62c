// The operands, results and attributes of a handler that serves several variants of an op.
#ifndef TE_FLAX_CPU_OPERANDS_H_
#define TE_FLAX_CPU_OPERANDS_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common/dtypes.h"
#include "common/ffi.h"
#include "cpu/kernels.h"

namespace te_flax::cpu {

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

inline ffi::Error CheckCount(std::string_view where, std::string_view argument,
                             const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t count) {
  const auto got = static_cast<int64_t>(buffer.element_count());
  if (buffer.element_type() == type && got == count) return ffi::Error::Success();
  return Invalid(
      where, argument, "have " + std::to_string(count) + " elements of its type",
      std::to_string(got) + " of type " + std::to_string(static_cast<int>(buffer.element_type())),
      kReport);
}

// N-D x seen as a matrix: the last k_ndim dims are its columns.
struct Matrix {
  Float dtype;
  const char* data;
  int64_t rows;
  int64_t cols;

  int64_t Bytes() const { return dtype == Float::kF32 ? 4 : 2; }
  const char* At(int64_t row, int64_t col) const { return data + (row * cols + col) * Bytes(); }
};

inline ffi::ErrorOr<Matrix> AsMatrix(std::string_view where, const ffi::AnyBuffer& x,
                                     int64_t k_ndim) {
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, "x", x.element_type()));
  const Dims dims = x.dimensions();
  const auto ndim = static_cast<int64_t>(dims.size());
  if (k_ndim < 0 || k_ndim > ndim) {
    return ffi::Unexpected(Invalid(where, "k_ndim", "be in 0.." + std::to_string(ndim),
                                   std::to_string(k_ndim), kReport));
  }
  const size_t split = dims.size() - static_cast<size_t>(k_ndim);
  return Matrix{dtype, static_cast<const char*>(x.untyped_data()), Product(dims, 0, split),
                Product(dims, split, dims.size())};
}

// For the noop variants, whose operands are noop, x, ..., previous results: true when the results
// stay what they were. Only when XLA did not alias the buffers is there something to copy.
inline ffi::ErrorOr<bool> KeepsPrevious(std::string_view where, const Operands& all) {
  TE_RETURN_IF_ERROR(CheckCount(where, "noop", all.args[0], ffi::DataType::F32, 1));
  uint32_t noop;
  std::memcpy(&noop, all.args[0].untyped_data(), sizeof(noop));
  if ((noop & 0x7fffffffu) < 0x00800000u) return false;  // a subnormal counts as 0
  const size_t first = all.args.size() - all.rets.size();
  for (size_t i = 0; i < all.rets.size(); ++i) {
    const ffi::AnyBuffer& previous = all.args[first + i];
    const ffi::AnyBuffer& result = all.rets[i];
    TE_RETURN_IF_ERROR(CheckCount(where, "the previous result", previous, result.element_type(),
                                  static_cast<int64_t>(result.element_count())));
    if (result.untyped_data() == previous.untyped_data() || result.size_bytes() == 0) continue;
    std::memcpy(result.untyped_data(), previous.untyped_data(), result.size_bytes());
  }
  return true;
}

// Page faults on fresh 4 KB pages cost more than the kernels themselves.
inline void AdviseHugePages(const ffi::AnyBuffer& buffer) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + buffer.size_bytes()) / kPage * kPage;
  if (buffer.size_bytes() < 2 * kPage || last <= first) return;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

inline void WriteAmax(const Amax& amax, const ffi::AnyBuffer& result) {
  const uint32_t words[2] = {amax.finite, amax.nonfinite != 0 ? 0x3f800000u : 0u};
  std::memcpy(result.untyped_data(), words, sizeof(words));
}

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_OPERANDS_H_
