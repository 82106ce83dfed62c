// LayerNorm and RMSNorm with both copies under tensor scaling from one read of x. Raw pointers, no
// XLA or nanobind includes.
//
// A cluster of blocks holds a band of 32 whole rows in registers, each block 1024 columns of it:
// what one warp of the team of a row holds in NormRowsKernel. So the sums, and h, have the same
// bits. The clusters need sm_90.
#ifndef TE_FLAX_CUDA_KERNELS_NORM_BAND_CUH_
#define TE_FLAX_CUDA_KERNELS_NORM_BAND_CUH_

#include <cooperative_groups.h>

#include "cuda/kernels/norm.cuh"

namespace te_flax::cuda {

constexpr int kBandRows = 32;
constexpr int kBandThreads = 256;
constexpr int kBandBlocks = 8;         // of a cluster, at most
constexpr int kBandPack = 32 * kPack;  // columns of one pack of every lane: k is a multiple

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Says when `bytes` from the blocks of a cluster have come into the shared memory of this one. A
// barrier of the cluster, which all warps would wait at, takes longer.
struct Arrival {
  uint64_t barrier;

  // By one thread, before a barrier of the cluster.
  __device__ void Expect(int bytes) {
    const uint32_t at = SharedAddress(&barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Stores v at the place of `slot` in a block of the cluster.
  __device__ void Send(float v, const float* slot, int block) const {
    uint32_t to, arrival;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(SharedAddress(slot)), "r"(block));
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(arrival)
        : "r"(SharedAddress(&barrier)), "r"(block));
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
        "f"(v), "r"(arrival)
        : "memory");
  }

  __device__ void Wait() const {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(SharedAddress(&barrier))
          : "memory");
    }
  }
};

// gamma and beta of the columns of a block, halves of packs side by side.
struct BandParameters {
  float4 gamma[2][kSlice / kPack];
  float4 beta[2][kSlice / kPack];

  __device__ void Fill(const NormForward& p, int64_t first) {
    const int64_t column = first + threadIdx.x * kPack;
    if (threadIdx.x >= kSlice / kPack || column >= p.k) return;
    const Parameters from(p.gamma, p.centre, p.beta, column, kPack);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = [&](const float* v) { return make_float4(v[0], v[1], v[2], v[3]); };
      gamma[half][threadIdx.x] = four(from.gamma + 4 * half);
      beta[half][threadIdx.x] = four(from.beta + 4 * half);
    }
  }

  __device__ Parameters Of(int pack) const {
    Parameters to;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 g = gamma[half][pack], b = beta[half][pack];
      to.gamma[4 * half] = g.x, to.gamma[4 * half + 1] = g.y;
      to.gamma[4 * half + 2] = g.z, to.gamma[4 * half + 3] = g.w;
      to.beta[4 * half] = b.x, to.beta[4 * half + 1] = b.y;
      to.beta[4 * half + 2] = b.z, to.beta[4 * half + 3] = b.w;
    }
    return to;
  }
};

// The four rows of a warp, in the columns of its block.
template <Float dtype>
struct BandRows {
  static constexpr int kCount = kBandRows * 32 / kBandThreads;
  // What the warps of the same rows tell each other: the sums of their blocks.
  struct Slots {
    float sums[kBandRows][kBandBlocks];
    Arrival arrivals[kBandThreads / 32];
  };

  int blocks;
  int rank;
  int warp = static_cast<int>(threadIdx.x) / 32;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t m;
  int64_t k;
  Pack<dtype> packs[kCount][kRowPacks];

  __device__ BandRows(const NormForward& p, Slots (&slots)[3], BandParameters* parameters)
      : k(p.k) {
    const auto cluster = cooperative_groups::this_cluster();
    blocks = static_cast<int>(cluster.num_blocks());
    rank = static_cast<int>(cluster.block_rank());
    m = int64_t{blockIdx.x} / blocks * kBandRows + warp * kCount;
    constexpr int kBytes = kCount * static_cast<int>(sizeof(float));
    if (lane < 3) slots[lane].arrivals[warp].Expect(blocks * kBytes);
    cluster.barrier_arrive();
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      if (!Has(i)) continue;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        packs[r][i].Load(p.x.data, (m + r) * k + Column(i), kPack, true);
      }
    }
    parameters->Fill(p, rank * kSlice);
    cluster.barrier_wait();
    __syncthreads();
  }

  __device__ int64_t Column(int i) const { return rank * kSlice + i * kBandPack + lane * kPack; }
  __device__ bool Has(int i) const { return rank * kSlice + i * kBandPack < k; }

  // The mean of term(r, value) over the row r = lane / 8. `slots` serve once.
  template <typename Term>
  __device__ float Mean(Slots& slots, Term term) {
    RunningSum<false> sums[kCount];
#pragma unroll
    for (int i = 0; i < kRowPacks; ++i) {
      if (!Has(i)) continue;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        const Pack<dtype>& pack = packs[r][i];
        sums[r].Add(SumPack(kPack, [&](int j) { return term(r, __uint_as_float(pack.Bits(j))); }));
      }
    }
    float totals[kCount], unused[kCount][1];
