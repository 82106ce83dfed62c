// FFI handlers that turn FP8 and FP6 codes back into float32, bfloat16 or float16 on CUDA.
#include "cuda/kernels/dequantize.cuh"
#include "cuda/kernels/fp6.cuh"
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

// What the handlers of block scales share. Codes are Fp8Codes or Fp6Codes.
template <class Codes>
struct Job {
  Codes codes;
  int64_t m, k;
  Float dtype;
  void* x;
  bool aligned;
};

ffi::ErrorOr<Job<Fp8Codes>> MakeJob(std::string_view where, const ffi::AnyBuffer& data,
                                    const ffi::AnyBuffer& x, const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(format, FormatOf(where, "data", data.element_type()));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(where, data, k_ndim));
  TE_RETURN_IF_ERROR(CheckCount(where, "x", x, x.element_type(), extent.size()));
  const auto* codes = static_cast<const uint8_t*>(data.untyped_data());
  const bool aligned =
      AlignedTo(codes, 8) && AlignedTo(x.untyped_data(), 16) && extent.cols % kPack == 0;
  return Job<Fp8Codes>{
      {codes, extent.cols, format}, extent.rows, extent.cols, dtype, x.untyped_data(), aligned};
}

template <class Codes, class Scales>
ffi::Error Launch(std::string_view where, cudaStream_t stream, const Job<Codes>& job,
                  const Scales& scales) {
  if (job.m * job.k == 0) return ffi::Error::Success();
  const unsigned blocks = Blocks(job.m * ((job.k + kPack - 1) / kPack), kDequantizeThreads);
  WithFloat(job.dtype, [&](auto type) {
    DequantizeBlocksKernel<decltype(type)::value><<<blocks, kDequantizeThreads, 0, stream>>>(
        job.codes, scales, job.m, job.k, job.aligned, job.x);
  });
  return CudaStatus(where, cudaGetLastError());
}

// e8m0 scales [m, ceil(k / 32)] for axis 1 and [ceil(m / 32), k] for axis 0.
template <class Codes>
ffi::Error LaunchE8m0(std::string_view where, cudaStream_t stream, Job<Codes> job,
                      const ffi::AnyBuffer& scale, const ffi::Dictionary& attrs) {
  TE_ASSIGN_OR_RETURN(axis, Attr<int64_t>(where, attrs, "axis"));
  const int64_t across = (job.k + 31) / 32, down = (job.m + 31) / 32;
  const int64_t scales = axis == 1 ? job.m * across : down * job.k;
  TE_RETURN_IF_ERROR(CheckCount(where, "scale", scale, ffi::DataType::U8, scales));
  const auto* bytes = static_cast<const uint8_t*>(scale.untyped_data());
  if (axis == 1) return Launch(where, stream, job, Mxfp8RowScales{bytes, across});
  job.aligned = job.aligned && AlignedTo(bytes, 8);
  return Launch(where, stream, job, Mxfp8ColScales{bytes, job.k});
}

ffi::Error DequantizeMxfp8Impl(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_mxfp8";
  TE_ASSIGN_OR_RETURN(job, MakeJob(kWhere, data, *x, attrs));
  return LaunchE8m0(kWhere, stream, job, scale, attrs);
}

ffi::Error DequantizeMxfp6Impl(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_mxfp6";
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x->element_type()));
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, data, k_ndim + 1));
  const int64_t m = extent.rows, k = extent.cols / kFp6Bytes * kFp6Group;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "data", data, ffi::DataType::U8, extent.size()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, x->element_type(), m * k));
  const auto* codes = static_cast<const uint8_t*>(data.untyped_data());
  const bool aligned = AlignedTo(codes, 2) && AlignedTo(x->untyped_data(), 16) && k % kPack == 0;
  const Job<Fp6Codes> job = {{codes, k, format}, m, k, dtype, x->untyped_data(), aligned};
  return LaunchE8m0(kWhere, stream, job, scale, attrs);
}

ffi::Error DequantizeBlockImpl(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_block";
  TE_ASSIGN_OR_RETURN(rows, Attr<int64_t>(kWhere, attrs, "rows"));
  TE_ASSIGN_OR_RETURN(job, MakeJob(kWhere, data, *x, attrs));
  const int64_t across = (job.k + 127) / 128, down = (job.m + rows - 1) / rows;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", scale_inv, ffi::DataType::F32, down * across));
  const FloatScales scales = {scale_inv.typed_data<float>(), across, rows == 1 ? 0 : 7};
  return Launch(kWhere, stream, job, scales);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeMxfp6, DequantizeMxfp6Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // data u8 [M.. K.. 3]
                                  .Arg<ffi::AnyBuffer>()  // scale u8 [M.. K../8] or [M../32 K.. 4]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K.. 4]
                                  .Attrs(),               // k_ndim, format, axis (1 row, 0 col)
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeBlock, DequantizeBlockImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // data [M.. K..]
                                  .Arg<ffi::AnyBuffer>()  // scale_inv f32 [M../rows K../128]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K..]
                                  .Attrs(),               // k_ndim, rows (1 or 128)
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
