// Launches of the cotangents of gated activations on CUDA.
#include "cuda/activation.h"

namespace te_flax::cuda {
namespace {

template <Float dtype, bool kWide, class Case>
using GatedBackward = ActivationBackward<dtype, kWide, 2, Case>;

}  // namespace

ffi::Error RunGatedBackward(cudaStream_t stream, const FusedCall& call, const FusedShape& shape,
                            const ActivationInput& in) {
  Outputs out;
  const bool fits = shape.cols % kMxBlock == 0 && call.dtype != Float::kF32;
  if (call.scaling != Scaling::kMxfp8 || fits) {
    TE_RETURN_IF_ERROR(Describe(stream, call, shape, {in.x, in.dy}, &out));
    return RunTyped<GatedBackward, KnownSwiglu>(stream, call, in, out);
  }
  TE_RETURN_IF_ERROR(Describe(stream, call, {shape.rows, 1, shape.Width()}, {}, &out));
  return WithFloat(call.dtype, [&](auto type) {
    return RunMxfp8(stream, call, StraddlingBackward<decltype(type)::value>{in}, out);
  });
}

}  // namespace te_flax::cuda
