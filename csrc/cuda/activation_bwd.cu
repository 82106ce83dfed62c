// FFI handler of the activations' cotangents on CUDA, with what is fused behind them.
#include "cuda/activation.h"

namespace te_flax::cuda {
namespace {

template <Float dtype, bool kWide, class Case>
using PlainBackward = ActivationBackward<dtype, kWide, 1, Case>;

ffi::Error ActBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_bwd";
  FusedCall call;
  TE_RETURN_IF_ERROR(ReadFused(kWhere, args, rets, attrs, 2, 0, Workspace::kForSums, &call));
  TE_ASSIGN_OR_RETURN(x, ReadActivation(kWhere, call.own[1], attrs));
  const ffi::AnyBuffer& dy = call.own[0];
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "dy", dy.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "dy", dy, dy.element_type(), x.rows * x.cols));
  ActivationInput in = InputOf(x);
  in.dy_dtype = dtype;
  in.dy = dy.untyped_data();
  const FusedShape shape = {x.rows, x.slices, x.cols};
  if (x.slices == 2) return RunGatedBackward(stream, call, shape, in);
  Outputs out;
  TE_RETURN_IF_ERROR(Describe(stream, call, shape, {in.x, in.dy}, &out));
  return RunTyped<PlainBackward, KnownGelu>(stream, call, in, out);
}

}  // namespace

// Operands: [noop f32[1]] dy [M.. K..] x [M.. A K..] [scale f32[]] [previous results]; results: see
// common/fused.h, h is [M.. A K..].
XLA_FFI_DEFINE_HANDLER_SYMBOL(ActBwd, ActBwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
