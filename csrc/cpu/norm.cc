// FFI handlers of LayerNorm and RMSNorm, forward and backward, with fused quantization.
#include "common/norm.h"

#include <vector>

#include "cpu/fused.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

// float32 values of gamma or beta, `add` added.
template <Float dtype>
void WidenInto(const void* in, float add, std::vector<float>* out) {
  const auto* x = static_cast<const typename Element<dtype>::Type*>(in);
  for (size_t i = 0; i < out->size(); ++i) {
    (*out)[i] = BitCast<float>(Element<dtype>::Load(x[i])) + add;
  }
}

ffi::ErrorOr<std::vector<float>> Parameter(std::string_view where, std::string_view name,
                                           const ffi::AnyBuffer& buffer, int64_t cols,
                                           bool zero_centered) {
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, name, buffer.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, buffer.element_type(), cols));
  std::vector<float> wide(static_cast<size_t>(cols));
  const float add = zero_centered ? 1.0f : 0.0f;
  if (dtype == Float::kF32) WidenInto<Float::kF32>(buffer.untyped_data(), add, &wide);
  if (dtype == Float::kBf16) WidenInto<Float::kBf16>(buffer.untyped_data(), add, &wide);
  if (dtype == Float::kF16) WidenInto<Float::kF16>(buffer.untyped_data(), add, &wide);
  return wide;
}

ffi::ErrorOr<float*> Floats(std::string_view where, std::string_view name,
                            const ffi::AnyBuffer& buffer, int64_t count) {
  TE_RETURN_IF_ERROR(CheckCount(where, name, buffer, ffi::DataType::F32, count));
  return static_cast<float*>(buffer.untyped_data());
}

// x or dy, `elements` further on.
const void* Shift(const void* p, Float dtype, int64_t elements) {
  const int64_t bytes = elements * (dtype == Float::kF32 ? 4 : 2);
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}

// What forward and backward share; `all` stands for all rows and columns.
class Norm : public Function {
 public:
  bool WholeBands() const override { return true; }

  NormTile all = {};

 protected:
  NormTile Rows(int64_t row, int64_t rows) const {
    NormTile t = all;
    t.rows = rows;
    t.x = Shift(t.x, t.x_dtype, row * t.stride);
    t.dy = Shift(t.dy, t.dy_dtype, row * t.stride);
    for (float** stat : {&t.mean, &t.rstd, &t.mean_g, &t.mean_g_xhat}) {
      if (*stat != nullptr) *stat += row;
    }
    return t;
  }

  NormTile Tile(const Piece& piece) const {
    NormTile t = Rows(piece.row, piece.rows);
    t.cols = piece.cols;
    t.x = Shift(t.x, t.x_dtype, piece.col);
    t.dy = Shift(t.dy, t.dy_dtype, piece.col);
    t.gamma += piece.col;
    if (t.beta != nullptr) t.beta += piece.col;
    t.out = piece.to;
    t.out_stride = piece.stride;
    return t;
  }
};

class Forward : public Norm {
 public:
  void Prepare(int64_t row, int64_t rows) const override {
    Table().norm.stats(Rows(row, rows), epsilon);
  }
  void Produce(const Piece& piece) const override { Table().norm.forward(Tile(piece)); }

  float epsilon = 0.0f;
};

class Backward : public Norm {
 public:
  Backward(int64_t rows, int64_t cols, bool layernorm)
      : dgamma(rows, cols),
        dbeta(layernorm ? rows : 0, cols),
        mean_g_(static_cast<size_t>(layernorm ? rows : 0)),
        mean_g_xhat_(static_cast<size_t>(rows)) {
    all.mean_g = layernorm ? mean_g_.data() : nullptr;
    all.mean_g_xhat = mean_g_xhat_.data();
  }

  void Prepare(int64_t row, int64_t rows) const override {
    for (int64_t i = row; i < row + rows; i += kSumRows) {
      const NormTile block = Rows(i, std::min(kSumRows, row + rows - i));
      Table().norm.backward_stats(block);
      Table().norm.backward_sums(block, dgamma.Block(i), all.layernorm ? dbeta.Block(i) : nullptr);
    }
  }
  void Produce(const Piece& piece) const override { Table().norm.backward(Tile(piece)); }

  RowSums dgamma;
  RowSums dbeta;

 private:
  std::vector<float> mean_g_;
  std::vector<float> mean_g_xhat_;
};

