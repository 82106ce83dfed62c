// Tensor-scaled quantization: codes as h lies, codes of the transpose, and the amax of h, from one
// pass over what makes h; without copies, h and its amax. Raw pointers, no XLA or nanobind
// includes.
#ifndef TE_FLAX_CUDA_KERNELS_TENSOR_SINK_CUH_
#define TE_FLAX_CUDA_KERNELS_TENSOR_SINK_CUH_

#include "cuda/kernels/amax.cuh"
#include "cuda/kernels/column_sum.cuh"
#include "cuda/kernels/source.cuh"

namespace te_flax::cuda {

template <Float dtype>
__device__ inline void ScalePack(const Pack<dtype>& pack, float scale, Amax* seen,
                                 float (&v)[kPack]) {
  seen->Join(pack.Abs().Largest(), pack);
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), scale);
}

// Row codes of an array x alone, which is flat here: out.aligned asks nothing of its rows.
template <Float dtype>
__global__ void __launch_bounds__(kFlatThreads)
    QuantizeFlatKernel(const void* x, Outputs out, bool cooperative) {
  if (Skips(out.noop)) return;
  const float scale = __ldg(out.scale);
  Amax seen;
  WalkFlat<dtype>(x, out.m * out.k, out.aligned,
                  [&](int64_t index, int valid, const Pack<dtype>& pack) {
                    float v[kPack];
                    ScalePack(pack, scale, &seen, v);
                    StoreCodes(out.row + index, Encode8(v, out.row_format), valid, out.aligned);
                  });
  seen.Store(out.amax, cooperative);
}

constexpr int kTile = 128;
constexpr int kTileThreads = 256;

// Bytes (row, column) of four words to (column, row).
__device__ inline void Transpose4x4(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t ab01 = __byte_perm(in[0], in[1], 0x5140);
  const uint32_t ab23 = __byte_perm(in[0], in[1], 0x7362);
  const uint32_t cd01 = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t cd23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(ab01, cd01, 0x5410);
  out[1] = __byte_perm(ab01, cd01, 0x7632);
  out[2] = __byte_perm(ab23, cd23, 0x5410);
  out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// Writes the codes of rows m .. m + 15 of columns k .. k + 3 to `col` [k, m]; word(r) holds the
// four of row m + r.
template <typename Word>
__device__ inline void StoreFourColumns(const Outputs& out, uint8_t* col, int64_t m, int64_t k,
                                        Word word) {
  uint32_t columns[4][4];  // [column][rows 4i .. 4i + 3]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t rows[4], words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[j] = word(4 * i + j);
    Transpose4x4(rows, words);
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j][i] = words[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (k + j >= out.k || m >= out.m) continue;
    uint8_t* to = col + (k + j) * out.m + m;
    if (out.col_aligned && m + 16 <= out.m) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (m + i < out.m) to[i] = static_cast<uint8_t>(columns[j][i / 4] >> (8 * (i % 4)));
    }
  }
}

// Writes the codes of a tile, which lie in shared memory as words of four columns, to `col` [k, m]:
// each thread takes 16 rows of 4 columns, and 8 neighbouring threads fill 128 bytes of a col row.
__device__ inline void StoreTransposed(const Outputs& out, uint8_t* col,
                                       const uint32_t (&tile)[kTile][kTile / 4], int64_t m0,
                                       int64_t k0) {
  const int block = threadIdx.x % 8;
  const int quad = threadIdx.x / 8;
  StoreFourColumns(out, col, m0 + 16 * block, k0 + 4 * quad,
                   [&](int r) { return tile[16 * block + r][quad ^ (4 * block)]; });
}

