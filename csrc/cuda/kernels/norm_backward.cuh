// The derivative of LayerNorm and RMSNorm: dx, dgamma and dbeta. Raw pointers, no XLA or nanobind
// includes.
#ifndef TE_FLAX_CUDA_KERNELS_NORM_BACKWARD_CUH_
#define TE_FLAX_CUDA_KERNELS_NORM_BACKWARD_CUH_

#include <cuda_pipeline_primitives.h>

#include "cuda/kernels/norm.cuh"

namespace te_flax::cuda {

struct NormBackward {
  const uint32_t* noop;
  Array dy, x, gamma;  // [m, k], [m, k], [k]
  const float* mean;   // [m], null in an RMSNorm
  const float* rstd;   // [m]
  int64_t m, k;
  float centre;  // added to gamma
  void* dx;      // [m, k]
  bool dx_aligned;
  uint32_t* amax;      // [2], zeros before the launch; null: not wanted
  int64_t group_rows;  // rows that one block works on
  float* dgamma;       // [ceil(m / group_rows), k]: sums over the rows of a group
  float* dbeta;        // likewise, null in an RMSNorm
};

// Both sums of eight columns over some rows.
struct ColumnSums {
  float4 v[4];  // dgamma, then dbeta

  __device__ void Add(int j, float dgamma, float dbeta) {
    At(j) = AddFtz(At(j), dgamma);
    At(kPack + j) = AddFtz(At(kPack + j), dbeta);
  }
  __device__ float& At(int j) { return reinterpret_cast<float*>(v)[j]; }

  // In memory, at `index` of the partial sums.
  __device__ void Load(const NormBackward& p, int64_t index, int valid) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      At(j) = j < valid ? p.dgamma[index + j] : 0.0f;
      At(kPack + j) = j < valid && p.dbeta != nullptr ? p.dbeta[index + j] : 0.0f;
    }
  }
  __device__ void Store(const NormBackward& p, int64_t index, int valid) {
    if (valid == kPack && p.k % 4 == 0) {
      *reinterpret_cast<float4*>(p.dgamma + index) = v[0];
      *reinterpret_cast<float4*>(p.dgamma + index + 4) = v[1];
      if (p.dbeta == nullptr) return;
      *reinterpret_cast<float4*>(p.dbeta + index) = v[2];
      *reinterpret_cast<float4*>(p.dbeta + index + 4) = v[3];
      return;
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (j >= valid) continue;
      p.dgamma[index + j] = At(j);
      if (p.dbeta != nullptr) p.dbeta[index + j] = At(kPack + j);
    }
  }
};

// The sums of all columns of a row, one set per team of the block, in shared memory: registers
// would leave too few threads on a multiprocessor. Neighbouring threads touch neighbouring words.
template <int kThreads>
struct SharedSums {
  static constexpr int kBlock = Team<kThreads>::kBlock;
  static constexpr int kBytes = kRowPacks * kBlock * static_cast<int>(sizeof(ColumnSums));
  float4* slots;

  __device__ float4& Slot(int i, int q, int thread) { return slots[(4 * i + q) * kBlock + thread]; }
  __device__ ColumnSums Load(int i, int thread) {
    ColumnSums sums;
#pragma unroll
    for (int q = 0; q < 4; ++q) sums.v[q] = Slot(i, q, thread);
    return sums;
  }
  __device__ void Store(int i, const ColumnSums& sums) {
#pragma unroll
    for (int q = 0; q < 4; ++q) Slot(i, q, threadIdx.x) = sums.v[q];
  }

  // Adds up the teams in their order and writes the sums of the group that starts at `index`.
  __device__ void Finish(const NormBackward& p, int64_t index) {
    if (Team<kThreads>::kRows > 1) __syncthreads();
    if (Team<kThreads>::Row() > 0) return;
    const Columns<kThreads> columns{p.k};
#pragma unroll 1
    for (int i = 0; i < kRowPacks; ++i) {
      ColumnSums sums = Load(i, threadIdx.x);
#pragma unroll 1
      for (int team = 1; team < Team<kThreads>::kRows; ++team) {
        ColumnSums more = Load(i, team * kThreads + Team<kThreads>::Lane());
#pragma unroll
        for (int j = 0; j < kPack; ++j) sums.Add(j, more.At(j), more.At(kPack + j));
      }
      const int64_t column = columns.At(0, i);
      sums.Store(p, index + column, columns.Valid(column));
    }
  }
};

