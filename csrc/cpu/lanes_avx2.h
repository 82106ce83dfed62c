// Eight 32-bit lanes of AVX2 (with F16C), under the names that simd.inc uses.
#ifndef TE_FLAX_CPU_LANES_AVX2_H_
#define TE_FLAX_CPU_LANES_AVX2_H_

#include <immintrin.h>
#include <stdint.h>

#include "cpu/scalar.h"

// For simd_wide.inc: gcc would leave calls in the innermost loops, and a call spills every
// register.
#define TE_INLINE __attribute__((always_inline)) inline
#define TE_INLINE_LAMBDA __attribute__((always_inline))

namespace te_flax::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kRegister = 32;      // bytes
constexpr int kUnit = 2 * kLanes;  // elements that are handled together

using F = __m256;
using I = __m256i;
using Codes = __m128i;  // kUnit bytes

inline F AsF(I v) { return _mm256_castsi256_ps(v); }
inline I AsI(F v) { return _mm256_castps_si256(v); }
inline I Set(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
inline F SetF(float v) { return _mm256_set1_ps(v); }
inline I LoadI(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void StoreI(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline I And(I a, I b) { return _mm256_and_si256(a, b); }
inline I Or(I a, I b) { return _mm256_or_si256(a, b); }
inline I Add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I Sub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I Max32(I a, I b) { return _mm256_max_epi32(a, b); }
inline I Min32(I a, I b) { return _mm256_min_epi32(a, b); }
inline I Max16(I a, I b) { return _mm256_max_epu16(a, b); }
inline F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F AddF(F a, F b) { return _mm256_add_ps(a, b); }
inline F MinF(F a, F b) { return _mm256_min_ps(a, b); }
inline F MaxF(F a, F b) { return _mm256_max_ps(a, b); }
inline F SubF(F a, F b) { return _mm256_sub_ps(a, b); }
inline F Div(F a, F b) { return _mm256_div_ps(a, b); }
// a b + c, rounded once.
inline F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F LoadF(const float* p) { return _mm256_loadu_ps(p); }
inline void StoreF(float* p, F v) { _mm256_storeu_ps(p, v); }
template <int n>
inline I Srl(I v) {
  return _mm256_srli_epi32(v, n);
}
template <int n>
inline I Sll(I v) {
  return _mm256_slli_epi32(v, n);
}
// a < b ? x : y; integers are signed.
inline I SelectLess(I a, I b, I x, I y) {
  return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(b, a));
}
inline F SelectLess(F a, F b, F x, F y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// -min(|a|, limit), -limit for NaN; limit > 0.
inline F NegativeUpTo(F a, F limit) {
  const F b = _mm256_min_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a), limit);
  return _mm256_or_ps(b, _mm256_set1_ps(-0.0f));
}
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
// Bits of x where mask is set, of y elsewhere.
inline I Merge(I mask, I x, I y) { return Or(And(mask, x), _mm256_andnot_si256(mask, y)); }

inline bool AnyAtLeast32(I v, uint32_t limit) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(v, Set(limit - 1))) != 0;
}
// Lanes must not exceed 0x7fff.
inline bool AnyAtLeast16(I v, uint16_t limit) {
  const I below = _mm256_set1_epi16(static_cast<int16_t>(limit - 1));
  return _mm256_movemask_epi8(_mm256_cmpgt_epi16(v, below)) != 0;
}
// Lanes must not exceed 0x7fffffff.
inline uint32_t Largest32(I v) {
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(b));
}
inline uint32_t Largest16(I v) {
  const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  // The processor has a horizontal minimum of 16-bit lanes.
  const __m128i low = _mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(low)) & 0xffffu;
}

// Code of a magnitude not above the maximum, in the low 16 bits of each lane; see EncodeMagnitude
// in scalar.h.
template <Format format>
struct Encoder {
  using Facts = FormatFacts<format>;
  I operator()(F p) const {
    constexpr int kShift = 23 - Facts::kMantissaBits;
    constexpr uint32_t kBase =
        (static_cast<uint32_t>(kShift) << 23) - (Facts::kMinExponent << Facts::kMantissaBits);
    const I power = And(Max32(AsI(p), Set(Facts::kMinExponent << 23)), Set(kInf));
    const I magic = Add(Add(power, Srl<kShift>(power)), Set(kBase));
    return AsI(AddF(p, AsF(magic)));
  }
};

inline void StoreCodes(uint8_t* p, Codes c) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), c); }
inline void StreamCodes(uint8_t* p, Codes c) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), c); }
inline void StorePart(uint8_t* p, Codes c, int64_t n) {
  alignas(16) uint8_t all[kUnit];
  _mm_store_si128(reinterpret_cast<__m128i*>(all), c);
  memcpy(p, all, static_cast<size_t>(n));
}
inline void Fence() { _mm_sfence(); }

