// Float32 block scaling: codes with 1 x 128 blocks along rows and along columns, or with 128 x 128
// blocks, their inverse scales and the amax of x, from one read of x. Raw pointers, no XLA or
// nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_BLOCK_CUH_
#define TE_FLAX_CUDA_KERNELS_BLOCK_CUH_

#include "cuda/kernels/tensor_sink.cuh"

namespace te_flax::cuda {

constexpr int kTilePacks = 8;  // of a thread, 16 rows apart
constexpr int kTileWarps = kTileThreads / 32;
static_assert(kTile == 128, "a tile is one 128 x 128 block, and a block of each row and column");

struct BlockQuantize {
  const void* x;
  Outputs out;  // of one slice; its scales are those below
  ScaleRule row_rule, col_rule;
  float* row_scale;  // [m, ceil(k / 128)], or of 128 x 128 blocks [ceil(m / 128), ceil(k / 128)]
  float* col_scale;  // [k, ceil(m / 128)]
};

// What a thread works on: 8 columns from k of the rows m, m + 16, .., m + 112.
struct TileLane {
  int64_t m, k;
  int valid;  // of the columns

  __device__ TileLane(const Outputs& p, uint32_t tile) {
    const uint32_t across = static_cast<uint32_t>((p.k + kTile - 1) / kTile);
    m = int64_t{tile / across} * kTile + threadIdx.x / 16;
    k = int64_t{tile % across} * kTile + threadIdx.x % 16 * kPack;
    const int64_t left = p.k - k;
    valid = static_cast<int>(left < 0 ? 0 : left < kPack ? left : kPack);
  }

  // Where the tile starts.
  __device__ int64_t m0() const { return m - threadIdx.x / 16; }
  __device__ int64_t k0() const { return k - threadIdx.x % 16 * kPack; }

  // Columns of row i that are in x; with kFull that is known to be all of them.
  template <bool kFull>
  __device__ int In(int i, int64_t rows) const {
    return kFull ? kPack : m + 16 * i < rows ? valid : 0;
  }
};

// Blocks on a multiprocessor: x takes 64 or 32 registers.
template <Float dtype>
constexpr int kBlockResident = dtype == Float::kF32 ? 2 : 3;

template <Float dtype>
using TileData = Pack<dtype>[kTilePacks];

template <bool kFull, Float dtype>
__device__ inline void LoadTile(const BlockQuantize& q, const TileLane& at,
                                TileData<dtype>& packs) {
#pragma unroll
  for (int i = 0; i < kTilePacks; ++i) {
    packs[i].Load(q.x, (at.m + 16 * i) * q.out.k + at.k, at.In<kFull>(i, q.out.m),
                  kFull || q.out.aligned);
  }
}

// The magnitudes with zeros for NaN and Inf, which do not count in a block's scale.
template <Float dtype>
__device__ inline Pack<dtype> FiniteAbs(const Pack<dtype>& pack, Amax* seen) {
  Pack<dtype> abs = pack.Abs();
  seen->Join(abs.Largest(), pack);
  if (abs.Largest() >= kInf) abs.DropNonfinite();
  return abs;
}

template <Float dtype>
__device__ inline uint2 EncodeScaled(const Pack<dtype>& pack, const float (&scales)[kPack],
                                     Format format) {
  float v[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), scales[j]);
  return Encode8(v, format);
}

template <Float dtype>
__device__ inline uint2 EncodeScaled(const Pack<dtype>& pack, float scale, Format format) {
  float scales[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) scales[j] = scale;
  return EncodeScaled(pack, scales, format);
}

