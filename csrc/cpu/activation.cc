// FFI handlers of the activations, forward and backward, with what is fused behind them.
#include <algorithm>
#include <string>

#include "cpu/fused.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kNames[] = {"gelu", "gelu_exact",   "quick_gelu", "silu",
                                       "relu", "squared_relu", "linear"};
constexpr std::string_view kClamped = "clamped_silu,clamped_linear";

ffi::ErrorOr<Activation> NamedActivation(std::string_view where, std::string_view name,
                                         int64_t slices) {
  if (name == kClamped && slices == 2) return Activation::kClampedSilu;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    const std::string wanted = std::string(kNames[i]) + (slices == 2 ? ",linear" : "");
    if (name == wanted) return static_cast<Activation>(i);
  }
  return ffi::Unexpected(Invalid(
      where, "activation", "be known, for " + std::to_string(slices) + " slices", name, kReport));
}

// x [M.., A, K..] as rows of A slices, without the A if it is 1.
ffi::Error ReadX(std::string_view where, const ffi::AnyBuffer& x, const ffi::Dictionary& attrs,
                 ActivationTile* all) {
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(where, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, "x", x.element_type()));
  TE_ASSIGN_OR_RETURN(name, Attr<std::string_view>(where, attrs, "activation"));
  const int64_t slices = name.find(',') == name.npos ? 1 : 2;
  TE_ASSIGN_OR_RETURN(extent, AsExtent(where, x, k_ndim));
  TE_ASSIGN_OR_RETURN(whole, AsExtent(where, x, k_ndim + slices - 1));
  TE_ASSIGN_OR_RETURN(activation, NamedActivation(where, name, slices));
  TE_ASSIGN_OR_RETURN(limit, Attr<float>(where, attrs, "limit"));
  TE_ASSIGN_OR_RETURN(alpha, Attr<float>(where, attrs, "alpha"));
  TE_ASSIGN_OR_RETURN(offset, Attr<float>(where, attrs, "offset"));
  *all = {};
  all->activation = activation;
  all->slices = static_cast<int>(slices);
  all->limit = limit;
  all->alpha = alpha;
  all->offset = offset;
  all->rows = whole.rows;
  all->cols = extent.cols;
  all->x_dtype = dtype;
  all->x = x.untyped_data();
  all->x_stride = whole.cols;
  all->x_slice_stride = extent.cols;
  return ffi::Error::Success();
}

const void* At(Float dtype, const void* data, int64_t i) {
  return static_cast<const char*>(data) + i * (dtype == Float::kF32 ? 4 : 2);
}

class ActivationFunction : public Function {
 public:
  explicit ActivationFunction(const ActivationTile& all) : all_(all) {}

  void Produce(const Piece& piece) const override {
    ActivationTile tile = all_;
    tile.rows = piece.rows;
    tile.cols = piece.cols;
    tile.x = At(all_.x_dtype, all_.x, piece.row * all_.x_stride + piece.col);
    if (all_.dy != nullptr) {
      tile.dy = At(all_.dy_dtype, all_.dy, piece.row * all_.dy_stride + piece.col);
    }
    tile.h = piece.to;
    tile.h_stride = piece.stride;
    tile.h_slice_stride = piece.slice_stride;
    Table().activate(tile);
  }

 private:
  ActivationTile all_;
};

ffi::Error Activate(ffi::ThreadPool& pool, const FusedCall& call, ActivationTile* all,
                    int64_t slices) {
  all->h_dtype = call.dtype;
  const FusedShape shape{all->rows, slices, all->cols};
  TE_RETURN_IF_ERROR(CheckResults(call, shape));
  RunFused(pool, call, shape, ActivationFunction(*all));
  return ffi::Error::Success();
}

ffi::Error ActFwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_fwd";
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, 1, 0));
  if (call.kept) return ffi::Error::Success();
  ActivationTile all;
  TE_RETURN_IF_ERROR(ReadX(kWhere, call.own[0], attrs, &all));
  return Activate(pool, call, &all, 1);
}

ffi::Error ActBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_bwd";
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, 2, 0));
  if (call.kept) return ffi::Error::Success();
  ActivationTile all;
  TE_RETURN_IF_ERROR(ReadX(kWhere, call.own[1], attrs, &all));
  const ffi::AnyBuffer& dy = call.own[0];
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "dy", dy.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "dy", dy, dy.element_type(), all.rows * all.cols));
  all.dy_dtype = dtype;
  all.dy = dy.untyped_data();
  all.dy_stride = all.cols;
  return Activate(pool, call, &all, all.slices);
}

}  // namespace

// Operands: [noop f32[1]] x [M.. A K..] [scale f32[]] [previous results]; results: see fused.h.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ActFwd, ActFwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

// The same with dy [M.. K..] before x; h is [M.. A K..].
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ActBwd, ActBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
