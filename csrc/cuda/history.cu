// FFI handlers of the amax histories on CUDA: their scales, and what is pushed in front.
#include <cmath>

#include "cuda/kernels/history.cuh"
#include "cuda/launch.h"
#include "cuda/scale_rule.h"

namespace te_flax::cuda {
namespace {

// Entries, and their length, of an array of histories [n.., length].
ffi::ErrorOr<Extent> HistoriesOf(std::string_view where, std::string_view name,
                                 const ffi::AnyBuffer& histories) {
  TE_ASSIGN_OR_RETURN(extent, AsExtent(where, histories, 1));
  TE_RETURN_IF_ERROR(CheckCount(where, name, histories, ffi::DataType::F32, extent.size()));
  if (extent.rows > kMaxEntries) {
    return ffi::Unexpected(Invalid(where, name,
                                   "have at most " + std::to_string(kMaxEntries) + " entries",
                                   std::to_string(extent.rows), kReport));
  }
  return extent;
}

ffi::Error HistoryToScaleImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                              ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "history_to_scale";
  constexpr std::string_view kFormats[] = {"x_format", "kernel_format", "dy_format"};
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, 3, 6));
  TE_ASSIGN_OR_RETURN(margin, Attr<int64_t>(kWhere, attrs, "margin"));
  TE_ASSIGN_OR_RETURN(window, Attr<int64_t>(kWhere, attrs, "window"));
  TE_ASSIGN_OR_RETURN(extent, HistoriesOf(kWhere, "x", all.args[0]));
  HistoryToScaleCall p = {};
  p.length = extent.cols;
  p.window = window;
  for (size_t i = 0; i < 3; ++i) {
    TE_ASSIGN_OR_RETURN(format, Attr<std::string_view>(kWhere, attrs, kFormats[i]));
    TE_ASSIGN_OR_RETURN(rule, MakeScaleRule(kWhere, format, margin, false, 0.0f));
    TE_RETURN_IF_ERROR(
        CheckCount(kWhere, kFormats[i], all.args[i], ffi::DataType::F32, extent.size()));
    for (size_t j = 0; j < 2; ++j) {
      TE_RETURN_IF_ERROR(
          CheckCount(kWhere, "scale", all.rets[2 * i + j], ffi::DataType::F32, extent.rows));
    }
    p.operands[i] = {all.args[i].typed_data<float>(), all.rets[2 * i].typed_data<float>(),
                     all.rets[2 * i + 1].typed_data<float>(), rule};
  }
  if (window < 1 || window > extent.cols) {
    return Invalid(kWhere, "window", "be in 1.." + std::to_string(extent.cols),
                   std::to_string(window), kReport);
  }
  if (extent.rows == 0) return ffi::Error::Success();
  const dim3 grid(3, static_cast<unsigned>(extent.rows));
  HistoryToScaleKernel<<<grid, kHistoryThreads, 0, stream>>>(p);
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error PushAmaxesImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                          ffi::AnyBuffer nonfinite, ffi::AnyBuffer x_amax,
                          ffi::AnyBuffer kernel_amax, ffi::Result<ffi::AnyBuffer> new_x,
                          ffi::Result<ffi::AnyBuffer> new_kernel,
                          ffi::Result<ffi::AnyBuffer> new_nonfinite) {
  constexpr std::string_view kWhere = "push_amaxes";
  TE_ASSIGN_OR_RETURN(extent, HistoriesOf(kWhere, "x", x));
  for (const ffi::AnyBuffer& history : {kernel, *new_x, *new_kernel}) {
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "history", history, ffi::DataType::F32, extent.size()));
  }
  for (const ffi::AnyBuffer& amax : {x_amax, kernel_amax}) {
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", amax, ffi::DataType::F32, 2 * extent.rows));
  }
  for (const ffi::AnyBuffer& count : {nonfinite, *new_nonfinite}) {
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "nonfinite", count, ffi::DataType::S32, extent.rows));
  }
  if (extent.rows == 0) return ffi::Error::Success();
  const PushAmaxesCall p = {{x.typed_data<float>(), kernel.typed_data<float>()},
                            {new_x->typed_data<float>(), new_kernel->typed_data<float>()},
                            {x_amax.typed_data<float>(), kernel_amax.typed_data<float>()},
                            nonfinite.typed_data<int32_t>(),
                            new_nonfinite->typed_data<int32_t>(),
                            extent.cols};
  const dim3 grid(2, static_cast<unsigned>(extent.rows));
  PushAmaxesKernel<<<grid, kHistoryThreads, 0, stream>>>(p);
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error PushLetterImpl(cudaStream_t stream, ffi::AnyBuffer letter, ffi::AnyBuffer history,
                          ffi::AnyBuffer nonfinite, ffi::Result<ffi::AnyBuffer> new_history,
                          ffi::Result<ffi::AnyBuffer> new_nonfinite) {
  constexpr std::string_view kWhere = "push_letter";
  TE_ASSIGN_OR_RETURN(extent, HistoriesOf(kWhere, "history", history));
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, "letter", letter, ffi::DataType::F32, int64_t{kLetterSize} * extent.rows));
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, "new_history", *new_history, ffi::DataType::F32, extent.size()));
  for (const ffi::AnyBuffer& count : {nonfinite, *new_nonfinite}) {
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "nonfinite", count, ffi::DataType::S32, extent.rows));
  }
  if (extent.rows == 0) return ffi::Error::Success();
  const PushLetterCall p = {letter.typed_data<float>(),           history.typed_data<float>(),
                            new_history->typed_data<float>(),     nonfinite.typed_data<int32_t>(),
                            new_nonfinite->typed_data<int32_t>(), extent.cols};
  PushLetterKernel<<<static_cast<unsigned>(extent.rows), kHistoryThreads, 0, stream>>>(p);
  return CudaStatus(kWhere, cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HistoryToScale, HistoryToScaleImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()  // the histories f32[B.. H] of x, kernel, dy
                                  .RemainingRets()  // scale and scale_inv f32[B..] of each
                                  .Attrs(),         // window, margin, x_format, ..
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(PushAmaxes, PushAmaxesImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x f32[B.. H]
                                  .Arg<ffi::AnyBuffer>()   // kernel f32[B.. H]
                                  .Arg<ffi::AnyBuffer>()   // nonfinite s32[B..]
                                  .Arg<ffi::AnyBuffer>()   // x_amax f32[B.. 2]
                                  .Arg<ffi::AnyBuffer>()   // kernel_amax f32[B.. 2]
                                  .Ret<ffi::AnyBuffer>()   // new_x
                                  .Ret<ffi::AnyBuffer>()   // new_kernel
                                  .Ret<ffi::AnyBuffer>(),  // new_nonfinite
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(PushLetter, PushLetterImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // letter f32[B.. 279]
                                  .Arg<ffi::AnyBuffer>()   // history f32[B.. H]
                                  .Arg<ffi::AnyBuffer>()   // nonfinite s32[B..]
                                  .Ret<ffi::AnyBuffer>()   // new_history
                                  .Ret<ffi::AnyBuffer>(),  // new_nonfinite
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