void SetX(const Matrix& x, const NormOptions& options, const std::vector<float>& gamma,
          NormTile* t) {
  t->layernorm = options.layernorm;
  t->rows = x.rows;
  t->cols = x.cols;
  t->x_dtype = x.dtype;
  t->x = x.data;
  t->stride = x.cols;
  t->gamma = gamma.data();
}

ffi::Error NormFwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "norm_fwd";
  TE_ASSIGN_OR_RETURN(options, ReadNormOptions(kWhere, attrs));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(kWhere, attrs, "epsilon"));
  const size_t n_own = options.layernorm ? 3 : 2;
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, n_own, n_own - 1));
  if (call.kept) return ffi::Error::Success();
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, call.own[0], options.k_ndim));
  TE_ASSIGN_OR_RETURN(gamma,
                      Parameter(kWhere, "gamma", call.own[1], x.cols, options.zero_centered));
  TE_ASSIGN_OR_RETURN(rstd, Floats(kWhere, "rstd", call.extras.back(), x.rows));
  Forward norm;
  norm.epsilon = FlushScale(epsilon);
  SetX(x, options, gamma, &norm.all);
  norm.all.rstd = rstd;
  norm.all.out_dtype = call.dtype;
  std::vector<float> beta;
  if (options.layernorm) {
    TE_ASSIGN_OR_RETURN(wide, Parameter(kWhere, "beta", call.own[2], x.cols, false));
    TE_ASSIGN_OR_RETURN(mean, Floats(kWhere, "mean", call.extras[0], x.rows));
    beta = std::move(wide);
    norm.all.beta = beta.data();
    norm.all.mean = mean;
  }
  const FusedShape shape{x.rows, 1, x.cols};
  TE_RETURN_IF_ERROR(CheckResults(call, shape));
  if (x.cols == 0) norm.Prepare(0, x.rows);  // nothing to cut into pieces, but statistics
  RunFused(pool, call, shape, norm);
  return ffi::Error::Success();
}

ffi::Error NormBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "norm_bwd";
  TE_ASSIGN_OR_RETURN(options, ReadNormOptions(kWhere, attrs));
  const size_t n_own = options.layernorm ? 5 : 4;
  TE_ASSIGN_OR_RETURN(call, ReadFused(kWhere, args, rets, attrs, n_own, n_own - 3));
  if (call.kept) return ffi::Error::Success();
  TE_ASSIGN_OR_RETURN(dy, AsMatrix(kWhere, call.own[0], options.k_ndim));
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, call.own[1], options.k_ndim));
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, "dy", call.own[0], call.own[0].element_type(), x.rows * x.cols));
  TE_ASSIGN_OR_RETURN(gamma,
                      Parameter(kWhere, "gamma", call.own[2], x.cols, options.zero_centered));
  TE_ASSIGN_OR_RETURN(rstd, Floats(kWhere, "rstd", call.own.back(), x.rows));
  TE_ASSIGN_OR_RETURN(dgamma, Floats(kWhere, "dgamma", call.extras[0], x.cols));
  TE_ASSIGN_OR_RETURN(dbeta, Floats(kWhere, "dbeta", call.extras.back(), x.cols));
  Backward norm(x.rows, x.cols, options.layernorm);
  SetX(x, options, gamma, &norm.all);
  norm.all.dy_dtype = dy.dtype;
  norm.all.dy = dy.data;
  norm.all.rstd = rstd;
  norm.all.out_dtype = call.dtype;
  if (options.layernorm) {
    TE_ASSIGN_OR_RETURN(mean, Floats(kWhere, "mean", call.own[3], x.rows));
    norm.all.mean = mean;
  }
  const FusedShape shape{x.rows, 1, x.cols};
  TE_RETURN_IF_ERROR(CheckResults(call, shape));
  RunFused(pool, call, shape, norm);
  norm.dgamma.Join(pool, dgamma);
  if (options.layernorm) norm.dbeta.Join(pool, dbeta);
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] gamma [K..] [beta [K..], layernorm] [scale f32[]] [previous
// results]; results: see fused.h, then [mean f32[M..], layernorm] rstd f32[M..]. Attributes: those
// of fused.h, kind, epsilon (f32), zero_centered_gamma (bool).
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    NormFwd, NormFwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

// Operands: [noop] dy [M.. K..] x [M.. K..] gamma [K..] [mean] rstd [scale] [previous results];
// results: see fused.h with h = dx, then dgamma f32[K..] [dbeta f32[K..], layernorm].
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    NormBwd, NormBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
