// The numerics of one element, and packs of eight elements. Raw pointers, no XLA or nanobind.
//
// An input below 2^-126 is the zero of its sign: by integer compare, or in MulFtz, whose hardware
// multiplication says so whatever the compiler's flags. Everything else avoids subnormals. The
// conversions to FP8 are the hardware's (sm_89 and newer): nearest even, saturating, every NaN to
// 0x7f, which is what the library defines.
#ifndef TE_FLAX_CUDA_KERNELS_NUMERICS_CUH_
#define TE_FLAX_CUDA_KERNELS_NUMERICS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "common/formats.h"

namespace te_flax::cuda {

constexpr uint32_t kAbs = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;
constexpr uint32_t kOne = 0x3f800000u;
constexpr uint32_t kMinNormal = 0x00800000u;
constexpr uint32_t kQuietNan = 0x7fc00000u;
constexpr int kPack = 8;  // elements that a thread loads at once: 16 bytes of bf16 or f16

__device__ inline uint32_t Flush(uint32_t bits) {
  return (bits & kAbs) < kMinNormal ? bits & ~kAbs : bits;
}

// a * b, where subnormal operands and results are zeros of their sign. FP8 codes of subnormals are
// such zeros in any case.
__device__ inline float MulFtz(float a, float b) {
  float product;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ inline float QuietFloat(float x) { return x == x ? x : __uint_as_float(kQuietNan); }

// A variant that must do nothing has noop[0] != 0 (a subnormal counts as 0).
__device__ inline bool Skips(const uint32_t* noop) {
  return noop != nullptr && (noop[0] & kAbs) >= kMinNormal;
}

// Eight elements as they lie in memory; missing ones are zero.
template <Float dtype>
struct alignas(16) Pack {  // so that it is one or two words of 16 bytes in shared memory too
  static constexpr int kBytes = dtype == Float::kF32 ? 4 : 2;
  static constexpr int kWords = kPack * kBytes / 4;
  uint32_t words[kWords];

  // `aligned`: x and index allow 16-byte loads wherever all eight are valid.
  __device__ void Load(const void* __restrict__ x, int64_t index, int valid, bool aligned) {
    const char* from = static_cast<const char*>(x) + index * kBytes;
    if (aligned && valid == kPack) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + 4 * i));
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    if (valid <= 0) return;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j >= valid) continue;
      if constexpr (dtype == Float::kF32) {
        words[j] = __ldg(reinterpret_cast<const uint32_t*>(from) + j);
      } else {
        const uint32_t half = __ldg(reinterpret_cast<const uint16_t*>(from) + j);
        words[j / 2] |= half << (16 * (j % 2));
      }
    }
  }

  // Stores the first `valid` elements.
  __device__ void Store(void* x, int64_t index, int valid, bool aligned) const {
    char* to = static_cast<char*>(x) + index * kBytes;
    if (aligned && valid == kPack) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        *reinterpret_cast<uint4*>(to + 4 * i) =
            make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j >= valid) continue;
      if constexpr (dtype == Float::kF32) {
        reinterpret_cast<uint32_t*>(to)[j] = words[j];
      } else {
        reinterpret_cast<uint16_t*>(to)[j] = static_cast<uint16_t>(words[j / 2] >> (16 * (j % 2)));
      }
    }
  }

  // Makes zeros of all but the first `valid` elements.
  __device__ void Keep(int valid) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j < valid) continue;
      if constexpr (dtype == Float::kF32) {
        words[j] = 0;
      } else {
        words[j / 2] &= j % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
      }
    }
  }

  // Rounds kCount elements from `first` on, both even, to nearest even. They are not subnormal.
  template <int kCount>
  __device__ void Round(const float (&v)[kCount], int first = 0) {
#pragma unroll
    for (int i = 0; i < kCount * kBytes / 4; ++i) {
      uint32_t& word = words[first * kBytes / 4 + i];
      if constexpr (dtype == Float::kF32) {
        word = __float_as_uint(v[i]);
      } else if constexpr (dtype == Float::kBf16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        memcpy(&word, &pair, sizeof(word));
      } else {
        const __half2 pair = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        memcpy(&word, &pair, sizeof(word));
      }
    }
  }

  // The float32 bits of element j, not flushed.
  __device__ uint32_t Bits(int j) const {
    if constexpr (dtype == Float::kF32) {
      return words[j];
    } else {
      const uint32_t word = words[j / 2];
      if constexpr (dtype == Float::kBf16) {
        return j % 2 == 0 ? word << 16 : word & 0xffff0000u;
      } else {
        const uint16_t half = static_cast<uint16_t>(j % 2 == 0 ? word : word >> 16);
        return __float_as_uint(__half2float(__ushort_as_half(half)));
      }
    }
  }

  // The magnitudes. They order like their bits, NaN above Inf.
  __device__ Pack Abs() const {
    Pack abs;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      abs.words[i] = words[i] & (dtype == Float::kF32 ? kAbs : 0x7fff7fffu);
    }
    return abs;
  }

  // Makes NaN and Inf zeros; the pack holds magnitudes.
  __device__ void DropNonfinite() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (dtype == Float::kF32) {
        words[i] = words[i] < kInf ? words[i] : 0;
      } else {
        words[i] &= __vcmpltu2(words[i], dtype == Float::kBf16 ? 0x7f807f80u : 0x7c007c00u);
      }
    }
  }

  // The pack of the thread whose lane differs by the bit `distance`.
  __device__ Pack Shuffled(int distance) const {
    Pack other;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      other.words[i] = __shfl_xor_sync(~0u, words[i], distance);
    }
    return other;
  }

  // Makes every element the larger of it and that of `other`; both hold magnitudes.
  __device__ void Join(const Pack& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Larger(words[i], other.words[i]);
  }

  // The float32 bits of the largest of eight magnitudes.
  __device__ uint32_t Largest() const {
    Pack largest;
    largest.words[0] = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) largest.words[0] = Larger(largest.words[0], words[i]);
    if constexpr (dtype == Float::kF32) return largest.words[0];
    return max(largest.Bits(0), largest.Bits(1));
  }

  __device__ static uint32_t Larger(uint32_t a, uint32_t b) {
    return dtype == Float::kF32 ? max(a, b) : __vmaxu2(a, b);
  }
};

