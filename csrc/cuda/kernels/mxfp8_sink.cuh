// MXFP8 quantization: codes with blocks of 32 along rows and along columns, their e8m0 scales and
// the amax of h, from one pass over what makes h. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_MXFP8_SINK_CUH_
#define TE_FLAX_CUDA_KERNELS_MXFP8_SINK_CUH_

#include "cuda/kernels/amax.cuh"
#include "cuda/kernels/column_sum.cuh"
#include "cuda/kernels/dequantize.cuh"
#include "cuda/kernels/source.cuh"

namespace te_flax::cuda {

constexpr int kMxBlock = 32;
constexpr int kMxTileColumns = 64;  // of the tile of one warp, which has 32 rows
// Index of scale (r, c) of a [rows, columns] array in tiles of 128 x 4, in the order that the
// block-scaled matrix products read: [r / 128, c / 4, r % 32, r % 128 / 32, c % 4].
__device__ inline int64_t SwizzledIndex(int64_t r, int64_t c, int64_t columns) {
  const int64_t tile = r / 128 * ((columns + 3) / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

// Where the copies of one slice are, as rows `stride` apart.
struct Mxfp8Slice {
  int64_t first;        // of the slice, in row, col and a row of col_scale
  int64_t stride;       // of row, col and col_scale
  int64_t first_block;  // of the slice, in a row of row_scale
};

// Codes of a pack whose block has this scale.
template <Float dtype>
__device__ inline uint2 BlockCodes(const Pack<dtype>& pack, uint32_t e8m0, Format format) {
  const float factor = BlockFactor(e8m0);
  float v[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), factor);
  if (e8m0 == 254) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(v[j], 0x1p-64f);
  }
  return Encode8(v, format);
}

// Stores code * 2^(e8m0 - 127) as bfloat16, which is what dequantize_mxfp8 makes of the codes.
__device__ inline void StoreCodeValues(void* to, int64_t index, uint2 codes, Format format,
                                       const uint32_t (&e8m0)[kPack], int valid, bool aligned) {
  float v[kPack];
  Decode8(codes, format, v);
  bool plain = true;  // no product is subnormal or NaN
#pragma unroll
  for (int j = 0; j < kPack; ++j) plain &= e8m0[j] - 64 < 255 - 64;
  if (plain) {
    Pack<Float::kBf16> pack;
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = __fmul_rn(v[j], __uint_as_float(e8m0[j] << 23));
    pack.Round(v);
    pack.Store(to, index, valid, aligned);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = Factor::OfE8m0(e8m0[j]).Apply(v[j]);
  StoreValues<Float::kBf16>(to, index, v, valid, aligned);
}

// Of the lanes that share a row block: four neighbours.
__device__ inline uint32_t LargestOfFour(uint32_t largest) {
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  return max(largest, __shfl_xor_sync(~0u, largest, 2));
}

// Of the lanes that share column blocks: those 8 apart.
template <Float dtype>
__device__ inline void JoinColumns(Pack<dtype>& columns) {
#pragma unroll
  for (int distance = 8; distance < 32; distance *= 2) columns.Join(columns.Shuffled(distance));
}

// Row codes (or values) and scales of one warp's tile. With kFull every pack is whole and aligned.
template <bool kFull, Copies copies, Float dtype>
__device__ inline void StoreRows(const Outputs& out, const Lane& at, const Mxfp8Slice& slice,
                                 const Pack<dtype> (&packs)[kLaneRows],
                                 uint32_t (&largest)[kLaneRows]) {
  const int64_t blocks = (slice.stride + kMxBlock - 1) / kMxBlock;
  const int64_t block = slice.first_block + at.k / kMxBlock;
  // Four rows on, a swizzled scale is 64 bytes on: 32 rows never leave a tile.
  uint8_t* scale =
      out.row_scale + (out.swizzled ? SwizzledIndex(at.m, block, blocks) : at.m * blocks + block);
  const int64_t step = out.swizzled ? 64 : 4 * blocks;
  int64_t index = at.m * slice.stride + slice.first + at.k;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i, index += 4 * slice.stride, scale += step) {
    const uint32_t e8m0 = BlockScale(LargestOfFour(largest[i]), out.row_format);
    const int valid = kFull ? kPack : at.m + 4 * i < out.m ? at.valid : 0;
    const uint2 codes = BlockCodes(packs[i], e8m0, out.row_format);
    if (copies == Copies::kValues && out.row_values) {
      const uint32_t exponents[kPack] = {e8m0, e8m0, e8m0, e8m0, e8m0, e8m0, e8m0, e8m0};
      StoreCodeValues(out.row, index, codes, out.row_format, exponents, valid,
                      kFull || out.aligned);
    } else {
      StoreCodes(out.row + index, codes, valid, kFull || out.aligned);
    }
    if (threadIdx.x % 4 == 0 && valid > 0) *scale = static_cast<uint8_t>(e8m0);
  }
}

// Column codes (or values) and scales of one warp's tile; `columns` holds the lane's largest
// magnitudes.
template <bool kFull, Copies copies, Float dtype>
__device__ inline void StoreColumns(const Outputs& out, const Lane& at, const Mxfp8Slice& slice,
                                    const Pack<dtype> (&packs)[kLaneRows], Pack<dtype>& columns) {
  JoinColumns(columns);
  uint32_t scales[kPack];
  float factors[kPack];
  bool infinite = false;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    scales[j] = BlockScale(columns.Bits(j), out.col_format);
    factors[j] = BlockFactor(scales[j]);
    infinite |= scales[j] == 254;
  }
  int64_t index = at.m * slice.stride + slice.first + at.k;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i, index += 4 * slice.stride) {
    float v[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(packs[i].Bits(j)), factors[j]);
    if (infinite) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) v[j] = MulFtz(v[j], scales[j] == 254 ? 0x1p-64f : 1.0f);
    }
    const int valid = kFull ? kPack : at.m + 4 * i < out.m ? at.valid : 0;
    const uint2 codes = Encode8(v, out.col_format);
    if (copies == Copies::kValues && out.col_values) {
      StoreCodeValues(out.col, index, codes, out.col_format, scales, valid, kFull || out.aligned);
    } else {
      StoreCodes(out.col + index, codes, valid, kFull || out.aligned);
    }
  }
  const int64_t block = at.m / kMxBlock;
  if (threadIdx.x % 32 >= 8 || block * kMxBlock >= out.m) return;
  if (out.swizzled) {  // of the transpose: the columns are its rows, 16 bytes apart in a tile
    uint8_t* to =
        out.col_scale + SwizzledIndex(slice.first + at.k, block, (out.m + kMxBlock - 1) / kMxBlock);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (kFull || j < at.valid) to[16 * j] = static_cast<uint8_t>(scales[j]);
    }
    return;
  }
  StoreCodes(out.col_scale + block * slice.stride + slice.first + at.k, EightBytes(scales),
             kFull ? kPack : at.valid, kFull || out.aligned);
}

