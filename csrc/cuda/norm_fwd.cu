// FFI handler of LayerNorm and RMSNorm on CUDA, with fused quantization.
#include "cuda/kernels/norm_band.cuh"
#include "cuda/norm.h"

namespace te_flax::cuda {
namespace {

// Statistics and, with `results`, all that `out` asks for.
ffi::Error RunRows(std::string_view where, cudaStream_t stream, const NormForward& p, Float dtype,
                   const Outputs& out, bool results) {
  if (p.m == 0) return ffi::Error::Success();
  WithTypes(p.x.dtype, dtype, [&](auto in, auto h) {
    WithTeam(p.k, [&](auto threads, auto loop) {
      using Rows = Team<decltype(threads)::value>;
      NormRowsKernel<decltype(in)::value, decltype(h)::value, decltype(threads)::value,
                     decltype(loop)::value>
          <<<Blocks(p.m, Rows::kRows), Rows::kBlock, 0, stream>>>(p, out, results);
    });
  });
  return CudaStatus(where, cudaGetLastError());
}

// Whether NormBandKernel can make all results.
ffi::Error FitsBands(const FusedCall& call, const NormForward& p, const Outputs& out, bool* fits) {
  *fits = call.scaling == Scaling::kTensor && out.col != nullptr && p.x.dtype == call.dtype &&
          call.dtype != Float::kF32 && out.aligned && p.x.aligned && p.m > 0 &&
          p.m % kBandRows == 0 && p.k > 0 && p.k % kBandPack == 0 && p.k <= kBandBlocks * kSlice;
  if (!*fits) return ffi::Error::Success();
  int device = 0, clusters = 0;
  TE_RETURN_IF_ERROR(CudaStatus(call.where, cudaGetDevice(&device)));
  TE_RETURN_IF_ERROR(
      CudaStatus(call.where, cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device)));
  *fits = clusters != 0;
  return ffi::Error::Success();
}

ffi::Error RunBands(cudaStream_t stream, const FusedCall& call, const NormForward& p,
                    const Outputs& out) {
  const unsigned blocks = Blocks(p.k, kSlice);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(Blocks(p.m, kBandRows) * blocks);
  config.blockDim = dim3(kBandThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const auto kernel =
      call.dtype == Float::kBf16 ? NormBandKernel<Float::kBf16> : NormBandKernel<Float::kF16>;
  return CudaStatus(call.where, cudaLaunchKernelEx(&config, kernel, p, out));
}

ffi::ErrorOr<NormForward> ReadForward(const FusedCall& call, const NormOptions& options,
                                      float epsilon, Extent extent) {
  const std::string_view where = call.where;
  NormForward p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  p.epsilon = epsilon >= 0x1p-126f ? epsilon : 0.0f;
  p.centre = CentreOf(options);
  TE_ASSIGN_OR_RETURN(x, TakeArray(where, "x", call.own[0], extent.size(), p.k));
  TE_ASSIGN_OR_RETURN(gamma, TakeArray(where, "gamma", call.own[1], p.k, p.k));
  TE_ASSIGN_OR_RETURN(rstd, Floats(where, "rstd", call.extras.back(), p.m));
  p.x = x;
  p.gamma = gamma;
  p.rstd = rstd;
  if (options.layernorm) {
    TE_ASSIGN_OR_RETURN(beta, TakeArray(where, "beta", call.own[2], p.k, p.k));
    TE_ASSIGN_OR_RETURN(mean, Floats(where, "mean", call.extras[0], p.m));
    p.beta = beta;
    p.mean = mean;
  }
  return p;
}

ffi::Error NormFwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "norm_fwd";
  TE_ASSIGN_OR_RETURN(options, ReadNormOptions(kWhere, attrs));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(kWhere, attrs, "epsilon"));
  const size_t n_own = options.layernorm ? 3 : 2;
  FusedCall call;
  TE_RETURN_IF_ERROR(
      ReadFused(kWhere, args, rets, attrs, n_own, n_own - 1, Workspace::kNever, &call));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, call.own[0], options.k_ndim));
  TE_ASSIGN_OR_RETURN(p, ReadForward(call, options, epsilon, extent));
  Outputs out;
  TE_RETURN_IF_ERROR(
      Describe(stream, call, FusedShape{p.m, 1, p.k}, {call.own[0].untyped_data()}, &out));
  bool in_bands = false;
  TE_RETURN_IF_ERROR(FitsBands(call, p, out, &in_bands));
  const bool in_tiles = !in_bands && (out.col != nullptr || out.row_values);
  if (!in_tiles) TE_RETURN_IF_ERROR(ClearAmax(stream, call, out));
  if (in_bands) return RunBands(stream, call, p, out);
  TE_RETURN_IF_ERROR(RunRows(kWhere, stream, p, call.dtype, out, !in_tiles));
  if (!in_tiles) return ffi::Error::Success();
  return WithTypes(p.x.dtype, call.dtype, [&](auto in, auto h) {
    using Source = NormSource<decltype(in)::value, decltype(h)::value>;
    return RunFused(stream, call, Source{p}, out);
  });
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] gamma [K..] [beta [K..], layernorm] [scale f32[]] [previous
// results]; results: see common/fused.h, then [mean f32[M..], layernorm] rstd f32[M..]. Attributes:
// those of common/fused.h, kind, epsilon (f32), zero_centered_gamma (bool).
XLA_FFI_DEFINE_HANDLER_SYMBOL(NormFwd, NormFwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
