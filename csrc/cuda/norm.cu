// FFI handlers of LayerNorm and RMSNorm on CUDA, forward and backward, with fused quantization.
#include "cuda/fused.h"
#include "cuda/kernels/norm.cuh"
#include "cuda/kernels/norm_backward.cuh"

namespace te_flax::cuda {
namespace {

// The attributes of both directions.
struct Options {
  bool layernorm;
  float centre;  // added to gamma; -0 changes nothing
  int64_t k_ndim;
};

ffi::ErrorOr<Options> ReadOptions(std::string_view where, const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(kind, Attr<std::string_view>(where, attrs, "kind"));
  TE_ASSIGN_OR_RETURN(zero_centered, Attr<bool>(where, attrs, "zero_centered_gamma"));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  if (kind != "layernorm" && kind != "rmsnorm") {
    return ffi::Unexpected(Invalid(where, "kind", "be layernorm or rmsnorm", kind, kReport));
  }
  return Options{kind == "layernorm", zero_centered ? 1.0f : -0.0f, k_ndim};
}

// An operand of `count` elements, in rows of k.
ffi::ErrorOr<Array> TakeArray(std::string_view where, std::string_view name,
                              const ffi::AnyBuffer& buffer, int64_t count, int64_t k) {
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, name, buffer.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, buffer.element_type(), count));
  const bool whole_rows = count == k || k % kPack == 0;
  return Array{buffer.untyped_data(), dtype, whole_rows && AlignedTo(buffer.untyped_data(), 16)};
}

ffi::ErrorOr<float*> Floats(std::string_view where, std::string_view name,
                            const ffi::AnyBuffer& buffer, int64_t count) {
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, ffi::DataType::F32, count));
  return Data<float>(buffer);
}

// Calls fn with the type that kernels read arrays of type `in` as, and that of h. Arrays of other
// types than h are read as float32.
template <typename Fn>
void WithTypes(Float in, Float out, Fn fn) {
  WithFloat(out, [&](auto type) {
    if (in == out) return fn(type, type);
    fn(std::integral_constant<Float, Float::kF32>(), type);
  });
}

// Calls fn with the number of threads that share a row, and whether these hold less than a row.
template <typename Fn>
void WithTeam(int64_t k, Fn fn) {
  constexpr std::false_type kHolds;
  if (k <= kSlice) return fn(std::integral_constant<int, 32>(), kHolds);
  if (k <= 2 * kSlice) return fn(std::integral_constant<int, 64>(), kHolds);
  if (k <= 4 * kSlice) return fn(std::integral_constant<int, 128>(), kHolds);
  if (k <= 8 * kSlice) return fn(std::integral_constant<int, 256>(), kHolds);
  if (k <= 16 * kSlice) return fn(std::integral_constant<int, 512>(), kHolds);
  fn(std::integral_constant<int, 512>(), std::true_type());
}

// Statistics and, where p.h is not null, h.
ffi::Error RunRows(std::string_view where, cudaStream_t stream, const NormForward& p, Float dtype) {
  if (p.m == 0) return ffi::Error::Success();
  WithTypes(p.x.dtype, dtype, [&](auto in, auto out) {
    WithTeam(p.k, [&](auto threads, auto loop) {
      using Rows = Team<decltype(threads)::value>;
      NormRowsKernel<decltype(in)::value, decltype(out)::value, decltype(threads)::value,
                     decltype(loop)::value>
          <<<Blocks(p.m, Rows::kRows), Rows::kBlock, 0, stream>>>(p);
    });
  });
  return CudaStatus(where, cudaGetLastError());
}

ffi::ErrorOr<NormForward> ReadForward(const FusedCall& call, const Options& options, float epsilon,
                                      Extent extent) {
  const std::string_view where = call.where;
  NormForward p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  p.epsilon = epsilon >= 0x1p-126f ? epsilon : 0.0f;
  p.centre = options.centre;
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
  TE_ASSIGN_OR_RETURN(options, ReadOptions(kWhere, attrs));
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
  p.noop = out.noop;
  if (call.scaling == Scaling::kNone) {
    p.h = out.h;
    p.h_aligned = out.aligned;
    p.amax = out.amax;
    return RunRows(kWhere, stream, p, call.dtype);
  }
  TE_RETURN_IF_ERROR(RunRows(kWhere, stream, p, call.dtype));
  ffi::Error error = ffi::Error::Success();
  WithTypes(p.x.dtype, call.dtype, [&](auto in, auto h) {
    using Source = NormSource<decltype(in)::value, decltype(h)::value>;
    error = RunFused(stream, call, Source{p}, out);
  });
  return error;
}

ffi::ErrorOr<NormBackward> ReadBackward(const FusedCall& call, const Options& options,
                                        Extent extent) {
  const std::string_view where = call.where;
  NormBackward p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  p.centre = options.centre;
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
  const int64_t bytes = call.scaling == Scaling::kNone || call.h != nullptr
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

ffi::Error RunBackward(std::string_view where, cudaStream_t stream, const NormBackward& p,
                       Float dtype, unsigned groups) {
  cudaError_t status = cudaSuccess;
  WithTypes(p.x.dtype == p.dy.dtype ? p.x.dtype : Float::kF32, dtype, [&](auto in, auto out) {
    WithTeam(p.k, [&](auto threads, auto loop) {
      constexpr int kThreads = decltype(threads)::value;
      constexpr bool kLoop = decltype(loop)::value;
      constexpr int kBytes = kLoop ? 0 : SharedSums<kThreads>::kBytes;
      const auto kernel =
          NormBackwardKernel<decltype(in)::value, decltype(out)::value, kThreads, kLoop>;
      status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      if (status != cudaSuccess) return;
      kernel<<<groups, Team<kThreads>::kBlock, kBytes, stream>>>(p);
      status = cudaGetLastError();
    });
  });
  return CudaStatus(where, status);
}

// Quantizes dx, which lies in memory.
ffi::Error QuantizeDx(cudaStream_t stream, const FusedCall& call, const void* dx, Outputs out) {
  out.h = nullptr;
  ffi::Error error = ffi::Error::Success();
  WithFloat(call.dtype, [&](auto type) {
    using Source = Identity<decltype(type)::value, true>;
    error = RunFused(stream, call, Source{dx, out.k}, out);
  });
  return error;
}

ffi::Error NormBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "norm_bwd";
  TE_ASSIGN_OR_RETURN(options, ReadOptions(kWhere, attrs));
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
  if (!codes) p.amax = out.amax;
  if (groups > 0) {
    TE_RETURN_IF_ERROR(RunBackward(kWhere, stream, p, call.dtype, static_cast<unsigned>(groups)));
  }
  TE_RETURN_IF_ERROR(JoinSums(kWhere, stream, out.noop, p.dgamma, groups, p.k, dgamma));
  if (options.layernorm) {
    TE_RETURN_IF_ERROR(JoinSums(kWhere, stream, out.noop, p.dbeta, groups, p.k, dbeta));
  }
  return codes ? QuantizeDx(stream, call, p.dx, out) : ffi::Error::Success();
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