// Two codes, that of `lo` in the low byte.
__device__ inline uint32_t Encode2(float lo, float hi, Format format) {
  const float2 pair = make_float2(lo, hi);
  return format == Format::kE4M3 ? __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)
                                 : __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E5M2);
}

__device__ inline uint2 Encode8(const float (&v)[kPack], Format format) {
  uint2 codes;
  codes.x = Encode2(v[0], v[1], format) | Encode2(v[2], v[3], format) << 16;
  codes.y = Encode2(v[4], v[5], format) | Encode2(v[6], v[7], format) << 16;
  return codes;
}

// Eight values below 256 as bytes, the first one lowest.
__device__ inline uint2 EightBytes(const uint32_t (&v)[kPack]) {
  return make_uint2(v[0] | v[1] << 8 | v[2] << 16 | v[3] << 24,
                    v[4] | v[5] << 8 | v[6] << 16 | v[7] << 24);
}

// Stores the first `valid` of eight bytes.
__device__ inline void StoreCodes(uint8_t* to, uint2 codes, int valid, bool aligned) {
  if (aligned && valid == kPack) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const uint32_t word = j < 4 ? codes.x : codes.y;
    if (j < valid) to[j] = static_cast<uint8_t>(word >> (8 * (j % 4)));
  }
}

// e8m0 byte of a block whose largest magnitude has these float32 bits (NaN sorts above Inf):
// amax * f32(1 / max) rounded up to a power of two, clamped at 0. With max = s * 2^max_exponent and
// 1 <= s < 2, the product rounds to at most 2^k exactly where amax <= s * 2^(k + max_exponent):
// tried for every float32. So the exponent goes up above the mantissa of s, which is what
// `round_up` makes it do, and a subnormal amax gives 0.
__device__ inline uint32_t ScaleAbove(uint32_t amax, uint32_t round_up, int max_exponent) {
  if (amax >= kInf) return amax > kInf ? 255 : 254;
  return max(static_cast<int>((amax + round_up) >> 23) - max_exponent, 0);
}

// Of the FP8 formats, whose maxima are 1.75 * 2^8 and 1.75 * 2^15.
__device__ inline uint32_t BlockScale(uint32_t amax, Format format) {
  return ScaleAbove(amax, 0x1fffffu, format == Format::kE4M3 ? 8 : 15);
}

// 2^(127 - e), which turns a NaN block (255) into NaN throughout. For a block with an infinity
// (254) it is 2^-63, and 2^-64 is left to apply: 2^-127 is subnormal.
__device__ inline float BlockFactor(uint32_t e8m0) {
  return __uint_as_float(e8m0 == 255 ? kQuietNan : e8m0 == 254 ? 64u << 23 : (254 - e8m0) << 23);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_NUMERICS_CUH_
