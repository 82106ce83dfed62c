// FFI handlers of the matrix products: padding and scales around one call of cuBLASLt.
#include <optional>

#include "cuda/gemm_call.h"
#include "cuda/kernels/gemm.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "gemm";

unsigned FlatBlocks(int64_t items) { return Blocks(items, kGemmThreads, kMaxFlatBlocks); }

void Widen(const Call& call, const Side& side, cudaStream_t stream) {
  const auto* data = static_cast<const uint8_t*>(side.data);
  const auto* scale = static_cast<const uint8_t*>(side.scale);
  const Format format = side.type == CUDA_R_8F_E4M3 ? Format::kE4M3 : Format::kE5M2;
  const int64_t m = side.last ? side.rows : call.k, k = side.last ? call.k : side.rows;
  const Fp8Codes codes = {data, k, format};
  const bool aligned = k % kPack == 0;
  const unsigned blocks = Blocks(m * CeilDiv(k, kPack), kDequantizeThreads, kMaxFlatBlocks);
  if (side.last) {
    const Mxfp8RowScales scales = {scale, CeilDiv(k, kMxBlock)};
    DequantizeBlocksKernel<Float::kBf16>
        <<<blocks, kDequantizeThreads, 0, stream>>>(codes, scales, m, k, aligned, side.copy);
  } else {
    const Mxfp8ColScales scales = {scale, k};
    DequantizeBlocksKernel<Float::kBf16><<<blocks, kDequantizeThreads, 0, stream>>>(
        codes, scales, m, k, aligned && AlignedTo(scale, 8), side.copy);
  }
}

// Launches what fills the copies of an operand.
void PrepareSide(const Call& call, const Side& side, cudaStream_t stream) {
  if (call.widened) return Widen(call, side, stream);
  if (side.copy != nullptr) {
    PadKernel<<<FlatBlocks(side.padded_rows * call.padded_k), kGemmThreads, 0, stream>>>(
        static_cast<const uint8_t*>(side.data), side.rows, call.k, static_cast<uint8_t*>(side.copy),
        side.padded_rows, call.padded_k);
  }
  if (side.scale_copy == nullptr) return;
  if (call.scaling == Scaling::kMxfp8) {
    const int64_t blocks = CeilDiv(call.k, kMxBlock);
    SwizzleScalesKernel<<<FlatBlocks(side.rows * blocks), kGemmThreads, 0, stream>>>(
        static_cast<const uint8_t*>(side.scale), side.rows, blocks,
        static_cast<uint8_t*>(side.scale_copy));
    return;
  }
  const auto* scale = static_cast<const float*>(side.scale);
  auto* copy = static_cast<float*>(side.scale_copy);
  const int64_t across = call.padded_k / 128;
  if (side.scale_rows == 1) {
    const int64_t tiles = CeilDiv(side.padded_rows, kScaleTile) * CeilDiv(across, kScaleTile);
    TransposeScalesKernel<<<Blocks(tiles, 1), kGemmThreads, 0, stream>>>(scale, side.rows, across,
                                                                         copy, side.padded_rows);
  } else {
    const int64_t rows = CeilDiv(side.padded_rows, 128), to = RoundUp(across, 4);
    PadKernel<<<FlatBlocks(rows * to), kGemmThreads, 0, stream>>>(scale, rows, across, copy, rows,
                                                                  to);
  }
}

// Scales and rounds the sums, or without a contraction the bias alone, to the result.
void Finish(const Call& call, cudaStream_t stream) {
  GemmFinish p = {};
  if (call.k != 0) {
    p.sum = call.sum;
    p.sum_cols = call.matmul.m;
    if (call.scaling == Scaling::kTensor) {
      p.lhs_scale = static_cast<const float*>(call.lhs.scale);
      p.rhs_scale = static_cast<const float*>(call.rhs.scale);
    }
  }
  p.bias = call.bias;
  p.bias_type = call.bias_type;
  p.out = call.out;
  p.m = call.m();
  p.n = call.n();
  WithFloat(call.out_type, [&](auto type) {
    FinishKernel<decltype(type)::value><<<FlatBlocks(p.m * p.n), kGemmThreads, 0, stream>>>(p);
  });
}

ffi::Error GemmImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, Describe(args, rets, attrs));
  if (call.m() * call.n() == 0) return ffi::Error::Success();
  if (call.k != 0) {
    for (const Side* side : {&call.lhs, &call.rhs}) PrepareSide(call, *side, stream);
    TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetLastError()));
    TE_RETURN_IF_ERROR(RunMatmul(call.matmul, call.at, stream));
  }
  if (call.k == 0 || call.sum != nullptr) Finish(call, stream);
  return CudaStatus(kWhere, cudaGetLastError());
}

// XLA runs this before it records a command buffer, and before the first kernel of a program: the
// operands hold nothing yet and the results may share memory with parameters, so the candidates
// run on memory of their own. Where there is not enough, the heuristic's first choice stays.
ffi::Error GemmInitializeImpl(cudaStream_t stream, ffi::ScratchAllocator allocator,
                              ffi::RemainingArgs args, ffi::RemainingRets rets,
                              ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, Describe(args, rets, attrs));
  if (call.m() * call.n() * call.k == 0) return ffi::Error::Success();
  TE_ASSIGN_OR_RETURN(settled, IsSettled(call.matmul, stream));
  if (settled) return ffi::Error::Success();
  // XLA grants no more than 16 bytes of alignment; Scratch sees to the rest.
  Scratch sizes(nullptr);
  TuningBuffers(call.matmul, &sizes);
  const int64_t bytes = sizes.used() + kRegion;
  const std::optional<void*> memory = allocator.Allocate(static_cast<size_t>(bytes));
  if (!memory.has_value() || *memory == nullptr) return SettleUntimed(call.matmul, call.at);
  FillKernel<<<FlatBlocks(bytes / 4), kGemmThreads, 0, stream>>>(static_cast<uint32_t*>(*memory),
                                                                 bytes / 4);
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetLastError()));
  Scratch scratch(*memory);
  return Settle(call.matmul, TuningBuffers(call.matmul, &scratch), stream);
}

}  // namespace

// Operands: lhs, rhs [lhs_scale_inv, rhs_scale_inv] [bias]; results: out, the scratch memory u8.
// Attributes: scaling, orientation (str), bias, split_accumulator (bool), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(Gemm, GemmImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GemmInitialize, GemmInitializeImpl,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace te_flax::cuda
