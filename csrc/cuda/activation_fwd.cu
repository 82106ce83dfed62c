// FFI handler of the activations on CUDA, with what is fused behind them.
#include "cuda/activation.h"

namespace te_flax::cuda {

ffi::Error RunForward(cudaStream_t stream, const FusedCall& call, const FusedShape& shape,
                      const ActivationInput& in) {
  Outputs out;
  TE_RETURN_IF_ERROR(Describe(stream, call, shape, {in.x}, &out));
  return RunTyped<ActivationForward>(stream, call, in, out);
}

namespace {

ffi::Error ActFwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_fwd";
  FusedCall call;
  TE_RETURN_IF_ERROR(ReadFused(kWhere, args, rets, attrs, 1, 0, Workspace::kForSums, &call));
  TE_ASSIGN_OR_RETURN(x, ReadActivation(kWhere, call.own[0], attrs));
  return RunForward(stream, call, {x.rows, 1, x.cols}, InputOf(x));
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
