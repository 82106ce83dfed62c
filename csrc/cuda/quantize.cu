// FFI handler of the tensor-scaled quantizers on CUDA: row, col or both, with or without noop.
#include "cuda/kernels/tensor_sink.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "quantize";

// The kernel's view of one call, without noop; fails where a shape or type does not fit.
ffi::ErrorOr<Outputs> Describe(const Operands& all, bool noop, bool row, bool col, int64_t k_ndim) {
  const ffi::AnyBuffer& x = all.args[noop ? 1 : 0];
  const ffi::AnyBuffer& scale = all.args[noop ? 2 : 1];
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, x, k_ndim));
  Outputs p = {};
  p.m = extent.rows;
  p.k = extent.cols;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", scale, ffi::DataType::F32, 1));
  for (size_t i = 0; i + 1 < all.rets.size(); ++i) {
    const bool is_row = row && i == 0;
    const ffi::AnyBuffer& codes = all.rets[i];
    const std::string_view name = is_row ? "row" : "col";
    TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, name, codes.element_type()));
    TE_RETURN_IF_ERROR(CheckCount(kWhere, name, codes, codes.element_type(), extent.size()));
    (is_row ? p.row : p.col) = static_cast<uint8_t*>(codes.untyped_data());
    (is_row ? p.row_format : p.col_format) = format;
  }
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  p.scale = scale.typed_data<float>();
  p.amax = static_cast<uint32_t*>(all.rets.back().untyped_data());
  // The flat kernel's packs start at multiples of 8 elements; a tile's only if rows do.
  p.aligned = AlignedTo(x.untyped_data(), 16) && AlignedTo(p.row, 8) && (!col || p.k % kPack == 0);
  p.col_aligned = AlignedTo(p.col, 16) && p.m % 16 == 0;
  return p;
}

ffi::Error Launch(cudaStream_t stream, Float dtype, const void* x, const Outputs& p) {
  return WithFloat(dtype, [&](auto type) {
    constexpr Float kType = decltype(type)::value;
    using Source = Identity<kType, false>;
    if (p.col == nullptr) {
      return LaunchWithAmax(kWhere, stream, p.noop, p.amax, kPlainRounds, QuantizeFlatKernel<kType>,
                            CeilDiv(p.m * p.k, kFlatPerBlock), kFlatThreads, x, p);
    }
    const auto kernel = p.row == nullptr ? TensorTileKernel<Source, Copies::kCol>
                                         : TensorTileKernel<Source, Copies::kBoth>;
    return LaunchWithAmax(kWhere, stream, p.noop, p.amax, kPlainRounds, kernel, TensorTiles(p),
                          kTileThreads, Source{x, p.k}, p);
  });
}

ffi::Error QuantizeTensorImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                              ffi::Dictionary attrs) {
  const bool noop = AttrOr(attrs, "noop", false);
  const bool row = AttrOr(attrs, "row", false);
  const bool col = AttrOr(attrs, "col", false);
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  const size_t n_rets = size_t{row} + size_t{col} + 1;
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, noop ? 3 + n_rets : 2, n_rets));
  TE_ASSIGN_OR_RETURN(p, Describe(all, noop, row, col, k_ndim));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", all.args[noop ? 1 : 0].element_type()));
  if (noop) {
    TE_ASSIGN_OR_RETURN(flag, TakeNoop(kWhere, stream, all));
    p.noop = flag;
  }
  if (p.m * p.k == 0) return Clear(kWhere, stream, p.noop, p.amax, 2 * sizeof(float));
  return Launch(stream, dtype, all.args[noop ? 1 : 0].untyped_data(), p);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] scale f32[] [previous results]; results: [row [M.. K..]]
// [col [K.. M..]] amax f32[2]. Attributes: row, col, noop (bool), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeTensor, QuantizeTensorImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
