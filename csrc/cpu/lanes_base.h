// One lane of plain C++ for any processor, under the names of lanes_avx2.h.
#ifndef TE_FLAX_CPU_LANES_BASE_H_
#define TE_FLAX_CPU_LANES_BASE_H_

#include <stdint.h>

#include "cpu/scalar.h"

// For simd_wide.inc, not always: sixteen lanes of one value each would take minutes to compile.
#define TE_INLINE inline
#define TE_INLINE_LAMBDA

namespace te_flax::cpu {
namespace {

constexpr int kLanes = 1;

using F = float;
using I = uint32_t;

inline F AsF(I v) { return BitCast<float>(v); }
inline I AsI(F v) { return BitCast<uint32_t>(v); }
inline I Set(uint32_t v) { return v; }
inline F SetF(float v) { return v; }
inline I And(I a, I b) { return a & b; }
inline I Or(I a, I b) { return a | b; }
inline I Sub(I a, I b) { return a - b; }
inline I Min32(I a, I b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; }
inline F Mul(F a, F b) { return a * b; }
inline F Div(F a, F b) { return a / b; }
// a b + c, rounded once.
inline F Fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
inline F AddF(F a, F b) { return a + b; }
inline F SubF(F a, F b) { return a - b; }
inline F MinF(F a, F b) { return a < b ? a : b; }
inline F MaxF(F a, F b) { return a > b ? a : b; }
template <int n>
inline I Srl(I v) {
  return v >> n;
}
template <int n>
inline I Sll(I v) {
  return v << n;
}
inline F LoadF(const float* p) { return *p; }
inline void StoreF(float* p, F v) { *p = v; }
inline F SelectLess(F a, F b, F x, F y) { return a < b ? x : y; }
// -min(|a|, limit), -limit for NaN; limit > 0.
inline F NegativeUpTo(F a, F limit) { return -MinF(AsF(AsI(a) & kAbs), limit); }

inline F FirstLanes(F v, int64_t n) { return n > 0 ? v : 0.0f; }

// t as the nearest integer n, the even one of two, and the rest r; |t| < 2^22.
inline void Split(F t, F* n, F* r) {
  *n = SubF(AddF(t, SetF(0x1.8p23f)), SetF(0x1.8p23f));
  *r = SubF(t, *n);
}
// v * 2^n for an integer n in [-252, 0], flushed only at the end. Near: n counts as -120 below.
inline I Places(F n) { return Sub(AsI(SetF(0x1.8p23f)), AsI(AddF(n, SetF(0x1.8p23f)))); }
inline F Shrink(F v, F n) {
  const I places = Places(n);
  const I first = Srl<1>(places);
  const I second = Sub(places, first);
  const F half = Mul(v, AsF(Sll<23>(Sub(Set(127), first))));
  return Mul(half, AsF(Sll<23>(Sub(Set(127), second))));
}
inline F ShrinkNear(F v, F n) { return AsF(Sub(AsI(v), Sll<23>(Min32(Places(n), Set(120))))); }

inline uint32_t Rounded(F v) {
  const uint32_t bits = Element<Float::kF32>::Load(BitCast<uint32_t>(v));
  return (bits & kAbs) > kInf ? kQuietNan : bits;
}
template <Float dtype>
inline typename Element<dtype>::Type Narrow(F v);
template <>
inline uint32_t Narrow<Float::kF32>(F v) {
  return Rounded(v);
}
template <>
inline uint16_t Narrow<Float::kBf16>(F v) {
  const uint32_t bits = Rounded(v);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <>
inline uint16_t Narrow<Float::kF16>(F v) {
  const uint32_t bits = Rounded(v);
  const uint32_t a = bits & kAbs;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (a > kInf) return 0x7e00;
  if (a >= 0x47800000u) return sign | 0x7c00;  // 2^16
  // Below 2^-14 the sum with 0.5, whose last place is 2^-24, rounds.
  if (a < 0x38800000u) {
    return static_cast<uint16_t>(sign | (BitCast<uint32_t>(BitCast<float>(a) + 0.5f) & 0x7fff));
  }
  return static_cast<uint16_t>(sign | (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13);
}

template <Float dtype>
struct Lanes {
  using T = typename Element<dtype>::Type;
  static F Load(const void* p) { return AsF(Element<dtype>::Load(*static_cast<const T*>(p))); }
  static F LoadPart(const void* p, int64_t) { return Load(p); }
  static void Store(void* p, F v) { *static_cast<T*>(p) = Narrow<dtype>(v); }
  static void StorePart(void* p, F v, int64_t) { Store(p, v); }
};

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_LANES_BASE_H_
