// FFI handler of float32 block scaling on CUDA: 1 x 128 or 128 x 128 blocks; row, col or both;
// noop.
#include "cuda/kernels/block.cuh"
#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

constexpr std::string_view kWhere = "quantize_block";

int64_t Tiles(int64_t n) { return CeilDiv(n, kTile); }

struct Wanted {
  bool row, col, two_dimensional;

  size_t results() const {
    const size_t copies = size_t{row} + size_t{col};
    return (two_dimensional ? copies + 1 : 2 * copies) + 1;
  }
};

// Takes the results in their order, like the CPU handler.
class Results {
 public:
  explicit Results(const Operands& all) : all_(all) {}

  ffi::Error TakeCodes(int64_t count, uint8_t** to, Format* format) {
    const ffi::AnyBuffer& codes = all_.rets[next_++];
    TE_ASSIGN_OR_RETURN(found, FormatOf(kWhere, "codes", codes.element_type()));
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, codes.element_type(), count));
    *to = static_cast<uint8_t*>(codes.untyped_data());
    *format = found;
    return ffi::Error::Success();
  }

  ffi::Error TakeFloats(std::string_view name, int64_t count, float** to) {
    const ffi::AnyBuffer& floats = all_.rets[next_++];
    TE_RETURN_IF_ERROR(CheckCount(kWhere, name, floats, ffi::DataType::F32, count));
    *to = static_cast<float*>(floats.untyped_data());
    return ffi::Error::Success();
  }

 private:
  const Operands& all_;
  size_t next_ = 0;
};

ffi::Error TakeResults(const Operands& all, const Wanted& wanted, BlockQuantize* q) {
  Outputs& p = q->out;
  Results results(all);
  if (wanted.row) TE_RETURN_IF_ERROR(results.TakeCodes(p.m * p.k, &p.row, &p.row_format));
  if (wanted.row && !wanted.two_dimensional) {
    TE_RETURN_IF_ERROR(results.TakeFloats("row_scale", p.m * Tiles(p.k), &q->row_scale));
  }
  if (wanted.col) TE_RETURN_IF_ERROR(results.TakeCodes(p.m * p.k, &p.col, &p.col_format));
  if (wanted.col && !wanted.two_dimensional) {
    TE_RETURN_IF_ERROR(results.TakeFloats("col_scale", p.k * Tiles(p.m), &q->col_scale));
  }
  if (wanted.two_dimensional) {
    TE_RETURN_IF_ERROR(results.TakeFloats("scale_inv", Tiles(p.m) * Tiles(p.k), &q->row_scale));
    if (!wanted.row) p.row_format = p.col_format;
  }
  float* amax = nullptr;
  TE_RETURN_IF_ERROR(results.TakeFloats("amax", 2, &amax));
  p.amax = reinterpret_cast<uint32_t*>(amax);
  p.aligned = AlignedTo(q->x, 16) && AlignedTo(p.row, 8) && p.k % kPack == 0;
  p.col_aligned = AlignedTo(p.col, 16) && p.m % 16 == 0;
  return ffi::Error::Success();
}

ffi::Error ReadRules(const ffi::Dictionary& attrs, BlockQuantize* q) {
  TE_ASSIGN_OR_RETURN(power_of_2, Attr<bool>(kWhere, attrs, "power_of_2"));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(kWhere, attrs, "epsilon"));
  const auto rule = [&](Format format) {
    return ScaleRule{format == Format::kE4M3 ? 448.0f : 57344.0f, 1.0f,
                     epsilon >= 0x1p-126f ? epsilon : 0.0f, power_of_2};
  };
  q->row_rule = rule(q->out.row_format);
  q->col_rule = rule(q->out.col_format);
  return ffi::Error::Success();
}

template <Float dtype, bool kRow, bool kCol>
ffi::Error LaunchKernel(cudaStream_t stream, const BlockQuantize& q, bool two_dimensional) {
  const auto kernel = two_dimensional ? QuantizeSquareKernel<dtype, kRow, kCol>
                                      : QuantizeBlockKernel<dtype, kRow, kCol>;
  return LaunchWithAmax(kWhere, stream, q.out.noop, q.out.amax, kPlainRounds, kernel,
                        TensorTiles(q.out), kTileThreads, q);
}

ffi::Error Launch(cudaStream_t stream, Float dtype, const BlockQuantize& q, const Wanted& wanted) {
  return WithFloat(dtype, [&](auto type) {
    constexpr Float kType = decltype(type)::value;
    if (wanted.row && wanted.col) {
      return LaunchKernel<kType, true, true>(stream, q, wanted.two_dimensional);
    }
    if (wanted.row) return LaunchKernel<kType, true, false>(stream, q, wanted.two_dimensional);
    return LaunchKernel<kType, false, true>(stream, q, wanted.two_dimensional);
  });
}

ffi::Error QuantizeBlockImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  const bool noop = AttrOr(attrs, "noop", false);
  const Wanted wanted = {AttrOr(attrs, "row", false), AttrOr(attrs, "col", false),
                         AttrOr(attrs, "two_dimensional", false)};
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  const size_t n_rets = wanted.results();
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, noop ? 2 + n_rets : 1, n_rets));
  const ffi::AnyBuffer& x = all.args[noop ? 1 : 0];
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, x, k_ndim));
  BlockQuantize q = {};
  q.x = x.untyped_data();
  q.out.m = extent.rows;
  q.out.k = extent.cols;
  TE_RETURN_IF_ERROR(TakeResults(all, wanted, &q));
  TE_RETURN_IF_ERROR(ReadRules(attrs, &q));
  if (noop) {
    TE_ASSIGN_OR_RETURN(flag, TakeNoop(kWhere, stream, all));
    q.out.noop = flag;
  }
  if (extent.size() == 0) return Clear(kWhere, stream, q.out.noop, q.out.amax, 2 * sizeof(float));
  return Launch(stream, dtype, q, wanted);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row, row_scale] [col [K..
// M..], col_scale], or [row] [col] scale_inv when two_dimensional, and amax f32[2]. Attributes:
// row, col, noop, two_dimensional, power_of_2 (bool), epsilon (float), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizeBlock, QuantizeBlockImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace te_flax::cuda
