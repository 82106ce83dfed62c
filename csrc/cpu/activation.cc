// FFI handlers of the activations, forward and backward, with what is fused behind them.
#include "common/activation.h"

#include "cpu/fused.h"

namespace te_flax::cpu {
namespace {

ActivationTile WholeTile(const ActivationCall& call) {
  ActivationTile all = {};
  all.activation = call.activation;
  all.slices = call.slices;
  all.limit = call.limit;
  all.alpha = call.alpha;
  all.offset = call.offset;
  all.rows = call.rows;
  all.cols = call.cols;
  all.x_dtype = call.dtype;
  all.x = call.x;
  all.x_stride = call.slices * call.cols;
  all.x_slice_stride = call.cols;
  return all;
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
  TE_ASSIGN_OR_RETURN(x, ReadActivation(kWhere, call.own[0], attrs));
  ActivationTile all = WholeTile(x);
  return Activate(pool, call, &all, 1);
}

ffi::Error ActBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "act_bwd";
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, 2, 0));
  if (call.kept) return ffi::Error::Success();
  TE_ASSIGN_OR_RETURN(x, ReadActivation(kWhere, call.own[1], attrs));
  ActivationTile all = WholeTile(x);
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
