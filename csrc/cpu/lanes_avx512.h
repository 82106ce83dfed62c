// Sixteen 32-bit lanes of AVX-512 (F, BW, DQ, VL), under the names that simd.inc uses.
#ifndef TE_FLAX_CPU_LANES_AVX512_H_
#define TE_FLAX_CPU_LANES_AVX512_H_

// gcc 12 takes the deliberately undefined operands inside its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <stdint.h>

#include "cpu/scalar.h"

// For simd_wide.inc: gcc would leave calls in the innermost loops, and a call spills every
// register.
#define TE_INLINE __attribute__((always_inline)) inline
#define TE_INLINE_LAMBDA __attribute__((always_inline))

namespace te_flax::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kRegister = 64;      // bytes
constexpr int kUnit = 2 * kLanes;  // elements that are handled together

using F = __m512;
using I = __m512i;
using Codes = __m256i;  // kUnit bytes

inline F AsF(I v) { return _mm512_castsi512_ps(v); }
inline I AsI(F v) { return _mm512_castps_si512(v); }
inline I Set(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
inline F SetF(float v) { return _mm512_set1_ps(v); }
inline I LoadI(const void* p) { return _mm512_loadu_si512(p); }
inline void StoreI(void* p, I v) { _mm512_storeu_si512(p, v); }
inline I And(I a, I b) { return _mm512_and_si512(a, b); }
inline I Or(I a, I b) { return _mm512_or_si512(a, b); }
inline I Add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I Sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I Max32(I a, I b) { return _mm512_max_epi32(a, b); }
inline I Min32(I a, I b) { return _mm512_min_epi32(a, b); }
inline I Max16(I a, I b) { return _mm512_max_epu16(a, b); }
inline F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F AddF(F a, F b) { return _mm512_add_ps(a, b); }
inline F MinF(F a, F b) { return _mm512_min_ps(a, b); }
inline F MaxF(F a, F b) { return _mm512_max_ps(a, b); }
inline F SubF(F a, F b) { return _mm512_sub_ps(a, b); }
inline F Div(F a, F b) { return _mm512_div_ps(a, b); }
// a b + c, rounded once.
inline F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F LoadF(const float* p) { return _mm512_loadu_ps(p); }
inline void StoreF(float* p, F v) { _mm512_storeu_ps(p, v); }
template <int n>
inline I Srl(I v) {
  return _mm512_srli_epi32(v, n);
}
template <int n>
inline I Sll(I v) {
  return _mm512_slli_epi32(v, n);
}
// a < b ? x : y; integers are signed.
inline I SelectLess(I a, I b, I x, I y) {
  return _mm512_mask_mov_epi32(y, _mm512_cmplt_epi32_mask(a, b), x);
}
inline F SelectLess(F a, F b, F x, F y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
// -min(|a|, limit), -limit for NaN; limit > 0.
inline F NegativeUpTo(F a, F limit) { return _mm512_range_ps(a, limit, 0xe); }
// t as the nearest integer n, the even one of two, and the rest r; |t| < 2^22.
inline void Split(F t, F* n, F* r) {
  *r = _mm512_reduce_ps(t, 8);
  *n = SubF(t, *r);
}
// v * 2^n for an integer n in [-252, 0], flushed only at the end. Near: n may count as -120 below.
inline F Shrink(F v, F n) { return _mm512_scalef_ps(v, n); }
inline F ShrinkNear(F v, F n) { return _mm512_scalef_ps(v, n); }
// Bits of x where mask is set, of y elsewhere.
inline I Merge(I mask, I x, I y) { return _mm512_ternarylogic_epi32(mask, x, y, 0xca); }

inline bool AnyAtLeast32(I v, uint32_t limit) {
  return _mm512_cmpge_epi32_mask(v, Set(limit)) != 0;
}
inline bool AnyAtLeast16(I v, uint16_t limit) {
  return _mm512_cmpge_epu16_mask(v, _mm512_set1_epi16(static_cast<int16_t>(limit))) != 0;
}
// Lanes must not exceed 0x7fffffff.
inline uint32_t Largest32(I v) {
  __m256i a = _mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(b));
}
inline uint32_t Largest16(I v) {
  const __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  const __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  // The processor has a horizontal minimum of 16-bit lanes.
  const __m128i low = _mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi16(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(low)) & 0xffffu;
}

// Code of a magnitude not above the maximum, in the low 16 bits of each lane; see EncodeMagnitude
// in scalar.h. The power of two to add comes from a table over the exponent.
template <Format format>
struct Encoder;

template <>
struct Encoder<Format::kE4M3> {
  I table;
  Encoder() {
    uint32_t t[16];
    for (uint32_t e = 121; e < 137; ++e) t[e % 16] = (e + 20) << 23 | (e - 121) << 3;
    table = LoadI(t);
  }
  I operator()(F p) const {
    const I exponent = Srl<23>(Max32(AsI(p), Set(121u << 23)));
    return AsI(AddF(p, AsF(_mm512_permutexvar_epi32(exponent, table))));
  }
};

template <>
struct Encoder<Format::kE5M2> {
  I low, high;
  Encoder() {
    uint32_t t[32];
    for (uint32_t e = 113; e < 145; ++e) t[e % 32] = (e + 21) << 23 | (e - 113) << 2;
    low = LoadI(t);
    high = LoadI(t + 16);
  }
  I operator()(F p) const {
    const I exponent = Srl<23>(Max32(AsI(p), Set(113u << 23)));
    return AsI(AddF(p, AsF(_mm512_permutex2var_epi32(low, exponent, high))));
  }
};

inline void StoreCodes(uint8_t* p, Codes c) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), c);
}
inline void StreamCodes(uint8_t* p, Codes c) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), c);
}
inline void StorePart(uint8_t* p, Codes c, int64_t n) {
  _mm256_mask_storeu_epi8(p, static_cast<__mmask32>((uint64_t{1} << n) - 1), c);
}
inline void Fence() { _mm_sfence(); }

