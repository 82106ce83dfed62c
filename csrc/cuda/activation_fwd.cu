// FFI handler of the activations on CUDA, with what is fused behind them.
#include "cuda/activation.h"

namespace te_flax::cuda {

namespace {

ffi::Error ActFwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_fwd";
  FusedCall call;
  TE_RETURN_IF_ERROR(ReadFused(kWhere, args, rets, attrs, 1, 0, Workspace::kNever, &call));
  TE_ASSIGN_OR_RETURN(x, ReadActivation(kWhere, call.own[0], attrs));
  Outputs out;
  TE_RETURN_IF_ERROR(Describe(stream, call, {x.rows, 1, x.cols}, {x.x}, &out));
  return RunTyped<ActivationForward, KnownGelu, KnownSwiglu>(stream, call, InputOf(x), out);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. A K..] [scale f32[]] [previous results]; results: see
// common/fused.h.
XLA_FFI_DEFINE_HANDLER_SYMBOL(ActFwd, ActFwdImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
