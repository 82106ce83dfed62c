// Names of the array types, free of includes so that every kernel file may use them.
#ifndef TE_FLAX_COMMON_FORMATS_H_
#define TE_FLAX_COMMON_FORMATS_H_

namespace te_flax {

// High-precision inputs; the values index the per-type kernels of cpu::Kernels.
enum class Float : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

// Code formats. FP8: e4m3 is float8_e4m3fn (max 448), e5m2 is float8_e5m2 (max 57344). FP6, for the
// MXFP6 kernels alone: e2m3 (max 7.5) and e3m2 (max 28), without NaN and Inf.
enum class Format : int { kE4M3 = 0, kE5M2 = 1, kE2M3 = 2, kE3M2 = 3 };

// First slice of the activations; the second, if there is one, is linear.
enum class Activation : int {
  kGelu,
  kGeluExact,
  kQuickGelu,
  kSilu,
  kRelu,
  kSquaredRelu,
  kLinear,
  kClampedSilu,  // always times the clamped linear function
};

}  // namespace te_flax

#endif  // TE_FLAX_COMMON_FORMATS_H_
