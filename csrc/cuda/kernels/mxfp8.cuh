// MXFP8 quantization: codes with blocks of 32 along rows and along columns, their e8m0 scales and
// the amax of x, from one read of x. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_MXFP8_CUH_
#define TE_FLAX_CUDA_KERNELS_MXFP8_CUH_

#include "cuda/kernels/amax.cuh"

namespace te_flax::cuda {

constexpr int kMxBlock = 32;
constexpr int kMxTileColumns = 64;  // of the tile of one warp, which has 32 rows
constexpr int kMxWarps = 8;

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

template <Float dtype>
__device__ inline void ScaleByBlock(const uint32_t (&bits)[kPack], const BlockFactors& factors,
                                    float (&v)[kPack]) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    v[j] = __fmul_rn(__fmul_rn(__uint_as_float(bits[j]), factors.first), factors.second);
  }
}

// Scales of a lane's eight columns from the amax of all 32 rows.
__device__ inline void StoreColumnScales(const Mxfp8Quantize& p, const uint32_t (&scales)[kPack],
                                         int64_t m_block, int64_t k, int valid) {
  if (p.swizzled) {
    const int64_t blocks = (p.m + kMxBlock - 1) / kMxBlock;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j < valid) {
        p.col_scale[SwizzledIndex(k + j, m_block, blocks)] = static_cast<uint8_t>(scales[j]);
      }
    }
    return;
  }
  const uint2 bytes = make_uint2(scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24,
                                 scales[4] | scales[5] << 8 | scales[6] << 16 | scales[7] << 24);
  StoreCodes(p.col_scale + m_block * p.k + k, bytes, valid, p.aligned);
}

// A warp makes 32 rows x 64 columns: lane % 8 chooses 8 columns, lane / 8 the rows l, l + 4, ..
// Four lanes share a row block, the lanes 0, 8, 16, 24 above a multiple of 1 share a column
// block, so two shuffles join either. x stays in registers between the two passes.
template <Float dtype, bool kRow, bool kCol>
__global__ void __launch_bounds__(32 * kMxWarps) QuantizeMxfp8Kernel(Mxfp8Quantize p) {
  if (Skips(p.noop)) return;
  constexpr int kRows = 8;  // per lane
  const int lane = threadIdx.x % 32;
  const int64_t tiles = (p.k + kMxTileColumns - 1) / kMxTileColumns;
  const int64_t tile = int64_t{blockIdx.x} * kMxWarps + threadIdx.x / 32;
  const int64_t m_block = tile / tiles;
  const int64_t k = tile % tiles * kMxTileColumns + lane % 8 * kPack;
  const int64_t m0 = m_block * kMxBlock + lane / 8;
  const int in_row = static_cast<int>(p.k - k < 0 ? 0 : p.k - k < kPack ? p.k - k : kPack);

  Pack<dtype> packs[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t m = m0 + 4 * i;
    packs[i].Load(p.x, m * p.k + k, m < p.m ? in_row : 0, p.aligned);
  }
  Amax seen;
  uint32_t columns[kPack] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t m = m0 + 4 * i;
    const int valid = m < p.m ? in_row : 0;
    uint32_t bits[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) bits[j] = packs[i].Bits(j);
    uint32_t largest = seen.Join(bits);
    if constexpr (kCol) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) columns[j] = max(columns[j], bits[j] & kAbs);
    }
    if constexpr (kRow) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      const uint32_t e8m0 = BlockScale(largest, p.row_format);
      float v[kPack];
      ScaleByBlock<dtype>(bits, BlockFactors(e8m0), v);
      StoreCodes(p.row + m * p.k + k, Encode8(v, p.row_format), valid, p.aligned);
      if (lane % 4 == 0 && valid > 0) {
        const int64_t blocks = (p.k + kMxBlock - 1) / kMxBlock;
        const int64_t b = k / kMxBlock;
        p.row_scale[p.swizzled ? SwizzledIndex(m, b, blocks) : m * blocks + b] =
            static_cast<uint8_t>(e8m0);
      }
    }
  }
  if constexpr (kCol) {
    uint32_t scales[kPack];
    float first[kPack], second[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      columns[j] = max(columns[j], __shfl_xor_sync(~0u, columns[j], 8));
      columns[j] = max(columns[j], __shfl_xor_sync(~0u, columns[j], 16));
      scales[j] = BlockScale(columns[j], p.col_format);
      const BlockFactors factors(scales[j]);
      first[j] = factors.first;
      second[j] = factors.second;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t m = m0 + 4 * i;
      float v[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        v[j] = __fmul_rn(__fmul_rn(__uint_as_float(packs[i].Bits(j)), first[j]), second[j]);
      }
      StoreCodes(p.col + m * p.k + k, Encode8(v, p.col_format), m < p.m ? in_row : 0, p.aligned);
    }
    if (lane < 8 && m_block * kMxBlock < p.m) StoreColumnScales(p, scales, m_block, k, in_row);
  }
  seen.Store(p.amax);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_MXFP8_CUH_
