// The launches of the activations; each lies in a file of its own, for they take long to compile.
#ifndef TE_FLAX_CUDA_ACTIVATION_H_
#define TE_FLAX_CUDA_ACTIVATION_H_

#include "common/activation.h"
#include "cuda/fused.h"
#include "cuda/kernels/activation_source.cuh"

namespace te_flax::cuda {

inline ActivationInput InputOf(const ActivationCall& x) {
  return {x.activation, x.slices, {x.limit, x.alpha, x.offset}, x.cols, x.dtype, x.x, {}, nullptr};
}

// Both cotangents of a gated activation.
ffi::Error RunGatedBackward(cudaStream_t stream, const FusedCall& call, const FusedShape& shape,
                            const ActivationInput& in);

// The activations that have kernels of their own.
using KnownGelu = Known<Activation::kGelu, 1, Float::kBf16>;
using KnownSwiglu = Known<Activation::kSilu, 2, Float::kBf16>;

// Runs Source<dtype of h, whether an operand may be float32, what is known>, made of `in`; the
// first of `Cases` that fits is known.
template <template <Float, bool, class> class Source, class... Cases>
ffi::Error RunTyped(cudaStream_t stream, const FusedCall& call, const ActivationInput& in,
                    const Outputs& out) {
  ffi::Error error;
  const auto run = [&](auto known) {
    using Case = decltype(known);
    if (!out.Whole() || call.dtype != Case::kType || !Case::Fits(in)) return false;
    error = RunFused(stream, call, Source<Case::kType, false, Case>{in}, out);
    return true;
  };
  if ((run(Cases()) || ...)) return error;
  const bool wide = in.x_dtype == Float::kF32 || (in.dy != nullptr && in.dy_dtype == Float::kF32);
  return WithFloat(call.dtype, [&](auto type) {
    constexpr Float kType = decltype(type)::value;
    if constexpr (kType != Float::kF32) {
      if (!wide) return RunFused(stream, call, Source<kType, false, AtRunTime>{in}, out);
    }
    return RunFused(stream, call, Source<kType, true, AtRunTime>{in}, out);
  });
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_ACTIVATION_H_
