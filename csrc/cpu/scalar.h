// The numerics of one element, in integers wherever a subnormal could matter.
//
// Everything has internal linkage, so that no object file compiled for a newer instruction set
// can lend its copy to another.
#ifndef TE_FLAX_CPU_SCALAR_H_
#define TE_FLAX_CPU_SCALAR_H_

#include <stdint.h>
#include <string.h>

#include "cpu/kernels.h"

namespace te_flax::cpu {
namespace {

constexpr uint32_t kAbs = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;
constexpr uint32_t kQuietNan = 0x7fc00000u;
constexpr uint32_t kMinNormal = 0x00800000u;
constexpr uint8_t kNanCode = 0x7f;

template <typename To, typename From>
inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The format's facts: biased float32 exponent of its smallest normal number, bits of its largest.
template <Format format>
struct FormatFacts;
template <>
struct FormatFacts<Format::kE4M3> {
  static constexpr int kMantissaBits = 3;
  static constexpr uint32_t kMinExponent = 121;      // 2^-6
  static constexpr uint32_t kMaxBits = 0x43e00000u;  // 448
  static constexpr int kMaxExponent = 8;             // 448 = 1.75 * 2^8
};
template <>
struct FormatFacts<Format::kE5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr uint32_t kMinExponent = 113;      // 2^-14
  static constexpr uint32_t kMaxBits = 0x47600000u;  // 57344
  static constexpr int kMaxExponent = 15;            // 57344 = 1.75 * 2^15
};
template <>
struct FormatFacts<Format::kE2M3> {
  static constexpr int kMantissaBits = 3;
  static constexpr uint32_t kMinExponent = 127;      // 2^0
  static constexpr uint32_t kMaxBits = 0x40f00000u;  // 7.5
  static constexpr int kMaxExponent = 2;             // 7.5 = 1.875 * 2^2
};
template <>
struct FormatFacts<Format::kE3M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr uint32_t kMinExponent = 125;      // 2^-2
  static constexpr uint32_t kMaxBits = 0x41e00000u;  // 28
  static constexpr int kMaxExponent = 4;             // 28 = 1.75 * 2^4
};

// Code of a magnitude, given as bits not above the format's maximum, in the low byte of a word.
// Adding a power of two whose last place is the format's quantum leaves the rounded code in the low
// mantissa bits.
template <Format format>
inline uint32_t RoundMagnitude(uint32_t bits) {
  using F = FormatFacts<format>;
  const uint32_t exponent = bits >> 23 > F::kMinExponent ? bits >> 23 : F::kMinExponent;
  const uint32_t base = (exponent - F::kMinExponent) << F::kMantissaBits;
  const uint32_t magic = ((exponent + 23 - F::kMantissaBits) << 23) | base;
  return BitCast<uint32_t>(BitCast<float>(bits) + BitCast<float>(magic));
}

template <Format format>
inline uint8_t EncodeMagnitude(uint32_t bits) {
  return static_cast<uint8_t>(RoundMagnitude<format>(bits));
}

// Saturating code of any float32; NaN gives 0x7f whatever its sign.
template <Format format>
inline uint8_t Encode(uint32_t bits) {
  using F = FormatFacts<format>;
  const uint32_t a = bits & kAbs;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24) & 0x80;
  const uint8_t code = EncodeMagnitude<format>(a < F::kMaxBits ? a : F::kMaxBits) | sign;
  return a > kInf ? kNanCode : code;
}

// Saturating FP6 code of any float32; NaN gives 0.
template <Format format>
inline uint32_t EncodeFp6(uint32_t bits) {
  using F = FormatFacts<format>;
  const uint32_t a = bits & kAbs;
  const uint32_t rounded = RoundMagnitude<format>(a < F::kMaxBits ? a : F::kMaxBits);
  const uint32_t code = (rounded & 31) | (bits >> 26 & 32);
  return a > kInf ? 0 : code;
}

// float32 bits of a finite code without its sign.
template <Format format>
inline uint32_t DecodeMagnitude(uint32_t code) {
  using F = FormatFacts<format>;
  const uint32_t exponent = code >> F::kMantissaBits;
  const uint32_t mantissa = code & ((1u << F::kMantissaBits) - 1);
  if (exponent > 0) {
    return (F::kMinExponent + exponent - 1) << 23 | mantissa << (23 - F::kMantissaBits);
  }
  const float step = BitCast<float>((F::kMinExponent - F::kMantissaBits) << 23);
  return BitCast<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * step);
}

// float32 bits of one element; what is below 2^-126 becomes a zero of its sign.
template <Float dtype>
struct Element;
template <>
struct Element<Float::kF32> {
  using Type = uint32_t;
  static uint32_t Load(uint32_t x) { return (x & kAbs) < kMinNormal ? x & ~kAbs : x; }
};
template <>
struct Element<Float::kBf16> {
  using Type = uint16_t;
  static uint32_t Load(uint16_t x) {
    return Element<Float::kF32>::Load(static_cast<uint32_t>(x) << 16);
  }
};
template <>
struct Element<Float::kF16> {
  using Type = uint16_t;
  static uint32_t Load(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
    const uint32_t a = x & 0x7fff;
    if (a >= 0x7c00) return sign | kInf | (a & 0x3ff) << 13;
    if (a >= 0x400) return sign | ((a << 13) + (112u << 23));
    // A subnormal: 2^-24 times an integer below 1024, exact in float32.
    return sign | BitCast<uint32_t>(static_cast<float>(static_cast<int32_t>(a)) * 0x1p-24f);
  }
};

// The float32 scale of a tensor as the kernels use it: below 2^-126 it is a zero of its sign.
inline float FlushScale(float scale) {
  return BitCast<float>(Element<Float::kF32>::Load(BitCast<uint32_t>(scale)));
}

// What makes the exponent of the format's maximum over 2^n and all below stay, and of all above go
// one up.
template <Format format>
constexpr uint32_t kRoundUpOf = 0x7fffffu - (FormatFacts<format>::kMaxBits & 0x7fffffu);
constexpr uint32_t kRoundUp = kRoundUpOf<Format::kE4M3>;  // of both FP8 maxima, 1.75 * 2^n

// e8m0 scale of a block whose largest magnitude has these float32 bits (NaN sorts above Inf):
// amax * float32(1 / max) rounded up to a power of two. With max = m * 2^n, the rounded product is
// at most 2^k exactly where amax <= m * 2^(k + n), for every float32 and all formats, so integers
// do.
template <Format format>
inline uint8_t BlockScale(uint32_t amax) {
  if (amax >= kInf) return amax > kInf ? 255 : 254;
  const int32_t e =
      static_cast<int32_t>((amax + kRoundUpOf<format>) >> 23) - FormatFacts<format>::kMaxExponent;
  return static_cast<uint8_t>(e < 0 ? 0 : e);
}

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_SCALAR_H_