// The largest of each row's magnitudes over the 16 threads that share the row. Threads 2i and
// 2i + 1 of them end up with row i: half of the rows go to the other side at every step.
__device__ inline uint32_t ReduceRows(uint32_t (&rows)[kTilePacks]) {
#pragma unroll
  for (int half = kTilePacks / 2; half > 0; half /= 2) {
    const bool upper = (threadIdx.x & (2 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const uint32_t give = upper ? rows[i] : rows[i + half];
      const uint32_t keep = upper ? rows[i + half] : rows[i];
      rows[i] = max(keep, __shfl_xor_sync(~0u, give, 2 * half));
    }
  }
  return max(rows[0], __shfl_xor_sync(~0u, rows[0], 1));
}

// Row codes and inverse scales of a tile.
template <bool kFull, Float dtype>
__device__ inline void StoreBlockRows(const BlockQuantize& q, const TileLane& at,
                                      const TileData<dtype>& packs,
                                      uint32_t (&largest)[kTilePacks]) {
  const Outputs& p = q.out;
  float scale, inverse;
  ScaleOf(__uint_as_float(ReduceRows(largest)), q.row_rule, &scale, &inverse);
  const int64_t m = at.m + 16 * (threadIdx.x % 16 / 2);
  if (threadIdx.x % 2 == 0 && (kFull || m < p.m)) {
    q.row_scale[m * ((p.k + kTile - 1) / kTile) + at.k / kTile] = inverse;
  }
#pragma unroll
  for (int i = 0; i < kTilePacks; ++i) {
    const float of_row = __shfl_sync(~0u, scale, (threadIdx.x & 16) + 2 * i);
    StoreCodes(p.row + (at.m + 16 * i) * p.k + at.k, EncodeScaled(packs[i], of_row, p.row_format),
               at.In<kFull>(i, p.m), kFull || p.aligned);
  }
}

template <Float dtype>
struct ColumnScales {
  Pack<dtype> largest[kTileWarps][16];  // of the columns of 16 packs, as each warp saw them
  alignas(16) float scale[kTile];
};

// Joins the warps' columns: scales for the block, inverse ones to memory.
template <Float dtype>
__device__ inline void ScaleColumns(const BlockQuantize& q, const TileLane& at,
                                    ColumnScales<dtype>* shared) {
  const Outputs& p = q.out;
  const int column = threadIdx.x;
  if (column >= kTile) return;
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kTileWarps; ++w) {
    largest = max(largest, shared->largest[w][column / kPack].Bits(column % kPack));
  }
  float inverse;
  ScaleOf(__uint_as_float(largest), q.col_rule, &shared->scale[column], &inverse);
  const int64_t k = at.k0() + column;
  if (k < p.k) q.col_scale[k * ((p.m + kTile - 1) / kTile) + at.m / kTile] = inverse;
}

// As in TensorTileKernel.
using TileCodes = uint32_t[kTile][kTile / 4];

__device__ inline void PutCodes(TileCodes& tile, int i, uint2 codes) {
  const int word = threadIdx.x % 16 * 2;
  *reinterpret_cast<uint2*>(&tile[threadIdx.x / 16 + 16 * i][word ^ (4 * i)]) = codes;
}

template <bool kFull, bool kRow, bool kCol, Float dtype>
__device__ inline void QuantizeBlockTile(const BlockQuantize& q, const TileLane& at, Amax* seen,
                                         TileCodes* tile, ColumnScales<dtype>* shared) {
  const Outputs& p = q.out;
  TileData<dtype> packs;
  LoadTile<kFull>(q, at, packs);
  Pack<dtype> columns = {};
  uint32_t largest[kTilePacks];
#pragma unroll
  for (int i = 0; i < kTilePacks; ++i) {
    const Pack<dtype> abs = FiniteAbs(packs[i], seen);
    if constexpr (kCol) columns.Join(abs);
    largest[i] = abs.Largest();
  }
  if constexpr (kCol) {
    columns.Join(columns.Shuffled(16));
    if (threadIdx.x % 32 < 16) shared->largest[threadIdx.x / 32][threadIdx.x % 16] = columns;
  }
  if constexpr (kRow) StoreBlockRows<kFull>(q, at, packs, largest);
  if constexpr (kCol) {
    __syncthreads();
    ScaleColumns(q, at, shared);
    __syncthreads();
    float scales[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) scales[j] = shared->scale[threadIdx.x % 16 * kPack + j];
#pragma unroll
    for (int i = 0; i < kTilePacks; ++i) {
      PutCodes(*tile, i, EncodeScaled(packs[i], scales, p.col_format));
    }
    __syncthreads();
    StoreTransposed(p, p.col, *tile, at.m0(), at.k0());
  }
}

