// FP6 codes, by way of the FP8 conversions of the hardware. Raw pointers, no XLA or nanobind
// includes.
//
// e2m3 and e4m3 have the same mantissa, e3m2 and e5m2 too. Scaled so that their smallest normal
// numbers meet, a value of the FP6 format and of the FP8 one have the same exponent field and
// mantissa, subnormals included: the FP8 code of the scaled value is the FP6 code up to 31.
#ifndef TE_FLAX_CUDA_KERNELS_FP6_CUH_
#define TE_FLAX_CUDA_KERNELS_FP6_CUH_

#include "cuda/kernels/dequantize.cuh"

namespace te_flax::cuda {

constexpr int kFp6Group = 4;  // codes
constexpr int kFp6Bytes = 3;  // that they take
constexpr int kPackBytes = kPack / kFp6Group * kFp6Bytes;

__device__ inline Format Fp8Of(Format format) {
  return format == Format::kE2M3 ? Format::kE4M3 : Format::kE5M2;
}

// log2 of the smallest normal number as a multiple of that of Fp8Of(format).
__device__ inline int Fp8Shift(Format format) { return format == Format::kE2M3 ? 6 : 12; }

__device__ inline float PowerOf2(int n) {
  return __uint_as_float(static_cast<uint32_t>(127 + n) << 23);
}

// The codes of four FP8 codes of scaled values, each in a byte. `special`: these may be NaN (0x7f,
// without a sign), which becomes 0, or the saturated infinity, above 31.
__device__ inline uint32_t Fp6OfFp8(uint32_t fp8, bool special) {
  uint32_t magnitudes = fp8 & 0x7f7f7f7fu;
  if (special) {
    magnitudes &= ~__vcmpeq4(magnitudes, 0x7f7f7f7fu);
    magnitudes = __vminu4(magnitudes, 0x1f1f1f1fu);
  }
  return magnitudes | (fp8 & 0x80808080u) >> 2;
}

// Four codes, one in a byte, as 24 bits, and back.
__device__ inline uint32_t JoinFp6(uint32_t codes) {
  return (codes & 0x3fu) | (codes >> 2 & 0xfc0u) | (codes >> 4 & 0x3f000u) |
         (codes >> 6 & 0xfc0000u);
}

__device__ inline uint32_t SplitFp6(uint32_t bits) {
  return (bits & 0x3fu) | (bits & 0xfc0u) << 2 | (bits & 0x3f000u) << 4 | (bits & 0xfc0000u) << 6;
}

// Eight codes, one in a byte, from 48 bits.
__device__ inline uint2 SplitEight(uint2 bits) {
  return make_uint2(SplitFp6(bits.x), SplitFp6(bits.x >> 24 | bits.y << 8));
}

// Eight codes, one in a byte, as 48 bits.
__device__ inline uint2 JoinEight(uint2 codes) {
  const uint32_t a = JoinFp6(codes.x), b = JoinFp6(codes.y);
  return make_uint2(a | b << 24, b >> 8);
}

// The bytes of 48 bits that `valid` codes take. `aligned`: `to` is even.
__device__ inline void StoreFp6(uint8_t* to, uint2 bits, int valid, bool aligned) {
  if (aligned && valid == kPack) {
    auto* halves = reinterpret_cast<uint16_t*>(to);
    halves[0] = static_cast<uint16_t>(bits.x);
    halves[1] = static_cast<uint16_t>(bits.x >> 16);
    halves[2] = static_cast<uint16_t>(bits.y);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPackBytes; ++i) {
    const uint32_t word = i < 4 ? bits.x : bits.y;
    if (i / kFp6Bytes * kFp6Group < valid) to[i] = static_cast<uint8_t>(word >> (8 * (i % 4)));
  }
}

__device__ inline uint2 LoadFp6(const uint8_t* __restrict__ from, int valid, bool aligned) {
  uint2 bits = make_uint2(0, 0);
  if (aligned && valid == kPack) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    bits.x = __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16;
    bits.y = __ldg(halves + 2);
    return bits;
  }
#pragma unroll
  for (int i = 0; i < kPackBytes; ++i) {
    if (i / kFp6Bytes * kFp6Group >= valid) continue;
    (i < 4 ? bits.x : bits.y) |= static_cast<uint32_t>(__ldg(from + i)) << (8 * (i % 4));
  }
  return bits;
}

// The values of eight codes, one in a byte, of which the lower six bits count.
__device__ inline void DecodeFp6(uint2 codes, Format format, float (&v)[kPack]) {
  const auto fp8 = [](uint32_t word) { return (word & 0x1f1f1f1fu) | (word & 0x20202020u) << 2; };
  Decode8(make_uint2(fp8(codes.x), fp8(codes.y)), Fp8Of(format), v);
  const float power = PowerOf2(Fp8Shift(format));
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = __fmul_rn(v[j], power);
}

// Packed codes [m, 3 k / 4] for DequantizeBlocksKernel; k is a multiple of 4.
struct Fp6Codes {
  const uint8_t* data;
  int64_t k;
  Format format;

  __device__ void Load(int64_t r, int64_t c, int valid, bool aligned, float (&v)[kPack]) const {
    const uint8_t* from = data + (r * k + c) / kFp6Group * kFp6Bytes;
    DecodeFp6(SplitEight(LoadFp6(from, valid, aligned)), format, v);
  }
};

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_FP6_CUH_
