// FP8 codes and their scales back to float32, bfloat16 or float16. Raw pointers, no XLA or
// nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_DEQUANTIZE_CUH_
#define TE_FLAX_CUDA_KERNELS_DEQUANTIZE_CUH_

#include "cuda/kernels/numerics.cuh"

namespace te_flax::cuda {

constexpr int kDequantizeThreads = 256;

__device__ inline float2 Decode2(uint32_t codes, Format format) {
  const auto two = static_cast<__nv_fp8x2_storage_t>(codes);
  const __half2_raw halves = format == Format::kE4M3 ? __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)
                                                     : __nv_cvt_fp8x2_to_halfraw2(two, __NV_E5M2);
  return __half22float2(__half2(halves));
}

// A scale in a range where no product with a code is subnormal: where `lifted`, it is 2^64 times
// the true one, and Apply takes that back after it has turned tiny results into signed zeros.
struct Factor {
  float value;
  bool lifted;

  __device__ static Factor OfScale(float scale_inv) {
    const float scale = __uint_as_float(Flush(__float_as_uint(scale_inv)));
    const bool lifted = fabsf(scale) < 0x1p-60f;
    return {lifted ? __fmul_rn(scale, 0x1p64f) : scale, lifted};
  }

  __device__ static Factor OfE8m0(uint32_t e) {
    const bool lifted = e < 64;
    return {__uint_as_float(e == 255 ? kQuietNan : (lifted ? e + 64 : e) << 23), lifted};
  }

  __device__ float Apply(float code) const {
    const float u = __fmul_rn(code, value);
    if (!lifted) return u;
    return fabsf(u) < 0x1p-62f ? copysignf(0.0f, u) : __fmul_rn(u, 0x1p-64f);
  }
};

// The bits of one rounding to dtype; every NaN is the positive quiet one.
template <Float dtype>
__device__ inline uint32_t Narrow(float v) {
  const bool nan = (__float_as_uint(v) & kAbs) > kInf;
  if constexpr (dtype == Float::kF32) {
    return nan ? kQuietNan : __float_as_uint(v);
  } else if constexpr (dtype == Float::kBf16) {
    return nan ? 0x7fc0u : __bfloat16_as_ushort(__float2bfloat16_rn(v));
  } else {
    return nan ? 0x7e00u : __half_as_ushort(__float2half_rn(v));
  }
}

template <Float dtype>
__device__ inline void StoreValues(void* x, int64_t index, const float (&v)[kPack], int valid,
                                   bool aligned) {
  constexpr int kWords = Pack<dtype>::kWords;
  if (aligned && valid == kPack) {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (dtype == Float::kF32) {
        words[i] = Narrow<dtype>(v[i]);
      } else {
        words[i] = Narrow<dtype>(v[2 * i]) | Narrow<dtype>(v[2 * i + 1]) << 16;
      }
    }
    auto* to = reinterpret_cast<uint4*>(static_cast<char*>(x) + index * Pack<dtype>::kBytes);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      to[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (j >= valid) continue;
    const uint32_t bits = Narrow<dtype>(v[j]);
    if constexpr (dtype == Float::kF32) {
      static_cast<uint32_t*>(x)[index + j] = bits;
    } else {
      static_cast<uint16_t*>(x)[index + j] = static_cast<uint16_t>(bits);
    }
  }
}

__device__ inline uint2 LoadCodes(const uint8_t* __restrict__ from, int valid, bool aligned) {
  if (aligned && valid == kPack) return __ldg(reinterpret_cast<const uint2*>(from));
  uint2 codes = make_uint2(0, 0);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (j >= valid) continue;
    (j < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(__ldg(from + j)) << (8 * (j % 4));
  }
  return codes;
}

__device__ inline void Decode8(uint2 codes, Format format, float (&v)[kPack]) {
#pragma unroll
  for (int j = 0; j < kPack; j += 2) {
    const uint32_t word = j < 4 ? codes.x : codes.y;
    const float2 pair = Decode2((word >> (8 * (j % 4))) & 0xffffu, format);
    v[j] = pair.x;
    v[j + 1] = pair.y;
  }
}