// kUnit elements of 16 bits in one register.
struct Raw16 {
  I v;
};
inline Raw16 LoadRaw(const uint16_t* p) { return {LoadI(p)}; }
inline Raw16 LoadRawPart(const uint16_t* p, int64_t n) {
  uint16_t all[kUnit] = {};
  memcpy(all, p, static_cast<size_t>(n) * sizeof(*p));
  return {LoadI(all)};
}
// The low 8 bits of the 16-bit lanes, which must not exceed 255.
inline Codes Bytes16(I v) {
  return _mm_packus_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
inline I Srl16By8(I v) { return _mm256_srli_epi16(v, 8); }

// kUnit elements of 32 bits in two.
struct Raw32 {
  I a, b;
};
inline Raw32 LoadRaw(const uint32_t* p) { return {LoadI(p), LoadI(p + kLanes)}; }
inline Raw32 LoadRawPart(const uint32_t* p, int64_t n) {
  uint32_t all[kUnit] = {};
  memcpy(all, p, static_cast<size_t>(n) * sizeof(*p));
  return {LoadI(all), LoadI(all + kLanes)};
}
// 16-bit lanes from the low 16 bits of the lanes of low and then high.
inline I JoinHalf(I low, I high) {
  const I mask = Set(0xffffu);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(And(low, mask), And(high, mask)), 0xd8);
}
// The low 8 bits of the lanes of a and then b; the low 16 bits must not exceed 255.
inline Codes Bytes32(I a, I b) { return Bytes16(JoinHalf(a, b)); }

// bfloat16: the even elements are the low halves of 32-bit lanes, the odd ones the high halves.
inline void WidenPairs(I v, F* even, F* odd) {
  *even = AsF(Sll<16>(v));
  *odd = AsF(And(v, Set(0xffff0000u)));
}
// 16-bit lanes again from the low 16 bits of both.
inline I JoinPairs(I even, I odd) { return _mm256_blend_epi16(even, Sll<16>(odd), 0xaa); }

inline void WidenHalf(I v, F* low, F* high) {
  *low = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
  *high = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
}
// float16 bits in 32-bit lanes to float32.
inline F HalfLanes(I v) {
  return _mm256_cvtph_ps(
      _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}

// The 16 columns of 32 rows of bytes, `stride` apart: out[c] is column c.
constexpr int kTransposeRows = 32;
inline void Transpose(const uint8_t* in, int64_t stride, I* out) {
  I v[16];
  for (int i = 0; i < 16; ++i) {
    const auto load = [&](int r) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + r * stride));
    };
    v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 16), 1);
  }
  for (int stage = 0; stage < 4; ++stage) {
    for (int i = 0; i < 8; ++i) {
      out[2 * i] = _mm256_unpacklo_epi8(v[i], v[i + 8]);
      out[2 * i + 1] = _mm256_unpackhi_epi8(v[i], v[i + 8]);
    }
    for (int i = 0; i < 16; ++i) v[i] = out[i];
  }
}
inline void CopyPart(uint8_t* to, const uint8_t* from, int64_t n) {
  memcpy(to, from, static_cast<size_t>(n));
}
inline void StreamI(void* p, I v) { _mm256_stream_si256(static_cast<__m256i*>(p), v); }

// kLanes consecutive elements, or the first n of them, as float32 and back. Rounded values have one
// NaN; FTZ left no subnormal.
inline F Rounded(F v) {
  return _mm256_blendv_ps(v, AsF(Set(kQuietNan)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
template <Float dtype>
struct WholeLanes;
template <>
struct WholeLanes<Float::kF32> {
  using Element = uint32_t;
  static F Load(const void* p) { return AsF(LoadI(p)); }
  static void Store(void* p, F v) { StoreI(p, AsI(Rounded(v))); }
};
inline __m128i LoadEight(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void StoreEight(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
template <>
struct WholeLanes<Float::kBf16> {
  using Element = uint16_t;
  static F Load(const void* p) { return AsF(Sll<16>(_mm256_cvtepu16_epi32(LoadEight(p)))); }
  static void Store(void* p, F v) {
    const I bits = AsI(Rounded(v));
    const I up = Add(And(Srl<16>(bits), Set(1)), Set(0x7fff));
    const I high = Srl<16>(Add(bits, up));
    StoreEight(p,
               _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }
};
template <>
struct WholeLanes<Float::kF16> {
  using Element = uint16_t;
  static F Load(const void* p) { return _mm256_cvtph_ps(LoadEight(p)); }
  static void Store(void* p, F v) {
    StoreEight(p, _mm256_cvtps_ph(Rounded(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};
// The first n lanes, zeros in the others; n may be anything.
inline F FirstLanes(F v, int64_t n) {
  const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return AsF(And(AsI(v), _mm256_cmpgt_epi32(Set(static_cast<uint32_t>(n)), lane)));
}
template <Float dtype>
struct Lanes : WholeLanes<dtype> {
  using Element = typename WholeLanes<dtype>::Element;
  static F LoadPart(const void* p, int64_t n) {
    Element all[kLanes] = {};
    memcpy(all, p, static_cast<size_t>(n) * sizeof(Element));
    return WholeLanes<dtype>::Load(all);
  }
  static void StorePart(void* p, F v, int64_t n) {
    Element all[kLanes];
    WholeLanes<dtype>::Store(all, v);
    memcpy(p, all, static_cast<size_t>(n) * sizeof(Element));
  }
};

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_LANES_AVX2_H_