// Eight elements of dy and x.
template <Float dtype>
struct BackwardPack {
  Pack<dtype> dy, x;

  __device__ float Dy(int j) const { return __uint_as_float(dy.Bits(j)); }

  // Adds the sums of g * xhat and of g = dy * gamma.
  template <class Sum>
  __device__ void AddTo(Sum (&sums)[2], const float (&gamma)[kPack], const NormStats& stats,
                        int valid) const {
    sums[0].Add(
        SumPack(valid, [&](int j) { return MulFtz(MulFtz(Dy(j), gamma[j]), stats.Normal(x, j)); }));
    sums[1].Add(SumPack(valid, [&](int j) { return MulFtz(Dy(j), gamma[j]); }));
  }

  // dx, given the means of both, and the share of dgamma and dbeta.
  __device__ void Finish(const float (&gamma)[kPack], const NormStats& stats,
                         const float (&means)[2], ColumnSums* sums, float (&dx)[kPack]) const {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float xhat = stats.Normal(x, j);
      const float across = FmaFtz(-xhat, means[0], MulFtz(Dy(j), gamma[j]));
      dx[j] = MulFtz(SubFtz(across, means[1]), stats.rstd);
      sums->Add(j, MulFtz(Dy(j), xhat), Dy(j));
    }
  }
};

// The means over a row, of the threads' sums.
template <int kThreads, class Sum>
__device__ inline void MeansOf(const NormBackward& p, const Sum (&sums)[2],
                               float (&slots)[2][Team<kThreads>::kWarps], float (&means)[2]) {
  means[0] = sums[0].Total();
  means[1] = sums[1].Total();
  Team<kThreads>::Sum(means, slots);
  means[0] = __fdiv_rn(means[0], static_cast<float>(p.k));
  means[1] = p.mean == nullptr ? 0.0f : __fdiv_rn(means[1], static_cast<float>(p.k));
}

__device__ inline NormStats StatsAt(const NormBackward& p, int64_t row) {
  return {p.mean == nullptr ? 0.0f : __ldg(p.mean + row), __ldg(p.rstd + row)};
}

// A row of dy and of x that a team holds, or with kLoop reads again for every use.
template <Float dtype, int kThreads, bool kLoop>
struct BackwardRow {
  const NormBackward& p;
  int64_t first;  // element of x and dy
  NormStats stats;
  Columns<kThreads> columns;
  BackwardPack<dtype> packs[kRowPacks];

  __device__ BackwardRow(const NormBackward& p, int64_t row)
      : p(p), first(row * p.k), stats(StatsAt(p, row)), columns{p.k} {
    if (!kLoop) Load(0);
  }

  __device__ void Load(int64_t chunk) {
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      const int64_t column = columns.At(chunk, i);
      LoadAs(p.dy, first + column, columns.Valid(column), &packs[i].dy);
      LoadAs(p.x, first + column, columns.Valid(column), &packs[i].x);
    }
  }

  // Calls visit(chunk, i, column, valid) for every pack with elements.
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
    const int64_t chunks = kLoop ? columns.Chunks() : 1;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (kLoop) Load(chunk);
#pragma unroll
      for (int i = 0; i < kRowPacks; ++i) {
        const int64_t column = columns.At(chunk, i);
        const int valid = columns.Valid(column);
        if (valid > 0) visit(i, column, valid);
      }
    }
  }

  // The means of g * xhat and of g = dy * gamma, over the row.
  __device__ void Means(float (&slots)[2][Team<kThreads>::kWarps], float (&means)[2]) {
    RunningSum<kLoop> sums[2];
    ForEach([&](int i, int64_t column, int valid) {
      float gamma[kPack];
      LoadParameter(p.gamma, column, valid, p.centre, gamma);
      packs[i].AddTo(sums, gamma, stats, valid);
    });
    MeansOf<kThreads>(p, sums, slots, means);
  }

  // dx of a pack, and its share of dgamma and dbeta.
  __device__ void Finish(int i, int64_t column, int valid, const float (&means)[2],
                         ColumnSums* sums, float (&dx)[kPack]) const {
    float gamma[kPack];
    LoadParameter(p.gamma, column, valid, p.centre, gamma);
    packs[i].Finish(gamma, stats, means, sums, dx);
  }
};