#pragma unroll
    for (int r = 0; r < kCount; ++r) totals[r] = sums[r].Total();
    Team<32>::Sum(totals, unused);
    Tell(slots, totals);
    slots.arrivals[warp].Wait();
    const float total = Joined(slots.sums[warp * kCount + lane / kBandBlocks]);
    return __fdiv_rn(total, static_cast<float>(k));
  }
  __device__ void Spread(float v, float (&all)[kCount]) const {
#pragma unroll
    for (int r = 0; r < kCount; ++r) all[r] = __shfl_sync(~0u, v, r * kBandBlocks);
  }

  // Tells every block of the cluster the sums of this one: lane / 8 is the row, lane % 8 the block.
  __device__ void Tell(Slots& slots, const float (&sums)[kCount]) const {
    static_assert(kCount == 4 && kBandBlocks == 8);
    const float even = (lane & 16) == 0 ? sums[0] : sums[2];
    const float odd = (lane & 16) == 0 ? sums[1] : sums[3];
    const float sum = (lane & 8) == 0 ? even : odd;
    const int to = lane % kBandBlocks;
    if (to >= blocks) return;
    const float* slot = &slots.sums[warp * kCount + lane / kBandBlocks][rank];
    slots.arrivals[warp].Send(sum, slot, to);
  }

  // The sum over the blocks, in the tree of Team::Sum.
  __device__ float Joined(const float (&slots)[kBandBlocks]) const {
    float w[kBandBlocks];
#pragma unroll
    for (int j = 0; j < kBandBlocks; ++j) w[j] = j < blocks ? slots[j] : 0.0f;
#pragma unroll
    for (int half = kBandBlocks / 2; half > 0; half /= 2) {
      if (blocks <= half) continue;
#pragma unroll
      for (int j = 0; j < half; ++j) w[j] = AddFtz(w[j], w[j + half]);
    }
    return w[0];
  }
};

// Codes of the columns of a block; words of the lower 16 rows are XORed with 16, so that the
// transposed reads of a warp fall into 32 different banks.
using BandCodes = uint32_t[kBandRows][kSlice / 4];

// h, row codes and the codes in shared memory of pack i of the rows of a warp.
template <Float dtype>
__device__ inline void StoreBandPack(const Outputs& out, const Parameters& parameters,
                                     const BandRows<dtype>& rows, int i,
                                     const NormStats (&stats)[BandRows<dtype>::kCount], float scale,
                                     BandCodes& tile, Amax* seen) {
  const int64_t column = rows.Column(i);
#pragma unroll
  for (int r = 0; r < BandRows<dtype>::kCount; ++r) {
    float v[kPack];
    Normalize(rows.packs[r][i], stats[r], parameters, v);
    const Pack<dtype> h = Rounded<dtype>(v);
    const int64_t index = (rows.m + r) * out.k + column;
    if (out.h != nullptr) h.Store(out.h, index, kPack, true);
    ScalePack(h, scale, seen, v);
    uint2 codes = Encode8(v, out.col_format);
    const int row = rows.warp * BandRows<dtype>::kCount + r;
    const int word = (i * kBandPack + rows.lane * kPack) / 4;
    *reinterpret_cast<uint2*>(&tile[row][word ^ (row / 16 * 16)]) = codes;
    if (out.row == nullptr) continue;
    if (out.row_format != out.col_format) codes = Encode8(v, out.row_format);
    StoreCodes(out.row + index, codes, kPack, true);
  }
}

#endif

// Statistics, both copies, h and amax. All rows are aligned; m is a multiple of 32.
template <Float dtype>
__global__ void __launch_bounds__(kBandThreads, 2) NormBandKernel(NormForward p, Outputs out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (Skips(out.noop)) return;
  __shared__ alignas(8) BandCodes tile;
  __shared__ typename BandRows<dtype>::Slots slots[3];
  __shared__ BandParameters parameters;
  BandRows<dtype> rows(p, slots, &parameters);
  NormStats stats[BandRows<dtype>::kCount];
  StatsOf(rows, slots, p.mean != nullptr, p.epsilon, stats);
  if (rows.rank == 0 && rows.lane == 0) {
#pragma unroll
    for (int r = 0; r < BandRows<dtype>::kCount; ++r) StoreStats(p, rows.m + r, stats[r]);
  }
  const float scale = __ldg(out.scale);
  Amax seen;
#pragma unroll
  for (int i = 0; i < kRowPacks; ++i) {
    if (rows.Has(i))
      StoreBandPack(out, parameters.Of(32 * i + rows.lane), rows, i, stats, scale, tile, &seen);
  }
  __syncthreads();
  const int64_t m = rows.m - rows.warp * BandRows<dtype>::kCount;
  const int block = threadIdx.x % 2;
  for (int quad = threadIdx.x / 2; quad < kSlice / 4; quad += kBandThreads / 2) {
    StoreFourColumns(out, out.col, m + 16 * block, rows.rank * kSlice + 4 * quad,
                     [&](int r) { return tile[16 * block + r][quad ^ (16 * block)]; });
  }
  seen.StoreIntoZeros(out.amax);
#endif
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_NORM_BAND_CUH_
