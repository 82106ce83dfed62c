// FFI handler of the MXFP8 quantizers on CUDA: row, col or both, plain or swizzled scales, noop.
#include "cuda/kernels/mxfp8_sink.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "quantize_mxfp8";

// Bytes of the scales of `rows` rows of `blocks` blocks.
int64_t ScaleBytes(int64_t rows, int64_t blocks, bool swizzled) {
  return swizzled ? CeilDiv(rows, 128) * CeilDiv(blocks, 4) * 512 : rows * blocks;
}

// Codes and scales of one copy whose scales have `rows` rows of `blocks` blocks. Where tiles are
// not full, the scales are cleared first: padding bytes are zero.
ffi::Error TakeCopy(cudaStream_t stream, const Outputs& p, std::string_view name,
                    const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales, int64_t rows,
                    int64_t blocks) {
  const int64_t bytes = ScaleBytes(rows, blocks, p.swizzled);
  TE_RETURN_IF_ERROR(CheckCount(kWhere, name, codes, codes.element_type(), p.m * p.k));
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, std::string(name) + "_scale", scales, ffi::DataType::U8, bytes));
  if (bytes == rows * blocks) return ffi::Error::Success();
  return Clear(kWhere, stream, p.noop, scales.untyped_data(), bytes);
}

ffi::Error Describe(cudaStream_t stream, const Operands& all, const ffi::Dictionary& attrs,
                    const void* x, bool row, bool col, Outputs* p) {
  size_t next = 0;
  if (row) {
    const ffi::AnyBuffer &codes = all.rets[next], &scales = all.rets[next + 1];
    TE_ASSIGN_OR_RETURN(held, HeldBy(kWhere, "row", codes.element_type(), attrs));
    TE_RETURN_IF_ERROR(TakeCopy(stream, *p, "row", codes, scales, p->m, CeilDiv(p->k, kMxBlock)));
    p->row_format = held.format;
    p->row_values = held.values;
    p->row = static_cast<uint8_t*>(codes.untyped_data());
    p->row_scale = static_cast<uint8_t*>(scales.untyped_data());
    next += 2;
  }
  if (col) {
    const ffi::AnyBuffer &codes = all.rets[next], &scales = all.rets[next + 1];
    TE_ASSIGN_OR_RETURN(held, HeldBy(kWhere, "col", codes.element_type(), attrs));
    // Swizzled column scales are those of the transpose, [k, m / 32].
    TE_RETURN_IF_ERROR(TakeCopy(stream, *p, "col", codes, scales, p->k, CeilDiv(p->m, kMxBlock)));
    p->col_format = held.format;
    p->col_values = held.values;
    p->col = static_cast<uint8_t*>(codes.untyped_data());
    p->col_scale = static_cast<uint8_t*>(scales.untyped_data());
  }
  p->aligned = AlignedTo(x, 16) && AlignedTo(p->row, p->row_values ? 16 : 8) &&
               AlignedTo(p->col, p->col_values ? 16 : 8) && AlignedTo(p->col_scale, 8) &&
               p->k % kPack == 0;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  p->amax = static_cast<uint32_t*>(all.rets.back().untyped_data());
  return ffi::Error::Success();
}

ffi::Error Launch(cudaStream_t stream, Float dtype, const void* x, const Outputs& p) {
  return WithFloat(dtype, [&](auto type) {
    using Source = Identity<decltype(type)::value, false>;
    auto kernel = Mxfp8Kernel<Source, Copies::kBoth>;
    if (p.row_values || p.col_values) {
      kernel = Mxfp8Kernel<Source, Copies::kValues>;
    } else if (p.col == nullptr) {
      kernel = Mxfp8Kernel<Source, Copies::kRow>;
    } else if (p.row == nullptr) {
      kernel = Mxfp8Kernel<Source, Copies::kCol>;
    }
    return LaunchWithAmax(kWhere, stream, p.noop, p.amax, 1, kernel, Mxfp8Groups<Source>(p),
                          Mxfp8Shape<Source>::kThreads, Source{x, p.k}, p);
  });
}

ffi::Error QuantizeMxfp8Impl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, ReadMxCall(kWhere, args, rets, attrs));
  const ffi::AnyBuffer& x = call.x();
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, x, call.k_ndim));
  Outputs p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  p.swizzled = AttrOr(attrs, "swizzled", false);
  if (call.noop) {
    TE_ASSIGN_OR_RETURN(flag, TakeNoop(kWhere, stream, call.all));
    p.noop = flag;
  }
  TE_RETURN_IF_ERROR(Describe(stream, call.all, attrs, x.untyped_data(), call.row, call.col, &p));
  if (p.m * p.k == 0) return Clear(kWhere, stream, p.noop, p.amax, 2 * sizeof(float));
  return Launch(stream, dtype, x.untyped_data(), p);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row, row_scale] [col,
// col_scale] amax f32[2]. Attributes: row, col, swizzled, noop (bool), k_ndim (int64), and where a
// copy holds bfloat16 values row_format, col_format. The ops with such copies are
// quantize_mxfp8_values: the CPU has no handler for them.
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeMxfp8, QuantizeMxfp8Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
