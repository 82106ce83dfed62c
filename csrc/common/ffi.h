// Checks and error texts shared by all FFI handlers. Handlers return ffi::Error, never throw.
#ifndef TE_FLAX_COMMON_FFI_H_
#define TE_FLAX_COMMON_FFI_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace te_flax {

namespace ffi = ::xla::ffi;

using Dims = ffi::Span<const int64_t>;

// "<where>: <argument> must <rule>, got <got>; <remedy>", as te_flax/errors.py writes it.
inline ffi::Error Invalid(std::string_view where, std::string_view argument, std::string_view rule,
                          std::string_view got, std::string_view remedy) {
  std::string text;
  text.append(where).append(": ").append(argument).append(" must ").append(rule);
  text.append(", got ").append(got).append("; ").append(remedy);
  return ffi::Error::InvalidArgument(std::move(text));
}

template <typename Range>
std::string Show(const Range& dims) {
  std::string text = "(";
  for (int64_t dim : dims) text.append(text.size() > 1 ? ", " : "").append(std::to_string(dim));
  return text + ")";
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t Product(Dims dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

inline constexpr std::string_view kReport =
    "report it with the output of te_flax.kernel_report()";  // the Python op checks shapes first

inline ffi::Error CheckShape(std::string_view where, std::string_view argument, Dims got,
                             std::initializer_list<int64_t> expected) {
  if (got.size() == expected.size() && std::equal(got.begin(), got.end(), expected.begin())) {
    return ffi::Error::Success();
  }
  return Invalid(where, argument, "have shape " + Show(expected), Show(got), kReport);
}

// A failed check on its way out of a function that returns ffi::Error or ffi::ErrorOr.
struct Failure {
  ffi::Error error;

  operator ffi::Error() const { return error; }
  template <typename T>
  operator ffi::ErrorOr<T>() const {
    return ffi::Unexpected(error);
  }
};

}  // namespace te_flax

// Returns from the enclosing function when `expr` (an ffi::Error) is a failure.
#define TE_RETURN_IF_ERROR(expr)                                                         \
  do {                                                                                   \
    if (auto te_error = (expr); te_error.failure()) return ::te_flax::Failure{te_error}; \
  } while (0)

// Declares `var` from `expr` (an ffi::ErrorOr), or returns its error.
#define TE_ASSIGN_OR_RETURN(var, expr)                                    \
  auto var##_or = (expr);                                                 \
  if (!var##_or.has_value()) return ::te_flax::Failure{var##_or.error()}; \
  auto var = *var##_or

#endif  // TE_FLAX_COMMON_FFI_H_