// How the warps of a block lie. Those of plain quantizers go along the rows of x, those of fused
// kernels fill kSumRows rows. Each slice of a tile has a warp.
template <class Source>
struct Mxfp8Shape {
  static constexpr int kSlices = Source::kSlices;
  // The packs of h that wait in shared memory take 32 KB.
  static constexpr int kTiles = Source::kType == Float::kF32 && Source::kFused ? 4 : 8 / kSlices;
  static constexpr int kDown = Source::kFused ? kSumRows / kMxBlock : 1;
  static constexpr int kAcross = kTiles / kDown;
  static constexpr int kThreads = 32 * kTiles * kSlices;
  static constexpr int kColumns = kAcross * kMxTileColumns;
};

// Two slices of float32 would have to wait in 64 KB.
template <class Source>
constexpr bool kFitsMxfp8 = Source::kSlices == 1 || Source::kType != Float::kF32;

// What a warp works on in its block.
template <class Source>
struct Mxfp8Warp {
  int slice = static_cast<int>(threadIdx.x) / 32 % Source::kSlices;
  int tile = static_cast<int>(threadIdx.x) / 32 / Source::kSlices;
  int lane = static_cast<int>(threadIdx.x) % 32;
};

// Joins the column sums of the warps of one block and stores them.
template <class Source>
__device__ inline void StoreWarpSums(const Outputs& out, const Lane& at,
                                     const Pack<Source::kType> (&packs)[kLaneRows]) {
  using Shape = Mxfp8Shape<Source>;
  __shared__ float blocks[Shape::kSlices][Shape::kDown][Shape::kColumns];
  const Mxfp8Warp<Source> warp;
  LaneSums sums;
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) sums.Add(packs[i]);
  sums.Join(8);
  sums.Join(16);
  if (warp.lane < 8) {
    const int column = warp.tile % Shape::kAcross * kMxTileColumns + warp.lane * kPack;
    sums.Store(&blocks[warp.slice][warp.tile / Shape::kAcross][column]);
  }
  __syncthreads();
  const int slice = threadIdx.x / Shape::kColumns;
  const int column = threadIdx.x % Shape::kColumns;
  const int64_t k = at.k / Shape::kColumns * Shape::kColumns + column;
  if (slice >= Shape::kSlices || k >= out.k) return;
  float sum = blocks[slice][0][column];
