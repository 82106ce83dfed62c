// LayerNorm and RMSNorm of the rows of a matrix: statistics and h. Raw pointers, no XLA or nanobind
// includes.
//
// Every operation is one rounding, spelled out, with subnormals as zeros of their sign: the same
// row gives the same bits in every kernel. A sum over a row takes a fixed tree that only the length
// of the row decides.
#ifndef TE_FLAX_CUDA_KERNELS_NORM_CUH_
#define TE_FLAX_CUDA_KERNELS_NORM_CUH_

#include "cuda/kernels/amax.cuh"
#include "cuda/kernels/mxfp8_sink.cuh"
#include "cuda/kernels/tensor_sink.cuh"

namespace te_flax::cuda {

__device__ inline float SubFtz(float a, float b) {
  float difference;
  asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

__device__ inline float FmaFtz(float a, float b, float c) {
  float sum;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

// An array of any type. `aligned`: 16-byte accesses wherever a pack is whole.
struct Array {
  const void* data;
  Float dtype;
  bool aligned;
};

// Loads eight elements as `dtype`, which is the type of x or float32.
template <Float dtype>
__device__ inline void LoadAs(const Array& x, int64_t index, int valid, Pack<dtype>* pack) {
  if constexpr (dtype == Float::kF32) {
    const auto widen = [&](auto narrow) {
      narrow.Load(x.data, index, valid, x.aligned);
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack->words[j] = narrow.Bits(j);
    };
    if (x.dtype == Float::kBf16) return widen(Pack<Float::kBf16>());
    if (x.dtype == Float::kF16) return widen(Pack<Float::kF16>());
  }
  pack->Load(x.data, index, valid, x.aligned);
}

// Eight elements of gamma or beta, `add` added; -0 changes none, and stands for a missing array.
__device__ inline void LoadParameter(const Array& x, int64_t index, int valid, float add,
                                     float (&v)[kPack]) {
  Pack<Float::kF32> pack;
  if (x.data != nullptr) LoadAs(x, index, valid, &pack);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    v[j] = x.data == nullptr ? -0.0f : AddFtz(__uint_as_float(pack.words[j]), add);
  }
}

// gamma and beta of eight columns.
struct Parameters {
  float gamma[kPack];
  float beta[kPack];

  __device__ Parameters() {}
  __device__ Parameters(const Array& of_gamma, float centre, const Array& of_beta, int64_t column,
                        int valid) {
    LoadParameter(of_gamma, column, valid, centre, gamma);
    LoadParameter(of_beta, column, valid, -0.0f, beta);
  }
};

// v rounded once; every NaN is the positive quiet one.
template <Float dtype>
__device__ inline Pack<dtype> Rounded(const float (&v)[kPack]) {
  Pack<dtype> h;
  h.Round(v);
  if (h.Abs().Largest() <= kInf) return h;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {  // rare
    if ((h.Bits(j) & kAbs) <= kInf) continue;
    if constexpr (dtype == Float::kF32) {
      h.words[j] = kQuietNan;
    } else {
      constexpr uint32_t kNan = dtype == Float::kBf16 ? 0x7fc0u : 0x7e00u;
      h.words[j / 2] = (h.words[j / 2] & 0xffffu << 16 * (1 - j % 2)) | kNan << 16 * (j % 2);
    }
  }
  return h;
}

// term(0) + .. + term(7) over a tree, without those from `valid` on.
template <typename Term>
__device__ inline float SumPack(int valid, Term term) {
  float v[kPack];
#pragma unroll
  for (int j = 0; j < kPack; ++j) v[j] = term(j);
  if (valid < kPack) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) v[j] = j < valid ? v[j] : 0.0f;
  }
#pragma unroll
  for (int half = kPack / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) v[j] = AddFtz(v[j], v[j + half]);
  }
  return v[0];
}

constexpr int kRowPacks = 4;                    // packs of one row that a thread holds
constexpr int kSlice = 32 * kRowPacks * kPack;  // columns that a warp holds, side by side

// The threads that share a row: one warp, four of which make a block, or a whole block.
template <int kThreads>
struct Team {
  static constexpr int kBlock = kThreads == 32 ? 128 : kThreads;
  static constexpr int kRows = kBlock / kThreads;
  static constexpr int kWarps = kThreads / 32;

  __device__ static int Row() { return static_cast<int>(threadIdx.x) / kThreads; }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x) % kThreads; }

  // The sums of v[i] over the threads of a row, over a tree, for each of them. `slots` must not
  // be in use by an earlier sum that a thread may still be reading.
  template <int kCount>
  __device__ static void Sum(float (&v)[kCount], float (&slots)[kCount][kWarps]) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        v[i] = AddFtz(v[i], __shfl_xor_sync(~0u, v[i], distance));
      }
    }
    if constexpr (kWarps > 1) {
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) slots[i][threadIdx.x / 32] = v[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float w[kWarps];
#pragma unroll
        for (int j = 0; j < kWarps; ++j) w[j] = slots[i][j];
#pragma unroll
        for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
          for (int j = 0; j < half; ++j) w[j] = AddFtz(w[j], w[j + half]);
        }
        v[i] = w[0];
      }
    }
  }
};

