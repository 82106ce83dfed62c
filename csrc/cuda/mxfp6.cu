// FFI handler of the MXFP6 quantizers on CUDA: row, col or both, noop.
#include "cuda/kernels/mxfp6_sink.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "quantize_mxfp6";

// Data and scales of one copy, results `next` and `next` + 1.
ffi::Error CheckCopy(const Operands& all, size_t next, const Outputs& p, int64_t scales) {
  const int64_t bytes = p.m * CeilDiv(p.k, kFp6Group) * kFp6Bytes;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", all.rets[next], ffi::DataType::U8, bytes));
  return CheckCount(kWhere, "scales", all.rets[next + 1], ffi::DataType::U8, scales);
}

ffi::Error Describe(const Operands& all, const ffi::Dictionary& attrs, const void* x, bool row,
                    bool col, Outputs* p) {
  const auto bytes = [&](size_t i) { return static_cast<uint8_t*>(all.rets[i].untyped_data()); };
  if (row) {
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "row_format", attrs));
    TE_RETURN_IF_ERROR(CheckCopy(all, 0, *p, p->m * CeilDiv(p->k, kMxBlock)));
    p->row_format = format;
    p->row = bytes(0);
    p->row_scale = bytes(1);
  }
  if (col) {
    const size_t next = row ? 2 : 0;
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "col_format", attrs));
    TE_RETURN_IF_ERROR(CheckCopy(all, next, *p, CeilDiv(p->m, kMxBlock) * p->k));
    p->col_format = format;
    p->col = bytes(next);
    p->col_scale = bytes(next + 1);
  }
  p->aligned = AlignedTo(x, 16) && AlignedTo(p->row, 16) && AlignedTo(p->col, 16) &&
               AlignedTo(p->col_scale, 8) && p->k % kPack == 0;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  p->amax = static_cast<uint32_t*>(all.rets.back().untyped_data());
  return ffi::Error::Success();
}

ffi::Error Launch(cudaStream_t stream, Float dtype, const void* x, const Outputs& p) {
  return WithFloat(dtype, [&](auto type) {
    using Source = Identity<decltype(type)::value, false>;
    auto kernel = Mxfp6Kernel<Source, Copies::kBoth>;
    if (p.col == nullptr) {
      kernel = Mxfp6Kernel<Source, Copies::kRow>;
    } else if (p.row == nullptr) {
      kernel = Mxfp6Kernel<Source, Copies::kCol>;
    }
    return LaunchWithAmax(kWhere, stream, p.noop, p.amax, 1, kernel, Mxfp8Groups<Source>(p),
                          Mxfp8Shape<Source>::kThreads, Source{x, p.k}, p);
  });
}

ffi::Error QuantizeMxfp6Impl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, ReadMxCall(kWhere, args, rets, attrs));
  const ffi::AnyBuffer& x = call.x();
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, x, call.k_ndim));
  Outputs p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  if (call.noop) {
    TE_ASSIGN_OR_RETURN(flag, TakeNoop(kWhere, stream, call.all));
    p.noop = flag;
  }
  TE_RETURN_IF_ERROR(Describe(call.all, attrs, x.untyped_data(), call.row, call.col, &p));
  if (p.m * p.k == 0) return Clear(kWhere, stream, p.noop, p.amax, 2 * sizeof(float));
  return Launch(stream, dtype, x.untyped_data(), p);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row u8 [M.. K../4 3],
// row_scale] [col likewise, col_scale] amax f32[2]. Attributes: row, col, noop (bool), k_ndim
// (int64), row_format, col_format.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeMxfp6, QuantizeMxfp6Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