#pragma unroll
  for (int b = 1; b < Shape::kDown; ++b) sum = AddFtz(sum, blocks[slice][b][column]);
  out.sums[(at.m / kSumRows * Shape::kSlices + slice) * out.k + k] = sum;
}

// Copies and amax of one slice, whose packs are in registers.
template <bool kFull, Copies copies, class Source>
__device__ inline void ConsumeMxfp8(const Outputs& out, const Lane& at, const Mxfp8Slice& slice,
                                    const Pack<Source::kType> (&packs)[kLaneRows], Amax* seen) {
  Pack<Source::kType> columns = {};
  uint32_t largest[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const Pack<Source::kType> abs = packs[i].Abs();
    if (HasCol<copies>(out)) columns.Join(abs);
    largest[i] = abs.Largest();
    seen->Join(largest[i], packs[i]);
  }
  if (HasRow<copies>(out)) StoreRows<kFull, copies>(out, at, slice, packs, largest);
  if (HasCol<copies>(out)) StoreColumns<kFull, copies>(out, at, slice, packs, columns);
}

// One warp's tile of a plain quantizer: x stays in registers.
template <bool kFull, Copies copies, class Source>
__device__ inline void QuantizeMxfp8Tile(const Source& source, const Outputs& out, const Lane& at,
                                         Amax* seen) {
  Pack<Source::kType> packs[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) source.Load(PositionOf<kFull>(at, i, out), &packs[i]);
  ConsumeMxfp8<kFull, copies, Source>(out, at, {0, out.k, 0}, packs, seen);
}

// One slice of a tile. The warps of the slices make the packs of all slices together, each some of
// the rows, and these wait in shared memory: rolled loops make them, unrolled ones use them.
template <Copies copies, class Source>
__device__ inline void FuseMxfp8Tile(const Source& source, const Outputs& out, const Lane& at,
                                     bool full, Amax* seen) {
  using Shape = Mxfp8Shape<Source>;
  constexpr int kRows = kLaneRows / Shape::kSlices;
  __shared__ Pack<Source::kType> waiting[Shape::kSlices][kLaneRows][32 * Shape::kTiles];
  const Mxfp8Warp<Source> warp;
  const int thread = 32 * warp.tile + warp.lane;
  WalkLane<kRows>(source, out, at, warp.slice * kRows,
                  [&](int i, const Position&, Pack<Source::kType>(&h)[Source::kSlices]) {
#pragma unroll
                    for (int s = 0; s < Source::kSlices; ++s) waiting[s][i][thread] = h[s];
                  });
  if constexpr (Shape::kSlices > 1) __syncthreads();
  Pack<Source::kType> packs[kLaneRows];
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) packs[i] = waiting[warp.slice][i][thread];
  const Mxfp8Slice slice = {warp.slice * out.k, Shape::kSlices * out.k,
                            warp.slice * (out.k / kMxBlock)};
  if (Source::kWhole || full) {
    ConsumeMxfp8<true, copies, Source>(out, at, slice, packs, seen);
  } else {
    ConsumeMxfp8<false, copies, Source>(out, at, slice, packs, seen);
  }
  if constexpr (Source::kSums) {
    if (out.sums != nullptr) StoreWarpSums<Source>(out, at, packs);
  }
}