// A running sum; with kLong it keeps what each addition loses, so that its error does not grow with
// the number of terms.
template <bool kLong>
struct RunningSum {
  float sum = 0.0f;
  float lost = 0.0f;

  __device__ void Add(float more) {
    const float next = AddFtz(sum, more);
    if constexpr (!kLong) {
      sum = next;
      return;
    }
    const float added = SubFtz(next, sum);
    lost = AddFtz(lost, AddFtz(SubFtz(sum, SubFtz(next, added)), SubFtz(more, added)));
    sum = next;
  }
  __device__ float Total() const { return kLong ? AddFtz(sum, lost) : sum; }
};

// Where the packs of a thread lie in a row of k elements; a row longer than a team holds comes in
// several chunks.
template <int kThreads>
struct Columns {
  int64_t k;

  __device__ int64_t At(int64_t chunk, int i) const {
    const int lane = Team<kThreads>::Lane();
    const int64_t slice = chunk * Team<kThreads>::kWarps + lane / 32;
    return slice * kSlice + (i * 32 + lane % 32) * kPack;
  }
  __device__ int Valid(int64_t column) const {
    const int64_t left = k - column;
    return static_cast<int>(left < 0 ? 0 : left < kPack ? left : kPack);
  }
  __device__ int64_t Chunks() const {
    constexpr int64_t kColumns = int64_t{Team<kThreads>::kWarps} * kSlice;
    return (k + kColumns - 1) / kColumns;
  }
};

struct NormForward {
  Array x, gamma, beta;  // [m, k], [k], [k]; no beta: RMSNorm
  int64_t m, k;
  float epsilon;  // 0 or at least 2^-126
  float centre;   // added to gamma
  float* mean;    // [m], null in an RMSNorm
  float* rstd;    // [m]
};

// A row of x that a team holds, or with kLoop reads again for every use.
template <Float dtype, int kThreads, bool kLoop>
struct NormRow {
  static constexpr int kCount = 1;
  using Slots = float[1][Team<kThreads>::kWarps];

  const Array& x;
  int64_t first;  // element of x
  Columns<kThreads> columns;
  Pack<dtype> packs[kRowPacks];
  int valid[kRowPacks];

  __device__ NormRow(const Array& x, int64_t row, int64_t m, int64_t k)
      : x(x), first(row * k), columns{row < m ? k : 0} {
    if (!kLoop) Load(0);
  }

  __device__ void Load(int64_t chunk) {
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      const int64_t column = columns.At(chunk, i);
      valid[i] = columns.Valid(column);
      LoadAs(x, first + column, valid[i], &packs[i]);
    }
  }

  // Calls visit(column, valid, pack) for every pack, those without elements too.
  template <typename Visit>
  __device__ void ForEach(Visit visit) {
    const int64_t chunks = kLoop ? columns.Chunks() : 1;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      if (kLoop) Load(chunk);
#pragma unroll
      for (int i = 0; i < kRowPacks; ++i) {
        visit(columns.At(chunk, i), valid[i], packs[i]);
      }
    }
  }

  // The mean of term(0, value) over the row.
  template <typename Term>
  __device__ float Mean(Slots& slots, Term term) {
    RunningSum<kLoop> sum;
    ForEach([&](int64_t, int count, const Pack<dtype>& pack) {
      if (count <= 0) return;
      sum.Add(SumPack(count, [&](int j) { return term(0, __uint_as_float(pack.Bits(j))); }));
    });
    float total[1] = {sum.Total()};
    Team<kThreads>::Sum(total, slots);
    return __fdiv_rn(total[0], static_cast<float>(columns.k));
  }
  __device__ void Spread(float v, float (&all)[1]) const { all[0] = v; }
};

struct NormStats {
  float mean;
  float rstd;

  template <Float dtype>
  __device__ float Normal(const Pack<dtype>& x, int j) const {
    return MulFtz(SubFtz(__uint_as_float(x.Bits(j)), mean), rstd);
  }
};

// Of the rows that a thread works on, NormRow or alike: Mean() is that of one row r for each
// thread, and Spread() tells them all. A row whose sum of squares is not finite is NaN: rstd says
// so.
template <class Rows>
__device__ inline void StatsOf(Rows& rows, typename Rows::Slots (&slots)[3], bool layernorm,
                               float epsilon, NormStats (&stats)[Rows::kCount]) {
  float means[Rows::kCount] = {}, rstds[Rows::kCount];
  if (layernorm) {
    const float near = rows.Mean(slots[0], [](int, float x) { return x; });
    rows.Spread(near, means);
    // What the first sum lost: a constant row has exactly its own mean.
    const float rest = rows.Mean(slots[1], [&](int r, float x) { return SubFtz(x, means[r]); });
    rows.Spread(AddFtz(near, rest), means);
  }
  const float square = rows.Mean(slots[2], [&](int r, float x) {
    const float d = SubFtz(x, means[r]);
    return MulFtz(d, d);
  });
  const float variance = AddFtz(square, epsilon);
  const bool finite = variance < __uint_as_float(kInf);
  rows.Spread(finite ? __fdiv_rn(1.0f, __fsqrt_rn(variance)) : __uint_as_float(kQuietNan), rstds);
#pragma unroll
  for (int r = 0; r < Rows::kCount; ++r) stats[r] = {means[r], rstds[r]};
}