// scale_inv is one float32 for the whole array.
template <Float dtype>
__global__ void __launch_bounds__(kDequantizeThreads)
    DequantizeKernel(const uint8_t* __restrict__ data, const float* __restrict__ scale_inv,
                     int64_t n, Format format, bool aligned, void* x) {
  const Factor factor = Factor::OfScale(__ldg(scale_inv));
  const int64_t step = int64_t{gridDim.x} * kDequantizeThreads * kPack;
  int64_t i = (int64_t{blockIdx.x} * kDequantizeThreads + threadIdx.x) * kPack;
  for (; i < n; i += step) {
    const int valid = static_cast<int>(n - i < kPack ? n - i : kPack);
    float v[kPack];
    Decode8(LoadCodes(data + i, valid, aligned), format, v);
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = factor.Apply(v[j]);
    StoreValues<dtype>(x, i, v, valid, aligned);
  }
}

// The scales of a matrix of codes in blocks, applied to eight values from (r, c). A pack of eight
// codes never leaves a row, nor a block along it.

// Plain e8m0 scales [m, ceil(k / 32)].
struct Mxfp8RowScales {
  const uint8_t* scale;
  int64_t blocks;

  __device__ void Apply(int64_t r, int64_t c, int, bool, float (&v)[kPack]) const {
    const Factor factor = Factor::OfE8m0(__ldg(scale + r * blocks + c / 32));
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = factor.Apply(v[j]);
  }
};

// Plain e8m0 scales [ceil(m / 32), k].
struct Mxfp8ColScales {
  const uint8_t* scale;
  int64_t k;

  __device__ void Apply(int64_t r, int64_t c, int valid, bool aligned, float (&v)[kPack]) const {
    const uint2 scales = LoadCodes(scale + r / 32 * k + c, valid, aligned);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t e = ((j < 4 ? scales.x : scales.y) >> (8 * (j % 4))) & 0xffu;
      v[j] = Factor::OfE8m0(e).Apply(v[j]);
    }
  }
};

// float32 scales [ceil(m / 2^log2_rows), ceil(k / 128)].
struct FloatScales {
  const float* scale;
  int64_t blocks;
  int log2_rows;

  __device__ void Apply(int64_t r, int64_t c, int, bool, float (&v)[kPack]) const {
    const Factor factor = Factor::OfScale(__ldg(scale + (r >> log2_rows) * blocks + c / 128));
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = factor.Apply(v[j]);
  }
};

// FP8 codes [m, k].
struct Fp8Codes {
  const uint8_t* data;
  int64_t k;
  Format format;

  __device__ void Load(int64_t r, int64_t c, int valid, bool aligned, float (&v)[kPack]) const {
    Decode8(LoadCodes(data + r * k + c, valid, aligned), format, v);
  }
};

// A matrix [m, k] of codes with scales as above.
template <Float dtype, class Codes, class Scales>
__global__ void __launch_bounds__(kDequantizeThreads)
    DequantizeBlocksKernel(Codes codes, Scales scales, int64_t m, int64_t k, bool aligned,
                           void* x) {
  const int64_t packs = (k + kPack - 1) / kPack;
  const int64_t step = int64_t{gridDim.x} * kDequantizeThreads;
  for (int64_t p = int64_t{blockIdx.x} * kDequantizeThreads + threadIdx.x; p < m * packs;
       p += step) {
    // A 64-bit division costs more than the rest of the loop.
    const int64_t r =
        p <= UINT32_MAX ? static_cast<uint32_t>(p) / static_cast<uint32_t>(packs) : p / packs;
    const int64_t c = (p - r * packs) * kPack;
    const int valid = static_cast<int>(k - c < kPack ? k - c : kPack);
    float v[kPack];
    codes.Load(r, c, valid, aligned, v);
    scales.Apply(r, c, valid, aligned, v);
    StoreValues<dtype>(x, r * k + c, v, valid, aligned);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_DEQUANTIZE_CUH_