// Joins the sums of the rows of one tile and stores them. Two warps hold 32 rows of 128 columns.
template <int kSlices>
__device__ inline void StoreTileSums(const Outputs& out, LaneSums (&sums)[kSlices], int64_t m0,
                                     int64_t k0) {
  __shared__ float warps[kSlices][kTileThreads / 32][kTile];
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    sums[s].Join(16);
    if (threadIdx.x % 32 < 16) {
      sums[s].Store(&warps[s][threadIdx.x / 32][threadIdx.x % 16 * kPack]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSlices * kTile; i += kTileThreads) {
    const auto& rows = warps[i / kTile];
    const int column = i % kTile;
    float sum = AddFtz(rows[0][column], rows[1][column]);
#pragma unroll
    for (int w = 2; w < kTileThreads / 32; w += 2) {
      sum = AddFtz(sum, AddFtz(rows[w][column], rows[w + 1][column]));
    }
    if (k0 + column >= out.k) continue;
    out.sums[(m0 / kSumRows * kSlices + i / kTile) * out.k + k0 + column] = sum;
  }
}

// Bytes that a thread has loaded and not used, at most: with the next group, if there is one.
template <class Source>
constexpr int kLoadedBytes = static_cast<int>(sizeof(typename Source::Raw)) * Source::kLoads *
                             (Source::kLoads == kLaneRows ? 1 : 2);

__host__ __device__ inline int64_t TensorTiles(const Outputs& out) {
  return (out.m + kTile - 1) / kTile * ((out.k + kTile - 1) / kTile);
}

// Blocks on a multiprocessor. Three cost a fused kernel some spills, once a thread; where much is
// loaded ahead they would be many. A plain quantizer takes what its loads leave.
template <class Source, Copies copies>
constexpr int kTileBlocks = Source::kFused                 ? (kLoadedBytes<Source> <= 128 ? 3 : 2)
                            : Source::kType == Float::kF32 ? 2
                            : copies == Copies::kCol       ? 5
                                                           : 4;

// One tile of 128 x 128 of every slice.
template <class Source, Copies copies>
__device__ inline void MakeTensorTile(const Source& source, const Outputs& out, int64_t m0,
                                      int64_t k0, float scale, Amax* seen) {
  constexpr int kSlices = Source::kSlices;
  // Words of 16 rows are XORed with a multiple of 4, so that the transposed reads of a warp fall
  // into 32 different banks.
  __shared__ uint32_t tile[kSlices][kTile][kTile / 4];
  const int column = threadIdx.x % 16 * kPack;
  const int row = threadIdx.x / 64 * 32 + threadIdx.x / 16 % 4;  // and 4 on, 8 on, .. 28 on
  const int64_t left = out.k - (k0 + column);
  const Lane lane = {m0 + row, k0 + column,
                     static_cast<int>(left < 0       ? 0
                                      : left < kPack ? left
                                                     : kPack)};
  LaneSums sums[kSlices];
  WalkLane<kLaneRows>(
      source, out, lane, 0, [&](int i, const Position& at, Pack<Source::kType>(&h)[kSlices]) {
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
          float v[kPack];
          ScalePack(h[s], scale, seen, v);
          if constexpr (Source::kSums) sums[s].Add(h[s]);
          if (!HasCol<copies>(out) && !HasRow<copies>(out)) continue;
          uint2 codes = Encode8(v, out.col_format);
          if (HasCol<copies>(out)) {
            const int r = row + 4 * i;
            *reinterpret_cast<uint2*>(&tile[s][r][(column / 4) ^ (r / 16 * 4)]) = codes;
          }
          if (HasRow<copies>(out)) {
            if (out.row_format != out.col_format) codes = Encode8(v, out.row_format);
            StoreCodes(out.row + (at.m * kSlices + s) * out.k + at.k, codes, at.valid, at.aligned);
          }
        }
      });
  if (HasCol<copies>(out)) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      StoreTransposed(out, out.col + s * out.k * out.m, tile[s], m0, k0);
    }
  }
  if constexpr (Source::kSums) {
    if (out.sums != nullptr) StoreTileSums(out, sums, m0, k0);
  }
}

// All tiles.
template <class Source, Copies copies>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<Source, copies>))
    TensorTileKernel(Source source, Outputs out, bool cooperative) {
  if (Skips(out.noop)) return;
  const float scale = copies == Copies::kAny && out.scale == nullptr ? 1.0f : __ldg(out.scale);
  const auto across = static_cast<uint32_t>((out.k + kTile - 1) / kTile);
  Amax seen;
  ForTiles(TensorTiles(out), [&](uint32_t tile) {
    MakeTensorTile<Source, copies>(source, out, int64_t{tile / across} * kTile,
                                   int64_t{tile % across} * kTile, scale, &seen);
  });
  seen.Store(out.amax, cooperative);
  if constexpr (Source::kSums) {
    if (out.sums != nullptr) JoinSums<kTileThreads>(out, Source::kSlices * out.k);
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_TENSOR_SINK_CUH_
