// MXFP8 quantization: codes with blocks of 32 along rows and along columns, their e8m0 scales and
// the amax of x, from one read of x. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_MXFP8_CUH_
#define TE_FLAX_CUDA_KERNELS_MXFP8_CUH_

#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {

constexpr int kMxBlock = 32;
constexpr int kMxTileColumns = 64;  // of the tile of one warp, which has 32 rows
constexpr int kMxWarps = 8;
constexpr int kMxLaneRows = 8;  // of the tile's rows that a lane holds

// x, row and col are [m, k]. Plain scales: row_scale [m, ceil(k / 32)], col_scale [ceil(m / 32),
// k]. Swizzled ones: tiles of 128 x 4 scales, of [m, k / 32] and of [k, m / 32].
struct Mxfp8Quantize {
  const uint32_t* noop;
  const void* x;
  int64_t m, k;
  uint8_t* row;
  uint8_t* row_scale;
  uint8_t* col;
  uint8_t* col_scale;
  uint32_t* amax;  // [2], zeros before the launch
  Format row_format, col_format;
  bool swizzled;
  bool aligned;  // 16-byte loads of x and 8-byte stores wherever a pack is whole
};

// Index of scale (r, c) of a [rows, columns] array in tiles of 128 x 4, in the order that the
// block-scaled matrix products read: [r / 128, c / 4, r % 32, r % 128 / 32, c % 4].
__device__ inline int64_t SwizzledIndex(int64_t r, int64_t c, int64_t columns) {
  const int64_t tile = r / 128 * ((columns + 3) / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

// What a lane works on: 8 columns from k of the rows m, m + 4, .., m + 28.
struct Mxfp8Lane {
  int64_t m, k;
  int valid;  // of the columns
};

// Row codes and scales of one warp's tile. With kFull every pack is whole and aligned.
template <bool kFull, Float dtype>
__device__ inline void StoreRows(const Mxfp8Quantize& p, const Mxfp8Lane& at,
                                 const Pack<dtype> (&packs)[kMxLaneRows],
                                 uint32_t (&largest)[kMxLaneRows]) {
  const int64_t blocks = (p.k + kMxBlock - 1) / kMxBlock;
  const int64_t block = at.k / kMxBlock;
  // Four rows on, a swizzled scale is 64 bytes on: 32 rows never leave a tile.
  uint8_t* scale =
      p.row_scale + (p.swizzled ? SwizzledIndex(at.m, block, blocks) : at.m * blocks + block);
  const int64_t step = p.swizzled ? 64 : 4 * blocks;
  uint8_t* row = p.row + at.m * p.k + at.k;
#pragma unroll
  for (int i = 0; i < kMxLaneRows; ++i, row += 4 * p.k, scale += step) {
    uint32_t amax = largest[i];
    amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
    const uint32_t e8m0 = BlockScale(amax, p.row_format);
    const float factor = BlockFactor(e8m0);
    float v[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(packs[i].Bits(j)), factor);
    if (e8m0 == 254) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) v[j] = MulFtz(v[j], 0x1p-64f);
    }
    const int valid = kFull ? kPack : at.m + 4 * i < p.m ? at.valid : 0;
    StoreCodes(row, Encode8(v, p.row_format), valid, kFull || p.aligned);
    if (threadIdx.x % 4 == 0 && valid > 0) *scale = static_cast<uint8_t>(e8m0);
  }
}

// Column codes and scales of one warp's tile; `columns` holds the lane's largest magnitudes.
template <bool kFull, Float dtype>
__device__ inline void StoreColumns(const Mxfp8Quantize& p, const Mxfp8Lane& at,
                                    const Pack<dtype> (&packs)[kMxLaneRows], Pack<dtype>& columns) {
#pragma unroll
  for (int distance = 8; distance < 32; distance *= 2) {
    Pack<dtype> other;
#pragma unroll
    for (int w = 0; w < Pack<dtype>::kWords; ++w) {
      other.words[w] = __shfl_xor_sync(~0u, columns.words[w], distance);
    }
    columns.Join(other);
  }
  uint32_t scales[kPack];
  float factors[kPack];
  bool infinite = false;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    scales[j] = BlockScale(columns.Bits(j), p.col_format);
    factors[j] = BlockFactor(scales[j]);
    infinite |= scales[j] == 254;
  }
  uint8_t* col = p.col + at.m * p.k + at.k;