// kUnit elements of 16 bits in one register.
struct Raw16 {
  I v;
};
inline Raw16 LoadRaw(const uint16_t* p) { return {LoadI(p)}; }
inline Raw16 LoadRawPart(const uint16_t* p, int64_t n) {
  return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)};
}
// The low 8 bits of the 16-bit lanes.
inline Codes Bytes16(I v) { return _mm512_cvtepi16_epi8(v); }
inline I Srl16By8(I v) { return _mm512_srli_epi16(v, 8); }

// kUnit elements of 32 bits in two.
struct Raw32 {
  I a, b;
};
inline Raw32 LoadRaw(const uint32_t* p) { return {LoadI(p), LoadI(p + kLanes)}; }
inline Raw32 LoadRawPart(const uint32_t* p, int64_t n) {
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << n) - 1);
  return {_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), p),
          _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask >> 16), p + kLanes)};
}
// The low 8 bits of the lanes of a and then b.
inline Codes Bytes32(I a, I b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a)),
                                 _mm512_cvtepi32_epi8(b), 1);
}

// bfloat16: the even elements are the low halves of 32-bit lanes, the odd ones the high halves.
inline void WidenPairs(I v, F* even, F* odd) {
  *even = AsF(Sll<16>(v));
  *odd = AsF(And(v, Set(0xffff0000u)));
}
// 16-bit lanes again from the low 16 bits of both.
inline I JoinPairs(I even, I odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, even, Sll<16>(odd));
}

inline void WidenHalf(I v, F* low, F* high) {
  *low = _mm512_cvtph_ps(_mm512_castsi512_si256(v));
  *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1));
}
inline I JoinHalf(I low, I high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                            _mm512_cvtepi32_epi16(high), 1);
}
// float16 bits in 32-bit lanes to float32.
inline F HalfLanes(I v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }

