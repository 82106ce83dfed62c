// MXFP6 quantization: packed codes with blocks of 32 along rows and along columns, their e8m0
// scales and the amax of x, from one pass over x. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_MXFP6_SINK_CUH_
#define TE_FLAX_CUDA_KERNELS_MXFP6_SINK_CUH_

#include "cuda/kernels/fp6.cuh"
#include "cuda/kernels/mxfp8_sink.cuh"

namespace te_flax::cuda {

// e8m0 byte of a block, as BlockScale makes it: the maxima are 1.875 * 2^2 and 1.75 * 2^4, and the
// same holds for both (tried for every float32).
__device__ inline uint32_t Fp6BlockScale(uint32_t amax, Format format) {
  const bool e2m3 = format == Format::kE2M3;
  return ScaleAbove(amax, e2m3 ? 0x0fffffu : 0x1fffffu, e2m3 ? 2 : 4);
}

// 2^(127 - e8m0 - Fp8Shift(format)), which turns a NaN block (255) into NaN throughout. From 240 on
// it is 2^64 times that, and 2^-64 is left to apply: alone it would be subnormal.
constexpr uint32_t kLifted = 240;

__device__ inline float Fp6Factor(uint32_t e8m0, Format format) {
  const uint32_t exponent = 254 - e8m0 - static_cast<uint32_t>(Fp8Shift(format));
  const uint32_t bits = (e8m0 < kLifted ? exponent : exponent + 64) << 23;
  return __uint_as_float(e8m0 == 255 ? kQuietNan : bits);
}

// 48 bits of a pack whose columns have these scales and factors; `largest` is the largest scale.
template <Float dtype>
__device__ inline uint2 BlockFp6(const Pack<dtype>& pack, const uint32_t (&e8m0)[kPack],
                                 const float (&factors)[kPack], uint32_t largest, Format format) {
  float v[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), factors[j]);
  if (largest >= kLifted) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(v[j], e8m0[j] >= kLifted ? 0x1p-64f : 1.0f);
  }
  const uint2 fp8 = Encode8(v, Fp8Of(format));
  const bool special = largest >= 254;
  return JoinEight(make_uint2(Fp6OfFp8(fp8.x, special), Fp6OfFp8(fp8.y, special)));
}

// Packed codes of a warp's tile on their way to stores of 16 bytes.
struct alignas(16) Fp6Tile {
  static constexpr int kRowBytes = kMxTileColumns / kFp6Group * kFp6Bytes;
  static constexpr int kRowWords = kRowBytes / 16;
  uint16_t halves[kMxBlock][kRowBytes / 2];
};

// Rows of packed codes of one copy.
struct Fp6Rows {
  uint8_t* data;
  int64_t stride;  // bytes
  bool wide;       // whole tiles may be stored 16 bytes at a time

  // Stores position i of a lane, or leaves it in the warp's tile.
  template <bool kFull>
  __device__ void Put(const Outputs& out, const Lane& at, int i, uint2 bits, Fp6Tile* tile) const {
    if (kFull && wide) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      uint16_t* to = tile->halves[lane / 8 + 4 * i] + lane % 8 * (kPackBytes / 2);
      to[0] = static_cast<uint16_t>(bits.x);
      to[1] = static_cast<uint16_t>(bits.x >> 16);
      to[2] = static_cast<uint16_t>(bits.y);
      return;
    }
    const int64_t m = at.m + 4 * i;
    const int valid = kFull ? kPack : m < out.m ? at.valid : 0;
    StoreFp6(data + m * stride + at.k / kFp6Group * kFp6Bytes, bits, valid, kFull || out.aligned);
  }

  // Stores what waits in the tile, which is then free again.
  template <bool kFull>
  __device__ void Finish(const Lane& at, const Fp6Tile& tile) const {
    if (!kFull || !wide) return;
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t m = at.m - lane / 8;
    const int64_t k = at.k - lane % 8 * kPack;
    uint8_t* to = data + m * stride + k / kFp6Group * kFp6Bytes;
#pragma unroll
    for (int n = 0; n < Fp6Tile::kRowWords; ++n) {
      const int word = lane + 32 * n;
      const int row = word / Fp6Tile::kRowWords, part = word % Fp6Tile::kRowWords;
      *reinterpret_cast<uint4*>(to + row * stride + 16 * part) =
          *(reinterpret_cast<const uint4*>(tile.halves[row]) + part);
    }
    __syncwarp();
  }
};