#pragma unroll
  for (int i = 0; i < kMxLaneRows; ++i, col += 4 * p.k) {
    float v[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(packs[i].Bits(j)), factors[j]);
    if (infinite) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) v[j] = MulFtz(v[j], scales[j] == 254 ? 0x1p-64f : 1.0f);
    }
    const int valid = kFull ? kPack : at.m + 4 * i < p.m ? at.valid : 0;
    StoreCodes(col, Encode8(v, p.col_format), valid, kFull || p.aligned);
  }
  const int64_t block = at.m / kMxBlock;
  if (threadIdx.x % 32 >= 8 || block * kMxBlock >= p.m) return;
  if (p.swizzled) {  // of the transpose: the columns are its rows, 16 bytes apart in a tile
    uint8_t* to = p.col_scale + SwizzledIndex(at.k, block, (p.m + kMxBlock - 1) / kMxBlock);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (kFull || j < at.valid) to[16 * j] = static_cast<uint8_t>(scales[j]);
    }
    return;
  }
  const uint2 bytes = make_uint2(scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24,
                                 scales[4] | scales[5] << 8 | scales[6] << 16 | scales[7] << 24);
  StoreCodes(p.col_scale + block * p.k + at.k, bytes, kFull ? kPack : at.valid, kFull || p.aligned);
}

template <bool kFull, bool kRow, bool kCol, Float dtype>
__device__ inline void QuantizeMxfp8Tile(const Mxfp8Quantize& p, const Mxfp8Lane& at, Amax* seen) {
  Pack<dtype> packs[kMxLaneRows];
  int64_t index = at.m * p.k + at.k;
#pragma unroll
  for (int i = 0; i < kMxLaneRows; ++i, index += 4 * p.k) {
    const int valid = kFull ? kPack : at.m + 4 * i < p.m ? at.valid : 0;
    packs[i].Load(p.x, index, valid, kFull || p.aligned);
  }
  Pack<dtype> columns = {};
  uint32_t largest[kMxLaneRows];
#pragma unroll
  for (int i = 0; i < kMxLaneRows; ++i) {
    const Pack<dtype> abs = packs[i].Abs();
    if constexpr (kCol) columns.Join(abs);
    largest[i] = abs.Largest();
    seen->Join(largest[i], packs[i]);
  }
  if constexpr (kRow) StoreRows<kFull>(p, at, packs, largest);
  if constexpr (kCol) StoreColumns<kFull>(p, at, packs, columns);
}

// Two blocks on a multiprocessor where x takes 64 registers, or both copies need their factors;
// three would spill there. Elsewhere three are 9 to 14 % faster.
template <Float dtype, bool kRow, bool kCol>
constexpr int kMxBlocks = dtype == Float::kF32 || (kRow && kCol) ? 2 : 3;

// A warp makes 32 rows x 64 columns: lane % 8 chooses 8 columns, lane / 8 the rows. The four lanes
// of a row block are neighbours and those of a column block 8 apart, so that two shuffles join
// either. x stays in registers between the two passes.
template <Float dtype, bool kRow, bool kCol>
__global__ void __launch_bounds__(32 * kMxWarps, kMxBlocks<dtype, kRow, kCol>)
    QuantizeMxfp8Kernel(Mxfp8Quantize p) {
  if (Skips(p.noop)) return;
  const int lane = threadIdx.x % 32;
  // 2^32 tiles would be more elements than any memory holds.
  const uint32_t tiles = static_cast<uint32_t>((p.k + kMxTileColumns - 1) / kMxTileColumns);
  const uint32_t tile = blockIdx.x * kMxWarps + threadIdx.x / 32;
  Mxfp8Lane at;
  at.m = int64_t{tile / tiles} * kMxBlock + lane / 8;
  at.k = int64_t{tile % tiles} * kMxTileColumns + lane % 8 * kPack;
  const int64_t left = p.k - at.k;
  at.valid = static_cast<int>(left < 0 ? 0 : left < kPack ? left : kPack);
  const bool full = p.aligned && at.k - lane % 8 * kPack + kMxTileColumns <= p.k &&
                    at.m - lane / 8 + kMxBlock <= p.m;
  Amax seen;
  if (full) {
    QuantizeMxfp8Tile<true, kRow, kCol, dtype>(p, at, &seen);
  } else {
    QuantizeMxfp8Tile<false, kRow, kCol, dtype>(p, at, &seen);
  }
  seen.Store(p.amax);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_MXFP8_CUH_
