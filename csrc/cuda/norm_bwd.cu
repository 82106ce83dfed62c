// FFI handler of the derivative of LayerNorm and RMSNorm on CUDA, with fused quantization.
#include "cuda/kernels/norm_backward.cuh"
#include "cuda/norm.h"

namespace te_flax::cuda {
namespace {

ffi::ErrorOr<NormBackward> ReadBackward(const FusedCall& call, const NormOptions& options,
                                        Extent extent) {
  const std::string_view where = call.where;
  NormBackward p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  p.centre = CentreOf(options);
  TE_ASSIGN_OR_RETURN(dy, TakeArray(where, "dy", call.own[0], extent.size(), p.k));
  TE_ASSIGN_OR_RETURN(x, TakeArray(where, "x", call.own[1], extent.size(), p.k));
  TE_ASSIGN_OR_RETURN(gamma, TakeArray(where, "gamma", call.own[2], p.k, p.k));
  TE_ASSIGN_OR_RETURN(rstd, Floats(where, "rstd", call.own.back(), p.m));
  p.dy = dy;
  p.x = x;
  p.gamma = gamma;
  p.rstd = rstd;
  if (options.layernorm) {
    TE_ASSIGN_OR_RETURN(mean, Floats(where, "mean", call.own[3], p.m));
    p.mean = mean;
  }
  return p;
}

// Splits the workspace: dx, where the call has codes but no h, and then the partial sums, which
// decide by their room how many groups of rows there are.
ffi::Error TakeScratch(const FusedCall& call, NormBackward* p) {
  const int64_t bytes = call.scaling == Scaling::kNone || call.has.h
                            ? 0
                            : (p->m * p->k * call.Bytes() + 255) / 256 * 256;
  p->dx = bytes == 0 ? call.h : call.workspace;
  const int64_t sums = p->mean == nullptr ? 1 : 2;
  const int64_t left = call.workspace_bytes - bytes;
  const int64_t row = sums * p->k * int64_t{sizeof(float)};
  const int64_t groups = row == 0 ? 1 : left / row;
  if (left < 0 || (groups <= 0 && p->m > 0)) {
    return Invalid(call.where, "workspace", "hold dx and the partial sums",
                   std::to_string(call.workspace_bytes) + " bytes", kReport);
  }
  p->group_rows = p->m == 0 ? 1 : (p->m + groups - 1) / groups;
  p->dgamma = reinterpret_cast<float*>(call.workspace + bytes);
  return ffi::Error::Success();
}

cudaError_t LaunchGroups(cudaStream_t stream, void (*kernel)(NormBackward), unsigned groups,
                         int threads, int bytes, const NormBackward& p) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  kernel<<<groups, static_cast<unsigned>(threads), static_cast<size_t>(bytes), stream>>>(p);
  return cudaGetLastError();
}

ffi::Error RunBackward(std::string_view where, cudaStream_t stream, const NormBackward& p,
                       Float dtype, unsigned groups) {
  cudaError_t status = cudaSuccess;
  const bool aligned = p.dy.aligned && p.x.aligned && p.dx_aligned;
  WithTypes(p.x.dtype == p.dy.dtype ? p.x.dtype : Float::kF32, dtype, [&](auto in, auto out) {
    constexpr Float kIn = decltype(in)::value;
    constexpr Float kOut = decltype(out)::value;
    WithTeam(p.k, [&](auto threads, auto loop) {
      constexpr int kThreads = decltype(threads)::value;
      constexpr int kBlock = Team<kThreads>::kBlock;
      constexpr bool kLoop = decltype(loop)::value;
      if constexpr (kIn == kOut && kOut != Float::kF32 && kThreads <= 256) {
        if (aligned) {
          status = LaunchGroups(stream, NormBackwardAheadKernel<kOut, kThreads>, groups, kBlock,
                                RowsAhead<kOut, kThreads>::kBytes, p);
          return;
        }
      }
      status = LaunchGroups(stream, NormBackwardKernel<kIn, kOut, kThreads, kLoop>, groups, kBlock,
                            kLoop ? 0 : SharedSums<kThreads>::kBytes, p);
    });
  });
  return CudaStatus(where, status);
}

// Quantizes dx, which lies in memory.
ffi::Error QuantizeDx(cudaStream_t stream, const FusedCall& call, const void* dx, Outputs out) {
  out.h = nullptr;
  return WithFloat(call.dtype, [&](auto type) {
    using Source = Identity<decltype(type)::value, true>;
    return RunFused(stream, call, Source{dx, out.k}, out);
  });
}

ffi::Error NormBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "norm_bwd";
  TE_ASSIGN_OR_RETURN(options, ReadNormOptions(kWhere, attrs));
  const size_t n_own = options.layernorm ? 5 : 4;
  FusedCall call;
  TE_RETURN_IF_ERROR(
      ReadFused(kWhere, args, rets, attrs, n_own, n_own - 3, Workspace::kAlways, &call));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, call.own[1], options.k_ndim));
  TE_ASSIGN_OR_RETURN(p, ReadBackward(call, options, extent));
  TE_ASSIGN_OR_RETURN(dgamma, Floats(kWhere, "dgamma", call.extras[0], p.k));
  TE_ASSIGN_OR_RETURN(dbeta, Floats(kWhere, "dbeta", call.extras.back(), p.k));
  TE_RETURN_IF_ERROR(TakeScratch(call, &p));
  Outputs out;
  TE_RETURN_IF_ERROR(Describe(stream, call, FusedShape{p.m, 1, p.k}, {p.dx}, &out));
  if (p.k == 0) return ffi::Error::Success();
  const int64_t groups = (p.m + p.group_rows - 1) / p.group_rows;
  if (options.layernorm) p.dbeta = p.dgamma + groups * p.k;
  p.noop = out.noop;
  p.dx_aligned = p.k % kPack == 0 && AlignedTo(p.dx, 16);
  const bool codes = call.scaling != Scaling::kNone;
  if (!codes) {
    TE_RETURN_IF_ERROR(ClearAmax(stream, call, out));
    p.amax = out.amax;
  }
  if (groups > 0) {
    TE_RETURN_IF_ERROR(RunBackward(kWhere, stream, p, call.dtype, static_cast<unsigned>(groups)));
  }
  const dim3 blocks(Blocks(p.k, kJoinColumns), options.layernorm ? 2 : 1);
  JoinSumsKernel<<<blocks, kJoinThreads, 0, stream>>>(p, groups, dgamma, dbeta);
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetLastError()));
  return codes ? QuantizeDx(stream, call, p.dx, out) : ffi::Error::Success();
}

}  // namespace

// Operands: [noop] dy [M.. K..] x [M.. K..] gamma [K..] [mean] rstd [scale] [previous results];
// results: see common/fused.h with h = dx, then dgamma f32[K..] [dbeta f32[K..], layernorm] and
// scratch memory.
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormBwd, NormBwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