__device__ inline void StoreStats(const NormForward& p, int64_t row, const NormStats& stats) {
  if (p.mean != nullptr) p.mean[row] = QuietFloat(stats.mean);
  p.rstd[row] = stats.rstd;
}

// h of eight elements, before it is rounded. Without beta there is no sum: -0 changes nothing.
template <Float dtype>
__device__ inline void Normalize(const Pack<dtype>& x, const NormStats& stats,
                                 const Parameters& parameters, float (&h)[kPack]) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    h[j] = FmaFtz(stats.Normal(x, j), parameters.gamma[j], parameters.beta[j]);
  }
}

// What a row kernel makes of eight elements of h, of which `valid` exist. With MXFP8 scales the
// four lanes of a block of 32 columns come here together.
template <Float dtype>
__device__ inline void StoreOfRow(const Outputs& out, int64_t m, int64_t column, int valid,
                                  const Pack<dtype>& h, float scale, Amax* seen) {
  const int64_t index = m * out.k + column;
  if (out.h != nullptr) h.Store(out.h, index, valid, out.aligned);
  if (out.row_scale == nullptr) {
    float v[kPack];
    ScalePack(h, scale, seen, v);
    if (out.row == nullptr) return;
    return StoreCodes(out.row + index, Encode8(v, out.row_format), valid, out.aligned);
  }
  uint32_t largest = h.Abs().Largest();
  seen->Join(largest, h);
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  const uint32_t e8m0 = BlockScale(largest, out.row_format);
  StoreCodes(out.row + index, BlockCodes(h, e8m0, out.row_format), valid, out.aligned);
  if (threadIdx.x % 4 != 0 || valid <= 0) return;
  const int64_t blocks = (out.k + kMxBlock - 1) / kMxBlock;
  out.row_scale[m * blocks + column / kMxBlock] = static_cast<uint8_t>(e8m0);
}

// Statistics and, with `results`, all that `out` asks for, which is no col and no values, from one
// read of x.
template <Float in, Float dtype, int kThreads, bool kLoop>
__global__ void __launch_bounds__(Team<kThreads>::kBlock)
    NormRowsKernel(NormForward p, Outputs out, bool results) {
  if (Skips(out.noop)) return;
  using Rows = Team<kThreads>;
  // From the last row to the first: what comes next begins with rows that are still in the cache.
  const int64_t index = int64_t{gridDim.x - 1 - blockIdx.x} * Rows::kRows + Rows::Row();
  NormRow<in, kThreads, kLoop> row(p.x, index, p.m, p.k);
  __shared__ typename NormRow<in, kThreads, kLoop>::Slots slots[3];
  NormStats stats[1];
  StatsOf(row, slots, p.mean != nullptr, p.epsilon, stats);
  if (Rows::Lane() == 0 && index < p.m) StoreStats(p, index, stats[0]);
  if (!results) return;
  const float scale = out.scale == nullptr ? 1.0f : __ldg(out.scale);
  Amax seen;
  row.ForEach([&](int64_t column, int valid, const Pack<in>& pack) {
    const Parameters parameters(p.gamma, p.centre, p.beta, column, valid);
    float v[kPack];
    Normalize(pack, stats[0], parameters, v);
    Pack<dtype> h = Rounded<dtype>(v);
    if (valid < kPack) h.Keep(valid);
    StoreOfRow(out, index, column, valid, h, scale, &seen);
  });
  seen.StoreIntoZeros(out.amax);
}

// h, given the statistics.
template <Float in, Float out>
struct NormSource {
  static constexpr Float kType = out;
  static constexpr int kSlices = 1;
  static constexpr int kLoads = in == Float::kF32 ? 2 : 4;
  static constexpr bool kFused = true;
  static constexpr bool kSums = false;
  static constexpr bool kWhole = false;
  using Columns = Parameters;
  struct Raw {
    Pack<in> x;
    NormStats stats;
  };

  NormForward p;

  __device__ Columns Begin(const Lane& at) const {
    return Parameters(p.gamma, p.centre, p.beta, at.k, at.valid);
  }
  __device__ void Load(const Position& at, Raw* raw) const {
    LoadAs(p.x, at.m * p.k + at.k, at.valid, &raw->x);
    raw->stats = {0.0f, 0.0f};
    if (at.valid <= 0) return;
    if (p.mean != nullptr) raw->stats.mean = __ldg(p.mean + at.m);
    raw->stats.rstd = __ldg(p.rstd + at.m);
  }
  __device__ void Make(const Columns& parameters, const Position&, const Raw& raw,
                       Pack<out> (&h)[1]) const {
    float v[kPack];
    Normalize(raw.x, raw.stats, parameters, v);
    h[0] = Rounded<out>(v);
  }
};

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_NORM_CUH_