// Blocks of 256 threads on a multiprocessor. Two where x takes 64 registers, or both copies need
// their factors; three would spill there. Elsewhere three are 9 to 14 % faster. x in 64 registers
// and values would spill with two.
template <Float dtype, Copies copies>
constexpr int kMxOccupancy = dtype == Float::kF32 ? (copies == Copies::kValues ? 1 : 2)
                             : copies == Copies::kBoth || kAtRunTime<copies> ? 2
                                                                             : 3;

template <class Source, Copies copies>
constexpr int kMxBlocks = 256 / Mxfp8Shape<Source>::kThreads * kMxOccupancy<Source::kType, copies>;

// What the warps of a block make together.
template <class Source>
__host__ __device__ int64_t Mxfp8Groups(const Outputs& out) {
  using Shape = Mxfp8Shape<Source>;
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  if constexpr (Shape::kDown == 1) {
    return ceil(ceil(out.m, kMxBlock) * ceil(out.k, kMxTileColumns), Shape::kAcross);
  } else {
    return ceil(out.m, kSumRows) * ceil(out.k, Shape::kColumns);
  }
}

// Where a lane works, and whether the tile of its warp is whole and aligned.
struct MxPlace {
  Lane lane;
  bool full;
};

// A warp makes 32 rows x 64 columns: lane % 8 chooses 8 columns, lane / 8 the rows. The four lanes
// of a row block are neighbours and those of a column block 8 apart, so that two shuffles join
// either. With several slices, k is a multiple of 32.
template <class Source>
__device__ inline MxPlace PlaceOf(const Outputs& out, uint32_t group) {
  using Shape = Mxfp8Shape<Source>;
  const Mxfp8Warp<Source> warp;
  uint32_t down, across;
  if constexpr (Shape::kDown == 1) {  // the warps of all blocks in a row
    const uint32_t tiles = static_cast<uint32_t>((out.k + kMxTileColumns - 1) / kMxTileColumns);
    const uint32_t tile = group * Shape::kAcross + warp.tile;
    down = tile / tiles, across = tile % tiles;
  } else {
    const uint32_t tiles = static_cast<uint32_t>((out.k + Shape::kColumns - 1) / Shape::kColumns);
    down = group / tiles * Shape::kDown + warp.tile / Shape::kAcross;
    across = group % tiles * Shape::kAcross + warp.tile % Shape::kAcross;
  }
  Lane at;
  at.m = int64_t{down} * kMxBlock + warp.lane / 8;
  at.k = int64_t{across} * kMxTileColumns + warp.lane % 8 * kPack;
  const int64_t left = out.k - at.k;
  at.valid = static_cast<int>(left < 0 ? 0 : left < kPack ? left : kPack);
  const bool full = out.aligned && at.k - warp.lane % 8 * kPack + kMxTileColumns <= out.k &&
                    at.m - warp.lane / 8 + kMxBlock <= out.m;
  return {at, full};
}

template <class Source, Copies copies>
__device__ inline void MakeMxfp8Group(const Source& source, const Outputs& out, uint32_t group,
                                      Amax* seen) {
  const auto [at, full] = PlaceOf<Source>(out, group);
  if constexpr (Source::kFused) {
    FuseMxfp8Tile<copies>(source, out, at, full, seen);
  } else if (full) {
    QuantizeMxfp8Tile<true, copies>(source, out, at, seen);
  } else {
    QuantizeMxfp8Tile<false, copies>(source, out, at, seen);
  }
}

// All groups. The grid has a block for each, unless the Source is a fused one.
template <class Source, Copies copies>
__global__ void __launch_bounds__(Mxfp8Shape<Source>::kThreads, (kMxBlocks<Source, copies>))
    Mxfp8Kernel(Source source, Outputs out, bool cooperative) {
  static_assert(kFitsMxfp8<Source>);
  if (Skips(out.noop)) return;
  Amax seen;
  if constexpr (Source::kFused) {
    ForTiles(Mxfp8Groups<Source>(out),
             [&](uint32_t group) { MakeMxfp8Group<Source, copies>(source, out, group, &seen); });
  } else {  // one a block: a loop would cost the plain quantizers spills
    MakeMxfp8Group<Source, copies>(source, out, blockIdx.x, &seen);
  }
  seen.Store(out.amax, cooperative);
  if constexpr (Source::kSums) {
    if (out.sums != nullptr) JoinSums<Mxfp8Shape<Source>::kThreads>(out, Source::kSlices * out.k);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_MXFP8_SINK_CUH_
