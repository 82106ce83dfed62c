// What the CPU handlers share: operands as matrices, noop, results.
#ifndef TE_FLAX_CPU_OPERANDS_H_
#define TE_FLAX_CPU_OPERANDS_H_

#include <cstdint>
#include <cstring>
#include <string_view>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "common/operands.h"
#include "cpu/kernels.h"

namespace te_flax::cpu {

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
  TE_ASSIGN_OR_RETURN(extent, AsExtent(where, x, k_ndim));
  return Matrix{dtype, static_cast<const char*>(x.untyped_data()), extent.rows, extent.cols};
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

inline void WriteAmax(const Amax& amax, void* result) {
  const uint32_t words[2] = {amax.finite, amax.nonfinite != 0 ? 0x3f800000u : 0u};
  std::memcpy(result, words, sizeof(words));
}

inline void WriteAmax(const Amax& amax, const ffi::AnyBuffer& result) {
  WriteAmax(amax, result.untyped_data());
}

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_OPERANDS_H_
