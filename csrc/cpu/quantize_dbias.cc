// FFI handler of the quantizers that also sum x over the tokens: h is x itself.
#include "cpu/fused.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kWhere = "quantize_dbias";

// x in another dtype.
class Rounding : public Function {
 public:
  Rounding(const Matrix& x, Float dtype) : x_(x), dtype_(dtype) {}

  void Produce(const Piece& piece) const override {
    ActivationTile tile{};
    tile.activation = Activation::kLinear;
    tile.slices = 1;
    tile.rows = piece.rows;
    tile.cols = piece.cols;
    tile.x_dtype = x_.dtype;
    tile.x = x_.At(piece.row, piece.col);
    tile.x_stride = x_.cols;
    tile.h_dtype = dtype_;
    tile.h = piece.to;
    tile.h_stride = piece.stride;
    Table().activate(tile);
  }

 private:
  Matrix x_;
  Float dtype_;
};

ffi::Error QuantizeDbiasImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, 1, 0));
  if (call.kept) return ffi::Error::Success();
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, call.own[0], k_ndim));
  const FusedShape shape{x.rows, 1, x.cols};
  TE_RETURN_IF_ERROR(CheckResults(call, shape));
  if (x.dtype == call.dtype) {
    RunFused(pool, call, shape, x.data);
  } else {
    RunFused(pool, call, shape, Rounding(x, call.dtype));
  }
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [scale f32[]] [previous results]; results: see fused.h.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizeDbias, QuantizeDbiasImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