// The 16 columns of 64 rows of bytes, `stride` apart: out[c] is column c.
constexpr int kTransposeRows = 64;
inline void Transpose(const uint8_t* in, int64_t stride, I* out) {
  I v[16];
  for (int i = 0; i < 16; ++i) {
    const auto load = [&](int r) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + r * stride));
    };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 16), 1);
    const __m256i high =
        _mm256_inserti128_si256(_mm256_castsi128_si256(load(i + 32)), load(i + 48), 1);
    v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  for (int stage = 0; stage < 4; ++stage) {
    for (int i = 0; i < 8; ++i) {
      out[2 * i] = _mm512_unpacklo_epi8(v[i], v[i + 8]);
      out[2 * i + 1] = _mm512_unpackhi_epi8(v[i], v[i + 8]);
    }
    for (int i = 0; i < 16; ++i) v[i] = out[i];
  }
}
// n < 64 bytes; a call of memcpy costs more than all the rest of a short run.
inline void CopyPart(uint8_t* to, const uint8_t* from, int64_t n) {
  const __mmask64 mask = (uint64_t{1} << n) - 1;
  _mm512_mask_storeu_epi8(to, mask, _mm512_maskz_loadu_epi8(mask, from));
}
inline void StreamI(void* p, I v) { _mm512_stream_si512(static_cast<__m512i*>(p), v); }

// kLanes consecutive elements, or the first n of them, as float32 and back. Rounded values have one
// NaN; FTZ left no subnormal.
inline __mmask16 First(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
// The first n lanes, zeros in the others; n <= kLanes.
inline F FirstLanes(F v, int64_t n) { return _mm512_maskz_mov_ps(First(n), v); }
inline F Rounded(F v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), AsF(Set(kQuietNan)));
}
template <Float dtype>
struct Lanes;
template <>
struct Lanes<Float::kF32> {
  static F Load(const void* p) { return _mm512_loadu_ps(p); }
  static F LoadPart(const void* p, int64_t n) { return _mm512_maskz_loadu_ps(First(n), p); }
  static void Store(void* p, F v) { _mm512_storeu_ps(p, Rounded(v)); }
  static void StorePart(void* p, F v, int64_t n) { _mm512_mask_storeu_ps(p, First(n), Rounded(v)); }
};
struct Lanes16 {
  static __m256i LoadAll(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m256i LoadSome(const void* p, int64_t n) {
    return _mm256_maskz_loadu_epi16(First(n), p);
  }
  static void StoreAll(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static void StoreSome(void* p, __m256i v, int64_t n) { _mm256_mask_storeu_epi16(p, First(n), v); }
};
template <>
struct Lanes<Float::kBf16> : Lanes16 {
  static F Widen(__m256i v) { return AsF(Sll<16>(_mm512_cvtepu16_epi32(v))); }
  static __m256i Narrow(F v) {
    const I bits = AsI(Rounded(v));
    const I up = Add(And(Srl<16>(bits), Set(1)), Set(0x7fff));
    return _mm512_cvtepi32_epi16(Srl<16>(Add(bits, up)));
  }
  static F Load(const void* p) { return Widen(LoadAll(p)); }
  static F LoadPart(const void* p, int64_t n) { return Widen(LoadSome(p, n)); }
  static void Store(void* p, F v) { StoreAll(p, Narrow(v)); }
  static void StorePart(void* p, F v, int64_t n) { StoreSome(p, Narrow(v), n); }
};
template <>
struct Lanes<Float::kF16> : Lanes16 {
  static __m256i Narrow(F v) {
    return _mm512_cvtps_ph(Rounded(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F Load(const void* p) { return _mm512_cvtph_ps(LoadAll(p)); }
  static F LoadPart(const void* p, int64_t n) { return _mm512_cvtph_ps(LoadSome(p, n)); }
  static void Store(void* p, F v) { StoreAll(p, Narrow(v)); }
  static void StorePart(void* p, F v, int64_t n) { StoreSome(p, Narrow(v), n); }
};

}  // namespace
}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_LANES_AVX512_H_
