// Tensor-scaled quantization: codes as x lies, codes of the transpose, and the amax of x, from
// one read of x. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_QUANTIZE_CUH_
#define TE_FLAX_CUDA_KERNELS_QUANTIZE_CUH_

#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {

// x is [m, k]; row [m, k] and col [k, m] hold codes.
struct TensorQuantize {
  const uint32_t* noop;  // null, or the flag that turns the launch into nothing
  const void* x;
  const float* scale;
  int64_t m, k;
  uint8_t* row;
  uint8_t* col;
  uint32_t* amax;  // [2], zeros before the launch
  Format row_format, col_format;
  bool row_aligned;  // 16-byte loads of x and 8-byte stores of row wherever a pack is whole
  bool col_aligned;  // 16-byte stores of col wherever 16 rows are valid
};

template <Float dtype>
__device__ inline void ScalePack(const Pack<dtype>& pack, float scale, Amax* seen,
                                 float (&v)[kPack]) {
  seen->Join(pack.Abs().Largest(), pack);
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = MulFtz(__uint_as_float(pack.Bits(j)), scale);
}

// Row codes alone: x is a flat array.
template <Float dtype>
__global__ void __launch_bounds__(kFlatThreads) QuantizeRowKernel(TensorQuantize p) {
  if (Skips(p.noop)) return;
  const float scale = __ldg(p.scale);
  Amax seen;
  WalkFlat<dtype>(p.x, p.m * p.k, p.row_aligned,
                  [&](int64_t index, int valid, const Pack<dtype>& pack) {
                    float v[kPack];
                    ScalePack(pack, scale, &seen, v);
                    StoreCodes(p.row + index, Encode8(v, p.row_format), valid, p.row_aligned);
                  });
  seen.Store(p.amax);
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

// Writes the codes of a tile, which lie in shared memory as words of four columns, to col: each
// thread takes 16 rows of 4 columns, and 8 neighbouring threads fill 128 bytes of a col row.
__device__ inline void StoreTransposed(const TensorQuantize& p,
                                       const uint32_t (&tile)[kTile][kTile / 4], int64_t m0,
                                       int64_t k0) {
  const int block = threadIdx.x % 8;
  const int quad = threadIdx.x / 8;
  uint32_t columns[4][4];  // [column][rows 4i .. 4i + 3]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t rows[4], out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[j] = tile[16 * block + 4 * i + j][quad ^ (4 * block)];
    Transpose4x4(rows, out);
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j][i] = out[j];
  }
  const int64_t m = m0 + 16 * block;
  const int64_t k = k0 + 4 * quad;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (k + j >= p.k || m >= p.m) continue;
    uint8_t* to = p.col + (k + j) * p.m + m;
    if (p.col_aligned && m + 16 <= p.m) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(columns[j][0], columns[j][1], columns[j][2], columns[j][3]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (m + i < p.m) to[i] = static_cast<uint8_t>(columns[j][i / 4] >> (8 * (i % 4)));
    }
  }
}

// Codes of the transpose and, with kRow, row codes too. One block makes a tile of 128 x 128.
template <Float dtype, bool kRow>
__global__ void __launch_bounds__(kTileThreads) QuantizeTileKernel(TensorQuantize p) {
  if (Skips(p.noop)) return;
  // Words of 16 rows are XORed with a multiple of 4, so that the transposed reads of a warp fall
  // into 32 different banks.
  __shared__ uint32_t tile[kTile][kTile / 4];
  constexpr int kPacks = 8;
  const uint32_t tiles = static_cast<uint32_t>((p.k + kTile - 1) / kTile);
  const int64_t m0 = int64_t{blockIdx.x / tiles} * kTile;
  const int64_t k0 = int64_t{blockIdx.x % tiles} * kTile;
  const int column = threadIdx.x % 16 * kPack;
  const int row = threadIdx.x / 16;
  const int64_t k = k0 + column;
  const int in_row = static_cast<int>(p.k - k < 0 ? 0 : p.k - k < kPack ? p.k - k : kPack);

  Pack<dtype> packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t m = m0 + row + 16 * i;
    packs[i].Load(p.x, m * p.k + k, m < p.m ? in_row : 0, p.row_aligned);
  }
  const float scale = __ldg(p.scale);
  Amax seen;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t m = m0 + row + 16 * i;
    float v[kPack];
    ScalePack(packs[i], scale, &seen, v);
    uint2 codes = Encode8(v, p.col_format);
    *reinterpret_cast<uint2*>(&tile[row + 16 * i][(column / 4) ^ (4 * i)]) = codes;
    if constexpr (kRow) {
      if (p.row_format != p.col_format) codes = Encode8(v, p.row_format);
      StoreCodes(p.row + m * p.k + k, codes, m < p.m ? in_row : 0, p.row_aligned);
    }
  }
  __syncthreads();
  StoreTransposed(p, tile, m0, k0);
  seen.Store(p.amax);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_QUANTIZE_CUH_
