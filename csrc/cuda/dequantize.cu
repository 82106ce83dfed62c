// FFI handlers that turn FP8 codes back into float32, bfloat16 or float16 on CUDA.
#include "cuda/kernels/dequantize.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

ffi::Error DequantizeTensorImpl(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                                ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary) {
  constexpr std::string_view kWhere = "dequantize";
  TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, "data", data.element_type()));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x->element_type()));
  const auto n = static_cast<int64_t>(data.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", scale_inv, ffi::DataType::F32, 1));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, x->element_type(), n));
  if (n == 0) return ffi::Error::Success();
  const auto* codes = static_cast<const uint8_t*>(data.untyped_data());
  const bool aligned = AlignedTo(codes, 8) && AlignedTo(x->untyped_data(), 16);
  const unsigned blocks = Blocks(n, int64_t{kDequantizeThreads} * kPack);
  WithFloat(dtype, [&](auto type) {
    DequantizeKernel<decltype(type)::value><<<blocks, kDequantizeThreads, 0, stream>>>(
        codes, scale_inv.typed_data<float>(), n, format, aligned, x->untyped_data());
  });
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error DequantizeMxfp8Impl(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_mxfp8";
  TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, "data", data.element_type()));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x->element_type()));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(axis, Attr<int64_t>(kWhere, attrs, "axis"));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, data, k_ndim));
  const int64_t m = extent.rows, k = extent.cols;
  const int64_t scales = axis == 1 ? m * ((k + 31) / 32) : (m + 31) / 32 * k;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", scale, ffi::DataType::U8, scales));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, x->element_type(), m * k));
  if (m * k == 0) return ffi::Error::Success();
  const auto* codes = static_cast<const uint8_t*>(data.untyped_data());
  const auto* bytes = static_cast<const uint8_t*>(scale.untyped_data());
  const bool aligned = AlignedTo(codes, 8) && AlignedTo(bytes, 8) &&
                       AlignedTo(x->untyped_data(), 16) && k % kPack == 0;
  const unsigned blocks = Blocks(m * ((k + kPack - 1) / kPack), kDequantizeThreads);
  WithFloat(dtype, [&](auto type) {
    constexpr Float kType = decltype(type)::value;
    if (axis == 1) {
      DequantizeMxfp8Kernel<kType, false><<<blocks, kDequantizeThreads, 0, stream>>>(
          codes, bytes, m, k, format, aligned, x->untyped_data());
    } else {
      DequantizeMxfp8Kernel<kType, true><<<blocks, kDequantizeThreads, 0, stream>>>(
          codes, bytes, m, k, format, aligned, x->untyped_data());
    }
  });
  return CudaStatus(kWhere, cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeTensor, DequantizeTensorImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // data [D..]
                                  .Arg<ffi::AnyBuffer>()  // scale_inv f32[]
                                  .Ret<ffi::AnyBuffer>()  // x [D..]
                                  .Attrs(),               // out_dtype: x has it
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeMxfp8, DequantizeMxfp8Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // data [M.. K..]
                                  .Arg<ffi::AnyBuffer>()  // scale u8 [M.. K../32] or [M../32 K..]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K..]
                                  .Attrs(),               // k_ndim, axis (1 row, 0 col)
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