template <Float out>
__device__ inline void StoreDx(const NormBackward& p, int64_t index, int valid,
                               const float (&dx)[kPack], Amax* seen) {
  Pack<out> h = Rounded<out>(dx);
  if (valid < kPack) h.Keep(valid);
  h.Store(p.dx, index, valid, p.dx_aligned);
  seen->Join(h.Abs().Largest(), h);
}

// 512 threads on a multiprocessor, 384 where x and dy take twice the registers.
template <Float in, int kBlock>
constexpr int kBackwardBlocks = kBlock == 512 ? 1 : (in == Float::kF32 ? 384 : 512) / kBlock;

// dx, and the sums of dgamma and dbeta over the rows of one group per block. With kLoop these are
// kept in memory.
template <Float in, Float out, int kThreads, bool kLoop>
__global__ void __launch_bounds__(Team<kThreads>::kBlock,
                                  (kBackwardBlocks<in, Team<kThreads>::kBlock>))
    NormBackwardKernel(NormBackward p) {
  if (Skips(p.noop)) return;
  using Rows = Team<kThreads>;
  extern __shared__ float4 shared[];
  // Two sets: a slow thread may still read the sums of a row when the next ones are written.
  __shared__ float slots[2][2][Rows::kWarps];
  SharedSums<kThreads> kept{shared};
  if (!kLoop) {
    for (int i = 0; i < kRowPacks; ++i) kept.Store(i, ColumnSums{});
  }
  const int64_t begin = blockIdx.x * p.group_rows;
  const int64_t end = begin + p.group_rows < p.m ? begin + p.group_rows : p.m;
  const int64_t group = blockIdx.x * p.k;
  Amax seen;
  int turn = 0;
  for (int64_t index = begin + Rows::Row(); index < end; index += Rows::kRows, turn ^= 1) {
    BackwardRow<in, kThreads, kLoop> row(p, index);
    float means[2];
    row.Means(slots[turn], means);
    row.ForEach([&](int i, int64_t column, int valid) {
      ColumnSums sums = {};
      if (!kLoop) sums = kept.Load(i, threadIdx.x);
      if (kLoop && index > begin) sums.Load(p, group + column, valid);
      float dx[kPack];
      row.Finish(i, column, valid, means, &sums, dx);
      StoreDx<out>(p, row.first + column, valid, dx, &seen);
      if (!kLoop) kept.Store(i, sums);
      if (kLoop) sums.Store(p, group + column, valid);
    });
  }
  if (!kLoop) kept.Finish(p, group);
  if (p.amax != nullptr) seen.StoreIntoZeros(p.amax);
}

// dy and x of the rows of a team, which come into shared memory one row ahead of their use, and
// gamma. Every thread reads what it has copied itself: that needs no barrier.
template <Float dtype, int kThreads>
struct RowsAhead {
  static constexpr int kBlock = Team<kThreads>::kBlock;
  static constexpr int kRowBytes = 2 * kRowPacks * kBlock * static_cast<int>(sizeof(Pack<dtype>));
  static constexpr int kBytes =
      2 * kRowBytes + kRowPacks * kPack * kBlock * static_cast<int>(sizeof(float));
  static_assert(kBytes >= SharedSums<kThreads>::kBytes);

  const NormBackward& p;
  Pack<dtype>* packs;  // [2, dy and x, kRowPacks, kBlock]
  float4* gammas;      // [kRowPacks, 2, kBlock]
  Columns<kThreads> columns;

