// FFI handler of the tensor-scaled quantizers: row, col or both, with or without noop.
#include "cpu/kernels.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kWhere = "quantize";

// Pieces of x when a transposed copy is written: whole cache lines of it in both directions.
constexpr int64_t kTileRows = 256;
constexpr int64_t kTileCols = 1024;
constexpr int64_t kFlatPiece = 32 << 10;

struct Results {
  uint8_t* row = nullptr;
  uint8_t* col = nullptr;
  Format row_format = Format::kE4M3;
  Format col_format = Format::kE4M3;
};

TensorTile Tile(const Matrix& x, float scale, const Results& out, int64_t row, int64_t col,
                int64_t rows, int64_t cols) {
  TensorTile tile;
  tile.dtype = x.dtype;
  tile.x = x.At(row, col);
  tile.x_stride = x.cols;
  tile.rows = rows;
  tile.cols = cols;
  tile.scale = scale;
  tile.row_format = out.row_format;
  tile.row = out.row == nullptr ? nullptr : out.row + row * x.cols + col;
  tile.row_stride = x.cols;
  tile.col_format = out.col_format;
  tile.col = out.col == nullptr ? nullptr : out.col + col * x.rows + row;
  tile.col_stride = x.rows;
  return tile;
}

// Without a transpose the matrix is one long row.
Amax QuantizeFlat(ffi::ThreadPool& pool, Matrix x, float scale, const Results& out) {
  x.cols *= x.rows;
  x.rows = 1;
  const Kernels& kernels = Table();
  const Pieces pieces = Cut(pool, (x.cols + kFlatPiece - 1) / kFlatPiece, kFlatPiece);
  return ParallelAmax(pool, pieces, [&](int64_t begin, int64_t end, Amax* amax) {
    const int64_t first = begin * kFlatPiece;
    const int64_t last = std::min(x.cols, end * kFlatPiece);
    kernels.quantize_tensor(Tile(x, scale, out, 0, first, 1, last - first), amax);
  });
}

Amax QuantizeTiles(ffi::ThreadPool& pool, const Matrix& x, float scale, const Results& out) {
  const int64_t across = (x.cols + kTileCols - 1) / kTileCols;
  const int64_t down = (x.rows + kTileRows - 1) / kTileRows;
  const int64_t piece = std::min(kTileRows, x.rows) * std::min(kTileCols, x.cols);
  const Kernels& kernels = Table();
  return ParallelAmax(
      pool, Cut(pool, across * down, piece), [&](int64_t begin, int64_t end, Amax* amax) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i / across * kTileRows;
          const int64_t col = i % across * kTileCols;
          kernels.quantize_tensor(Tile(x, scale, out, row, col, std::min(kTileRows, x.rows - row),
                                       std::min(kTileCols, x.cols - col)),
                                  amax);
        }
      });
}

ffi::Error QuantizeTensorImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                              ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const bool noop = AttrOr(attrs, "noop", false);
  const bool row = AttrOr(attrs, "row", false);
  const bool col = AttrOr(attrs, "col", false);
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  const size_t n_rets = size_t{row} + size_t{col} + 1;
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, noop ? 3 + n_rets : 2, n_rets));
  if (noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(kWhere, all));
    if (keep) return ffi::Error::Success();
  }
  const ffi::AnyBuffer& x = all.args[noop];
  const ffi::AnyBuffer& scale = all.args[noop + size_t{1}];
  TE_ASSIGN_OR_RETURN(matrix, AsMatrix(kWhere, x, k_ndim));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", scale, ffi::DataType::F32, 1));
  Results out;
  for (size_t i = 0; i + 1 < n_rets; ++i) {
    const bool is_row = row && i == 0;
    const ffi::AnyBuffer& codes = all.rets[i];
    TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, is_row ? "row" : "col", codes.element_type()));
    TE_RETURN_IF_ERROR(CheckCount(kWhere, is_row ? "row" : "col", codes, codes.element_type(),
                                  matrix.rows * matrix.cols));
    AdviseHugePages(codes);
    (is_row ? out.row : out.col) = static_cast<uint8_t*>(codes.untyped_data());
    (is_row ? out.row_format : out.col_format) = format;
  }
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  const float factor = FlushScale(*scale.typed_data<float>());
  const Amax amax = matrix.rows * matrix.cols == 0 ? Amax{}
                    : col                          ? QuantizeTiles(pool, matrix, factor, out)
                                                   : QuantizeFlat(pool, matrix, factor, out);
  WriteAmax(amax, all.rets.back());
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] scale f32[] [previous results]; results: [row [M.. K..]]
// [col [K.. M..]] amax f32[2]. Attributes: row, col, noop (bool), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizeTensor, QuantizeTensorImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
