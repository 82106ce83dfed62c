// FFI handlers of the FP6 codes on CUDA: encode, decode, pack, unpack.
#include "cuda/kernels/fp6_codes.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

unsigned FlatBlocks(int64_t packs) { return Blocks(packs, kFlatThreads, kMaxFlatBlocks); }

ffi::Error Fp6EncodeImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes,
                         ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_encode";
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  const auto n = static_cast<int64_t>(x.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", *codes, ffi::DataType::U8, n));
  if (n == 0) return ffi::Error::Success();
  auto* to = static_cast<uint8_t*>(codes->untyped_data());
  const bool aligned = AlignedTo(x.untyped_data(), 16) && AlignedTo(to, 8);
  const unsigned blocks = Blocks(n, kFlatPerBlock, kMaxFlatBlocks);
  WithFloat(dtype, [&](auto type) {
    Fp6EncodeKernel<decltype(type)::value>
        <<<blocks, kFlatThreads, 0, stream>>>(x.untyped_data(), n, format, aligned, to);
  });
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error Fp6DecodeImpl(cudaStream_t stream, ffi::AnyBuffer codes, ffi::Result<ffi::AnyBuffer> x,
                         ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_decode";
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  const auto n = static_cast<int64_t>(codes.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, ffi::DataType::U8, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, ffi::DataType::F32, n));
  if (n == 0) return ffi::Error::Success();
  const auto* from = static_cast<const uint8_t*>(codes.untyped_data());
  const bool aligned = AlignedTo(from, 8) && AlignedTo(x->untyped_data(), 16);
  Fp6DecodeKernel<<<FlatBlocks(CeilDiv(n, kPack)), kFlatThreads, 0, stream>>>(
      from, n, format, aligned, static_cast<float*>(x->untyped_data()));
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error Fp6PackImpl(cudaStream_t stream, ffi::AnyBuffer codes, ffi::Result<ffi::AnyBuffer> data,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_pack";
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, codes, k_ndim));
  const int64_t bytes = extent.rows * CeilDiv(extent.cols, kFp6Group) * kFp6Bytes;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, ffi::DataType::U8, extent.size()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "data", *data, ffi::DataType::U8, bytes));
  if (bytes == 0) return ffi::Error::Success();
  const auto* from = static_cast<const uint8_t*>(codes.untyped_data());
  auto* to = static_cast<uint8_t*>(data->untyped_data());
  const bool aligned = AlignedTo(from, 8) && AlignedTo(to, 8) && extent.cols % kPack == 0;
  const int64_t packs = extent.rows * CeilDiv(extent.cols, kPack);
  Fp6PackKernel<<<FlatBlocks(packs), kFlatThreads, 0, stream>>>(from, extent.rows, extent.cols,
                                                                aligned, to);
  return CudaStatus(kWhere, cudaGetLastError());
}

ffi::Error Fp6UnpackImpl(cudaStream_t stream, ffi::AnyBuffer data,
                         ffi::Result<ffi::AnyBuffer> codes, ffi::Dictionary) {
  constexpr std::string_view kWhere = "fp6_unpack";
  const auto n = static_cast<int64_t>(codes->element_count());
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, "data", data, ffi::DataType::U8, n / kFp6Group * kFp6Bytes));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", *codes, ffi::DataType::U8, n));
  if (n == 0) return ffi::Error::Success();
  const auto* from = static_cast<const uint8_t*>(data.untyped_data());
  auto* to = static_cast<uint8_t*>(codes->untyped_data());
  const bool aligned = AlignedTo(from, 8) && AlignedTo(to, 8);
  Fp6UnpackKernel<<<FlatBlocks(CeilDiv(n, kPack)), kFlatThreads, 0, stream>>>(from, n, aligned, to);
  return CudaStatus(kWhere, cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Encode, Fp6EncodeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x [D..]
                                  .Ret<ffi::AnyBuffer>()  // codes u8 [D..]
                                  .Attrs(),               // format
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Decode, Fp6DecodeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [D..]
                                  .Ret<ffi::AnyBuffer>()  // x f32 [D..]
                                  .Attrs(),               // format
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Pack, Fp6PackImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [M.. K..]
                                  .Ret<ffi::AnyBuffer>()  // data u8 [M.. K../4 3]
                                  .Attrs(),               // k_ndim
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Unpack, Fp6UnpackImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // data u8 [M.. K.. 3]
                                  .Ret<ffi::AnyBuffer>()  // codes u8 [M.. K.. 4]
                                  .Attrs(),               // k_ndim
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