  __device__ RowsAhead(const NormBackward& p, float4* shared)
      : p(p),
        packs(reinterpret_cast<Pack<dtype>*>(shared)),
        gammas(shared + 2 * kRowBytes / sizeof(float4)),
        columns{p.k} {
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      if (!Has(i)) continue;
      float gamma[kPack];
      LoadParameter(p.gamma, columns.At(0, i), kPack, p.centre, gamma);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        gammas[(2 * i + half) * kBlock + threadIdx.x] = make_float4(
            gamma[4 * half], gamma[4 * half + 1], gamma[4 * half + 2], gamma[4 * half + 3]);
      }
    }
  }

  __device__ bool Has(int i) const { return columns.At(0, i) < p.k; }
  __device__ Pack<dtype>& At(int turn, int which, int i) const {
    return packs[((2 * turn + which) * kRowPacks + i) * kBlock + threadIdx.x];
  }

  __device__ void Fetch(int turn, int64_t row, int64_t end) const {
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      if (row >= end || !Has(i)) continue;
      const int64_t bytes = (row * p.k + columns.At(0, i)) * Pack<dtype>::kBytes;
      __pipeline_memcpy_async(&At(turn, 0, i), static_cast<const char*>(p.dy.data) + bytes, 16);
      __pipeline_memcpy_async(&At(turn, 1, i), static_cast<const char*>(p.x.data) + bytes, 16);
    }
    __pipeline_commit();
  }

  // Calls visit(i, pack, gamma) for every pack of the row.
  template <typename Visit>
  __device__ void ForEach(int turn, Visit visit) const {
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      if (!Has(i)) continue;
      float gamma[kPack];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 four = gammas[(2 * i + half) * kBlock + threadIdx.x];
        gamma[4 * half] = four.x, gamma[4 * half + 1] = four.y;
        gamma[4 * half + 2] = four.z, gamma[4 * half + 3] = four.w;
      }
      visit(i, BackwardPack<dtype>{At(turn, 0, i), At(turn, 1, i)}, gamma);
    }
  }
};

// The same for aligned rows of 16-bit elements that fit into a team: the sums of dgamma and dbeta
// stay in registers.
template <Float dtype, int kThreads>
__global__ void __launch_bounds__(Team<kThreads>::kBlock, 512 / Team<kThreads>::kBlock)
    NormBackwardAheadKernel(NormBackward p) {
  if (Skips(p.noop)) return;
  using Rows = Team<kThreads>;
  extern __shared__ float4 shared[];
  __shared__ float slots[2][2][Rows::kWarps];
  const RowsAhead<dtype, kThreads> rows(p, shared);
  ColumnSums sums[kRowPacks] = {};
  const int64_t begin = blockIdx.x * p.group_rows;
  const int64_t end = begin + p.group_rows < p.m ? begin + p.group_rows : p.m;
  Amax seen;
  int turn = 0;
  int64_t index = begin + Rows::Row();
  rows.Fetch(turn, index, end);
  NormStats next = {};
  if (index < end) next = StatsAt(p, index);
  for (; index < end; index += Rows::kRows, turn ^= 1) {
    const NormStats stats = next;
    rows.Fetch(turn ^ 1, index + Rows::kRows, end);
    if (index + Rows::kRows < end) next = StatsAt(p, index + Rows::kRows);
    __pipeline_wait_prior(1);
    RunningSum<false> shares[2];
    rows.ForEach(turn, [&](int, const BackwardPack<dtype>& pack, const float (&gamma)[kPack]) {
      pack.AddTo(shares, gamma, stats, kPack);
    });
    float means[2];
    MeansOf<kThreads>(p, shares, slots[turn], means);
    rows.ForEach(turn, [&](int i, const BackwardPack<dtype>& pack, const float (&gamma)[kPack]) {
      float dx[kPack];
      pack.Finish(gamma, stats, means, &sums[i], dx);
      StoreDx<dtype>(p, index * p.k + rows.columns.At(0, i), kPack, dx, &seen);
    });
  }
  __syncthreads();  // the sums take the place of the rows
  SharedSums<kThreads> kept{shared};
#pragma unroll
  for (int i = 0; i < kRowPacks; ++i) kept.Store(i, sums[i]);
  kept.Finish(p, blockIdx.x * p.k);
  if (p.amax != nullptr) seen.StoreIntoZeros(p.amax);
}

constexpr int kJoinThreads = 256;
constexpr int kJoinColumns = kJoinThreads / kJoinRows;

// dgamma, and dbeta unless it is null, from the sums of all groups: those of dgamma come first.
__global__ void __launch_bounds__(kJoinThreads)
    JoinSumsKernel(NormBackward p, int64_t groups, float* dgamma, float* dbeta) {
  if (Skips(p.noop)) return;
  const float* sums = blockIdx.y == 0 ? p.dgamma : p.dbeta;
  JoinColumns<kJoinThreads>(sums, groups, p.k, int64_t{blockIdx.x} * kJoinColumns,
                            blockIdx.y == 0 ? dgamma : dbeta);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_NORM_BACKWARD_CUH_
