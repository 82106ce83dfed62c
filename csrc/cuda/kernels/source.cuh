// What a fused kernel makes (Outputs), where a lane works (Lane), and the plainest Source.
//
// h is [m, slices, k]. A Source makes packs of h from what it reads; the kernels of
// tensor_sink.cuh and mxfp8_sink.cuh turn them into h itself, codes, scales, amax and column sums.
// A Source has
//   kType      the dtype of h
//   kSlices    the packs of h that one position makes, one in each slice
//   kLoads     positions whose loads are issued together: 1, 2, 4 or 8. Below 8 the positions are a
//              loop, so that a long Make is compiled kLoads times, and the next group is fetched
//              while one is made.
//   kFused     false: h is not asked for, only its copies and amax
//   kSums      whether column sums may be asked for
//   kWhole     all tiles are whole and aligned: the launch has seen to that
//   Columns    what a thread keeps for its 8 columns, made once by Begin(at)
//   Raw        what Load(at, &raw) fetches for one position; all loads of a group come first
//   Make(columns, at, raw, h) computes the packs h[kSlices] of that position, rounded once.
// Nothing is valid beyond at.valid: Load must not read there, and what Make leaves there is
// replaced by zeros.
#ifndef TE_FLAX_CUDA_KERNELS_SOURCE_CUH_
#define TE_FLAX_CUDA_KERNELS_SOURCE_CUH_

#include "cuda/kernels/numerics.cuh"

namespace te_flax::cuda {

constexpr int kWholeTile = 128;  // rows and columns: whole tiles of every kernel, in whole numbers

// Null: not a result of the call.
struct Outputs {
  const uint32_t* noop;  // null, or the flag that turns the launch into nothing
  int64_t m, k;          // h and the copies are [m, slices, k]
  void* h;
  const float* scale;  // tensor scaling: row [m, slices, k], col [slices, k, m]
  uint8_t* row;
  uint8_t* col;
  // MXFP8: row and col are [m, slices, k]. Plain scales: row_scale [m, ceil(slices * k / 32)],
  // col_scale [ceil(m / 32), slices, k]. Swizzled ones: tiles of 128 x 4 scales, of row_scale and
  // of the transpose of col_scale.
  uint8_t* row_scale;
  uint8_t* col_scale;
  float* sums;     // [ceil(m / kSumRows), slices, k], to be joined by JoinSums into dbias
  float* dbias;    // [slices, k]
  uint32_t* amax;  // [2]
  Format row_format, col_format;
  bool row_values, col_values;  // MXFP8: the copy holds bfloat16 values of the codes
  bool swizzled;
  // 16-byte accesses of 16-bit and float32 arrays and 8-byte stores of row (with MXFP8 of every
  // copy) wherever a pack is whole; what the Source reads is part of it.
  bool aligned;
  bool col_aligned;  // tensor scaling: 16-byte stores of col wherever 16 rows are valid

  bool Whole() const { return aligned && m % kWholeTile == 0 && k % kWholeTile == 0; }
};

// The copies that a kernel makes: settled when it is compiled, or those with a pointer: kAny, and
// kValues, which of MXFP8 may hold values instead of codes.
enum class Copies { kRow, kCol, kBoth, kAny, kValues };

template <Copies copies>
constexpr bool kAtRunTime = copies == Copies::kAny || copies == Copies::kValues;

template <Copies copies>
__device__ inline bool HasRow(const Outputs& out) {
  return kAtRunTime<copies> ? out.row != nullptr : copies != Copies::kCol;
}

template <Copies copies>
__device__ inline bool HasCol(const Outputs& out) {
  return kAtRunTime<copies> ? out.col != nullptr : copies != Copies::kRow;
}

// A warp's lanes work on tiles of 32 rows: a lane has 8 columns from k of the rows m, m + 4, ..,
// m + 28.
constexpr int kLaneRows = 8;

struct Lane {
  int64_t m, k;
  int valid;  // of the columns
};

// One of the eight positions of a lane. With `aligned`, a position with 8 valid columns allows
// 16-byte accesses.
struct Position {
  int64_t m, k;
  int valid;
  bool aligned;
};

// kFull: the tile is whole and aligned.
template <bool kFull>
__device__ inline Position PositionOf(const Lane& lane, int i, const Outputs& out) {
  const int64_t m = lane.m + 4 * i;
  return {m, lane.k, kFull ? kPack : m < out.m ? lane.valid : 0, kFull || out.aligned};
}

// Calls visit(tile) for each of `tiles` tiles that a block makes. 2^32 tiles would be more elements
// than any memory holds.
template <typename Visit>
__device__ inline void ForTiles(int64_t tiles, Visit visit) {
  const auto end = static_cast<uint32_t>(tiles);
  for (uint32_t tile = blockIdx.x; tile < end; tile += gridDim.x) {
    if (tile != blockIdx.x) __syncthreads();  // the tile before it is read from shared memory
    visit(tile);
  }
}

// h is x.
template <Float dtype, bool fused>
struct Identity {
  static constexpr Float kType = dtype;
  static constexpr int kSlices = 1;
  static constexpr int kLoads = fused ? 4 : kLaneRows;
  static constexpr bool kFused = fused;
  static constexpr bool kSums = fused;
  static constexpr bool kWhole = false;
  using Raw = Pack<dtype>;
  struct Columns {};

  const void* x;
  int64_t k;

  __device__ Columns Begin(const Lane&) const { return {}; }
  __device__ void Load(const Position& at, Raw* raw) const {
    raw->Load(x, at.m * k + at.k, at.valid, at.aligned);
  }
  __device__ void Make(const Columns&, const Position&, const Raw& raw, Pack<dtype> (&h)[1]) const {
    h[0] = raw;
  }
};

// Makes the packs of one position and, if asked for, stores them as h.
template <class Source>
__device__ inline void MakeAt(const Source& source, const typename Source::Columns& columns,
                              const Position& at, const typename Source::Raw& raw,
                              const Outputs& out, Pack<Source::kType> (&h)[Source::kSlices]) {
  source.Make(columns, at, raw, h);
  if constexpr (Source::kFused) {
#pragma unroll
    for (int s = 0; s < Source::kSlices; ++s) {
      if (at.valid < kPack) h[s].Keep(at.valid);
      if (out.h != nullptr) {
        const int64_t index = (at.m * Source::kSlices + s) * out.k + at.k;
        h[s].Store(out.h, index, at.valid, at.aligned);
      }
    }
  }
}

// Calls visit(i, at, h) for kCount positions of a lane from `begin` on. The loads of one group are
// in flight while the group before it is made.
template <int kCount, class Source, typename Visit>
__device__ inline void WalkLane(const Source& source, const Outputs& out, const Lane& lane,
                                int begin, Visit visit) {
  constexpr int kLoads = Source::kLoads;
  constexpr bool kWhole = Source::kWhole;
  using Raw = typename Source::Raw;
  Raw ahead[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) source.Load(PositionOf<kWhole>(lane, begin + i, out), &ahead[i]);
  const typename Source::Columns columns = source.Begin(lane);
#pragma unroll 1
  for (int first = begin; first < begin + kCount; first += kLoads) {
    Raw raws[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raws[i] = ahead[i];
    if (first + kLoads < begin + kCount) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        source.Load(PositionOf<kWhole>(lane, first + kLoads + i, out), &ahead[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const Position at = PositionOf<kWhole>(lane, first + i, out);
      Pack<Source::kType> h[Source::kSlices];
      MakeAt(source, columns, at, raws[i], out, h);
      visit(first + i, at, h);
    }
  }
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_SOURCE_CUH_