template <bool kFull, Float dtype>
__device__ inline void StoreFp6Rows(const Outputs& out, const Lane& at, const Fp6Rows& rows,
                                    const Pack<dtype> (&packs)[kLaneRows],
                                    const uint32_t (&largest)[kLaneRows], Fp6Tile* tile) {
  const int64_t blocks = (out.k + kMxBlock - 1) / kMxBlock;
  uint8_t* scale = out.row_scale + at.m * blocks + at.k / kMxBlock;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i, scale += 4 * blocks) {
    const uint32_t e8m0 = Fp6BlockScale(LargestOfFour(largest[i]), out.row_format);
    const float f = Fp6Factor(e8m0, out.row_format);
    const uint32_t scales[kPack] = {e8m0, e8m0, e8m0, e8m0, e8m0, e8m0, e8m0, e8m0};
    const float factors[kPack] = {f, f, f, f, f, f, f, f};
    const uint2 bits = BlockFp6(packs[i], scales, factors, e8m0, out.row_format);
    rows.Put<kFull>(out, at, i, bits, tile);
    const bool first = threadIdx.x % 4 == 0;
    if (first && (kFull || (at.m + 4 * i < out.m && at.valid > 0))) {
      *scale = static_cast<uint8_t>(e8m0);
    }
  }
  rows.Finish<kFull>(at, *tile);
}

// `columns` holds the lane's largest magnitudes.
template <bool kFull, Float dtype>
__device__ inline void StoreFp6Columns(const Outputs& out, const Lane& at, const Fp6Rows& rows,
                                       const Pack<dtype> (&packs)[kLaneRows], Pack<dtype>& columns,
                                       Fp6Tile* tile) {
  JoinColumns(columns);
  uint32_t scales[kPack];
  float factors[kPack];
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    scales[j] = Fp6BlockScale(columns.Bits(j), out.col_format);
    factors[j] = Fp6Factor(scales[j], out.col_format);
    largest = max(largest, scales[j]);
  }
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const uint2 bits = BlockFp6(packs[i], scales, factors, largest, out.col_format);
    rows.Put<kFull>(out, at, i, bits, tile);
  }
  rows.Finish<kFull>(at, *tile);
  const int64_t block = at.m / kMxBlock;
  if (threadIdx.x % 32 >= 8 || block * kMxBlock >= out.m) return;
  StoreCodes(out.col_scale + block * out.k + at.k, EightBytes(scales), kFull ? kPack : at.valid,
             kFull || out.aligned);
}

template <bool kFull, Copies copies, class Source>
__device__ inline void QuantizeMxfp6Tile(const Source& source, const Outputs& out, const Lane& at,
                                         Fp6Tile* tile, Amax* seen) {
  Pack<Source::kType> packs[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) source.Load(PositionOf<kFull>(at, i, out), &packs[i]);
  Pack<Source::kType> columns = {};
  uint32_t largest[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const Pack<Source::kType> abs = packs[i].Abs();
    if (HasCol<copies>(out)) columns.Join(abs);
    largest[i] = abs.Largest();
    seen->Join(largest[i], packs[i]);
  }
  const int64_t stride = (out.k + kFp6Group - 1) / kFp6Group * kFp6Bytes;
  const bool wide = out.aligned && stride % 16 == 0;
  if (HasRow<copies>(out)) {
    StoreFp6Rows<kFull>(out, at, {out.row, stride, wide}, packs, largest, tile);
  }
  if (HasCol<copies>(out)) {
    StoreFp6Columns<kFull>(out, at, {out.col, stride, wide}, packs, columns, tile);
  }
}

// A warp makes 32 rows x 64 columns, as in Mxfp8Kernel. The grid has a block for each group.
template <class Source, Copies copies>
__global__ void __launch_bounds__(Mxfp8Shape<Source>::kThreads, 2)
    Mxfp6Kernel(Source source, Outputs out, bool cooperative) {
  static_assert(!Source::kFused);
  __shared__ Fp6Tile tiles[Mxfp8Shape<Source>::kTiles];
  if (Skips(out.noop)) return;
  Amax seen;
  Fp6Tile* tile = &tiles[Mxfp8Warp<Source>().tile];
  const MxPlace at = PlaceOf<Source>(out, blockIdx.x);
  if (at.full) {
    QuantizeMxfp6Tile<true, copies>(source, out, at.lane, tile, &seen);
  } else {
    QuantizeMxfp6Tile<false, copies>(source, out, at.lane, tile, &seen);
  }
  seen.Store(out.amax, cooperative);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_MXFP6_SINK_CUH_
