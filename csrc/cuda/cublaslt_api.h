// The part of cuBLASLt's binary interface that te_flax calls. The library is found at run time and
// its header is no part of every toolkit, so the names are declared here; cublaslt.cc compares them
// with the header where there is one.
#ifndef TE_FLAX_CUDA_CUBLASLT_API_H_
#define TE_FLAX_CUDA_CUBLASLT_API_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace te_flax::cublaslt {

using Status = int;
using Handle = struct HandleOpaque*;
using Desc = struct DescOpaque*;
using Layout = struct LayoutOpaque*;
using Preference = struct PreferenceOpaque*;

// May be stored and used again with the same version of the library.
struct Algo {
  uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

constexpr Status kSuccess = 0;
constexpr int kComputeF32 = 68;
constexpr int32_t kOpN = 0;
constexpr int32_t kOpT = 1;

// Of a product.
constexpr int kTransA = 3;
constexpr int kTransB = 4;
constexpr int kEpilogue = 7;
constexpr int kBiasPointer = 8;
constexpr int kAuxPointer = 11;
constexpr int kAuxLd = 12;
constexpr int kAScalePointer = 17;
constexpr int kBScalePointer = 18;
constexpr int kFastAccum = 25;
constexpr int kBiasType = 26;
constexpr int kAScaleMode = 31;
constexpr int kBScaleMode = 32;

constexpr int32_t kScaleTensor = 0;
constexpr int32_t kScaleVec32 = 2;     // e8m0, one for each 32
constexpr int32_t kScaleVec128 = 4;    // float32, one for each 128
constexpr int32_t kScaleBlock128 = 5;  // float32, one for each 128 x 128

// Bits of an epilogue.
constexpr uint32_t kEpilogueNone = 1;
constexpr uint32_t kEpilogueBias = 4;
constexpr uint32_t kEpilogueGelu = 32;
constexpr uint32_t kEpilogueAux = 128;

// Of what a search may return.
constexpr int kMaxWorkspace = 1;
constexpr int kReductionMask = 3;
constexpr int kMinAlignmentA = 5;  // and of B, C and D: 6 to 8
constexpr int kMinAlignmentD = 8;
constexpr uint32_t kReduceInComputeType = 2;

struct Api {
  size_t (*GetVersion)();
  const char* (*GetStatusName)(Status);
  Status (*Create)(Handle*);
  Status (*DescCreate)(Desc*, int compute, cudaDataType scale);
  Status (*DescDestroy)(Desc);
  Status (*DescSet)(Desc, int attribute, const void* value, size_t bytes);
  Status (*LayoutCreate)(Layout*, cudaDataType, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*LayoutDestroy)(Layout);
  Status (*PreferenceCreate)(Preference*);
  Status (*PreferenceDestroy)(Preference);
  Status (*PreferenceSet)(Preference, int attribute, const void* value, size_t bytes);
  Status (*GetHeuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference,
                         int requested, HeuristicResult*, int* found);
  Status (*AlgoCheck)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, const Algo*,
                      HeuristicResult*);
  Status (*Matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algo*,
                   void* workspace, size_t bytes, cudaStream_t);
};

}  // namespace te_flax::cublaslt

#endif  // TE_FLAX_CUDA_CUBLASLT_API_H_