// Whether every pack of the tile is whole and aligned.
__device__ inline bool IsFull(const Outputs& p, const TileLane& at) {
  return p.aligned && at.m0() + kTile <= p.m && at.k0() + kTile <= p.k;
}

// 1 x 128 blocks of the row copy, 128 x 1 blocks of the col copy, which is transposed.
template <Float dtype, bool kRow, bool kCol>
__global__ void __launch_bounds__(kTileThreads, kBlockResident<dtype>)
    QuantizeBlockKernel(BlockQuantize q, bool cooperative) {
  if (Skips(q.out.noop)) return;
  __shared__ TileCodes tile;
  __shared__ ColumnScales<dtype> columns;
  Amax seen;
  ForTiles(TensorTiles(q.out), [&](uint32_t index) {
    const TileLane at(q.out, index);
    if (IsFull(q.out, at)) {
      QuantizeBlockTile<true, kRow, kCol, dtype>(q, at, &seen, &tile, &columns);
    } else {
      QuantizeBlockTile<false, kRow, kCol, dtype>(q, at, &seen, &tile, &columns);
    }
  });
  seen.Store(q.out.amax, cooperative);
}

// The largest of all threads' values.
__device__ inline uint32_t ReduceBlock(uint32_t value) {
  __shared__ uint32_t warps[kTileWarps];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTileWarps; ++w) value = max(value, warps[w]);
  return value;
}

template <bool kFull, bool kRow, bool kCol, Float dtype>
__device__ inline void QuantizeSquare(const BlockQuantize& q, uint32_t index, Amax* seen,
                                      TileCodes* tile) {
  const TileLane at(q.out, index);
  const Outputs& p = q.out;
  TileData<dtype> packs;
  LoadTile<kFull>(q, at, packs);
  Amax here;
#pragma unroll
  for (int i = 0; i < kTilePacks; ++i) here.Join(packs[i].Abs().Largest(), packs[i]);
  seen->Join(here);
  float scale, inverse;
  ScaleOf(__uint_as_float(ReduceBlock(here.finite)), q.row_rule, &scale, &inverse);
  if (threadIdx.x == 0) q.row_scale[index] = inverse;
#pragma unroll
  for (int i = 0; i < kTilePacks; ++i) {
    const uint2 codes = EncodeScaled(packs[i], scale, p.row_format);
    if constexpr (kCol) PutCodes(*tile, i, codes);
    if constexpr (kRow) {
      StoreCodes(p.row + (at.m + 16 * i) * p.k + at.k, codes, at.In<kFull>(i, p.m),
                 kFull || p.aligned);
    }
  }
  if constexpr (kCol) {
    __syncthreads();
    StoreTransposed(p, p.col, *tile, at.m0(), at.k0());
  }
}

// 128 x 128 blocks, whose codes and scales both copies share.
template <Float dtype, bool kRow, bool kCol>
__global__ void __launch_bounds__(kTileThreads, kBlockResident<dtype>)
    QuantizeSquareKernel(BlockQuantize q, bool cooperative) {
  if (Skips(q.out.noop)) return;
  __shared__ TileCodes tile;
  Amax seen;
  ForTiles(TensorTiles(q.out), [&](uint32_t index) {
    if (IsFull(q.out, TileLane(q.out, index))) {
      QuantizeSquare<true, kRow, kCol, dtype>(q, index, &seen, &tile);
    } else {
      QuantizeSquare<false, kRow, kCol, dtype>(q, index, &seen, &tile);
    }
  });
  seen.Store(q.out.amax, cooperative);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_BLOCK_CUH_
