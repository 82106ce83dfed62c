// FFI handlers of amax and amax_to_scale on CUDA: check, describe, configure, launch.
#include "cuda/kernels/amax.cuh"
#include "cuda/launch.h"
#include "cuda/scale_rule.h"

namespace te_flax::cuda {
namespace {

ffi::Error AmaxImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax) {
  constexpr std::string_view kWhere = "amax";
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", *amax, ffi::DataType::F32, 2));
  const auto n = static_cast<int64_t>(x.element_count());
  auto* result = static_cast<uint32_t*>(amax->untyped_data());
  if (n == 0) return Clear(kWhere, stream, nullptr, result, 2 * sizeof(float));
  return WithFloat(dtype, [&](auto type) {
    const void* from = x.untyped_data();
    return LaunchWithAmax(kWhere, stream, nullptr, result, kPlainRounds,
                          AmaxKernel<decltype(type)::value>, CeilDiv(n, kFlatPerBlock),
                          kFlatThreads, from, n, AlignedTo(from, 16), result);
  });
}

ffi::ErrorOr<ScaleRule> ReadRule(std::string_view where, const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(format, Attr<std::string_view>(where, attrs, "format"));
  TE_ASSIGN_OR_RETURN(margin, Attr<int64_t>(where, attrs, "margin"));
  TE_ASSIGN_OR_RETURN(power_of_2, Attr<bool>(where, attrs, "power_of_2"));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(where, attrs, "epsilon"));
  return MakeScaleRule(where, format, margin, power_of_2, epsilon);
}

ffi::Error AmaxToScaleImpl(cudaStream_t stream, ffi::AnyBuffer amax,
                           ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> scale_inv,
                           ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "amax_to_scale";
  TE_ASSIGN_OR_RETURN(rule, ReadRule(kWhere, attrs));
  const auto n = static_cast<int64_t>(amax.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", amax, ffi::DataType::F32, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", *scale, ffi::DataType::F32, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", *scale_inv, ffi::DataType::F32, n));
  if (n == 0) return ffi::Error::Success();
  constexpr int kThreads = 128;
  AmaxToScaleKernel<kThreads><<<Blocks(n, kThreads, kMaxFlatBlocks), kThreads, 0, stream>>>(
      amax.typed_data<float>(), n, rule, scale->typed_data<float>(),
      scale_inv->typed_data<float>());
  return CudaStatus(kWhere, cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Amax, AmaxImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x [D..]
                                  .Ret<ffi::AnyBuffer>(),  // amax f32[2]
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(AmaxToScale, AmaxToScaleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // amax f32[B..]
                                  .Ret<ffi::AnyBuffer>()  // scale f32[B..]
                                  .Ret<ffi::AnyBuffer>()  // scale_inv f32[B..]
                                  .Attrs(),               // format, margin, power_of_2, epsilon
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
