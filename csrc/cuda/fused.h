// From one call of a fused op to its launches: what every handler with a Source does around it.
#ifndef TE_FLAX_CUDA_FUSED_H_
#define TE_FLAX_CUDA_FUSED_H_

#include <initializer_list>

#include "common/fused.h"
#include "cuda/kernels/mxfp8_sink.cuh"
#include "cuda/kernels/tensor_sink.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {

// Bytes of the partial sums for dbias, at the start of the workspace.
inline int64_t SumBytes(const FusedCall& call, const FusedShape& shape) {
  if (call.dbias == nullptr) return 0;
  return CeilDiv(shape.rows, kSumRows) * shape.Width() * int64_t{sizeof(float)};
}

// amax [2] of a call whose kernel, if it has any, does not start from zeros itself.
inline ffi::Error ClearAmax(cudaStream_t stream, const FusedCall& call, const Outputs& out) {
  return Clear(call.where, stream, out.noop, out.amax, 2 * sizeof(float));
}

// Checks the results, obeys noop, clears amax and dbias where no kernel will run, and fills the
// kernels' view. `reads`: the pointers that a Source loads whole packs from.
inline ffi::Error Describe(cudaStream_t stream, const FusedCall& call, const FusedShape& shape,
                           std::initializer_list<const void*> reads, Outputs* out) {
  TE_RETURN_IF_ERROR(CheckResults(call, shape));
  if (call.workspace_bytes < SumBytes(call, shape)) {
    return Invalid(call.where, "workspace", "hold the partial sums",
                   std::to_string(call.workspace_bytes) + " bytes", kReport);
  }
  *out = {};
  if (call.has.noop) {
    TE_ASSIGN_OR_RETURN(flag, TakeNoop(call.where, stream, call.all));
    out->noop = flag;
  }
  out->m = shape.rows;
  out->k = shape.cols;
  out->h = call.h;
  out->scale = call.scale;
  out->row = call.row;
  out->col = call.col;
  out->row_scale = call.row_scale;
  out->col_scale = call.col_scale;
  out->row_format = call.row_format;
  out->col_format = call.has.col || !call.has.row ? call.col_format : call.row_format;
  out->row_values = call.row_values;
  out->col_values = call.col_values;
  out->sums = call.dbias == nullptr ? nullptr : reinterpret_cast<float*>(call.workspace);
  out->dbias = call.dbias;
  out->amax = static_cast<uint32_t*>(call.amax);
  out->aligned = shape.cols % kPack == 0 && AlignedTo(call.h, 16) && AlignedTo(call.row, 8);
  for (const void* pointer : reads) out->aligned &= AlignedTo(pointer, 16);
  if (call.scaling == Scaling::kMxfp8) {
    out->aligned &= AlignedTo(call.col, 8) && AlignedTo(call.col_scale, 8);
    if (call.row_values) out->aligned &= AlignedTo(call.row, 16);
    if (call.col_values) out->aligned &= AlignedTo(call.col, 16);
  }
  out->col_aligned = AlignedTo(call.col, 16) && shape.rows % 16 == 0;
  if (shape.rows * shape.Width() == 0) TE_RETURN_IF_ERROR(ClearAmax(stream, call, *out));
  if (call.dbias == nullptr || shape.rows > 0) return ffi::Error::Success();
  return Clear(call.where, stream, out->noop, call.dbias, shape.Width() * int64_t{sizeof(float)});
}

// Run the kernels of a call that Describe() has described.
template <class Source>
ffi::Error RunMxfp8(cudaStream_t stream, const FusedCall& call, const Source& source,
                    const Outputs& out) {
  if (out.m * out.k == 0) return ffi::Error::Success();
  const auto kernel = out.row_values || out.col_values ? Mxfp8Kernel<Source, Copies::kValues>
                                                       : Mxfp8Kernel<Source, Copies::kAny>;
  return LaunchWithAmax(call.where, stream, out.noop, out.amax, kFusedRounds, kernel,
                        Mxfp8Groups<Source>(out), Mxfp8Shape<Source>::kThreads, source, out);
}

template <class Source>
ffi::Error RunFused(cudaStream_t stream, const FusedCall& call, const Source& source,
                    const Outputs& out) {
  if constexpr (kFitsMxfp8<Source>) {
    if (call.scaling == Scaling::kMxfp8) return RunMxfp8(stream, call, source, out);
  }
  if (out.m * out.k == 0) return ffi::Error::Success();
  return LaunchWithAmax(call.where, stream, out.noop, out.amax, kFusedRounds,
                        TensorTileKernel<Source, Copies::kAny>, TensorTiles(out), kTileThreads,
                        source, out);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_FUSED_H_
