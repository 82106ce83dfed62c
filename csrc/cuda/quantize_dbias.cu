// FFI handler of the quantizers that also sum x over the tokens on CUDA: h is x itself.
#include "cuda/fused.h"
#include "cuda/kernels/activation_source.cuh"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "quantize_dbias";

ffi::Error QuantizeDbiasImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  FusedCall call;
  TE_RETURN_IF_ERROR(ReadFused(kWhere, args, rets, attrs, 1, 0, Workspace::kForSums, &call));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  const ffi::AnyBuffer& x = call.own[0];
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, x, k_ndim));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  const FusedShape shape = {extent.rows, 1, extent.cols};
  Outputs out;
  TE_RETURN_IF_ERROR(Describe(stream, call, shape, {x.untyped_data()}, &out));
  return WithFloat(call.dtype, [&](auto type) {
    constexpr Float kType = decltype(type)::value;
    if (dtype == kType) {
      return RunFused(stream, call, Identity<kType, true>{x.untyped_data(), out.k}, out);
    }
    return RunFused(stream, call, Rounded<kType>{dtype, x.untyped_data(), out.k}, out);
  });
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [scale f32[]] [previous results]; results: see
// common/fused.h.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeDbias, QuantizeDbiasImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
