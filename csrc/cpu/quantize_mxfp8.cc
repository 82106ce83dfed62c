// FFI handler of the MXFP8 quantizers: row, col or both, scales logical or swizzled, noop or not.
#include "cpu/kernels.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kWhere = "quantize_mxfp8";

// Whole pages of x, and a tile and the next one fit the second-level cache.
int64_t TileCols(const Matrix& x) { return std::min<int64_t>(kMxTileCols, 8192 / x.Bytes()); }

// Scales [outer, inner] of one copy, inner along the blocks of one row of codes. Swizzled: the
// 128 x 4 tiles of cuBLASLt, each stored as [32][4][4].
struct Scales {
  uint8_t* data = nullptr;
  int64_t outer = 0;
  int64_t inner = 0;
  bool swizzled = false;

  int64_t Tiles() const { return CeilDiv(inner, 4); }
  int64_t Size() const { return swizzled ? CeilDiv(outer, 128) * Tiles() * 512 : outer * inner; }
  uint8_t& At(int64_t r, int64_t c) const {
    const int64_t tile = r / 128 * Tiles() + c / 4;
    return data[tile * 512 + r % 32 * 16 + r / 32 % 4 * 4 + c % 4];
  }
};

struct Copy {
  uint8_t* codes = nullptr;
  Format format = Format::kE4M3;
  Scales scales;
};

ffi::Error ReadCopy(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales, const Matrix& x,
                    Copy* copy) {
  TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, "codes", codes.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, codes.element_type(), x.rows * x.cols));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scales", scales, ffi::DataType::U8, copy->scales.Size()));
  AdviseHugePages(codes);
  copy->format = format;
  copy->codes = static_cast<uint8_t*>(codes.untyped_data());
  copy->scales.data = static_cast<uint8_t*>(scales.untyped_data());
  // The padding of the swizzled tiles reaches the GEMM and must be 0.
  if (copy->scales.swizzled && scales.size_bytes() > 0) {
    std::memset(copy->scales.data, 0, scales.size_bytes());
  }
  return ffi::Error::Success();
}

// Quantizes the tile whose first element is (row, col), both multiples of 32. Swizzled scales take
// the way over the stack.
void QuantizeTile(const Kernels& kernels, const Matrix& x, const Copy& rowwise, const Copy& colwise,
                  int64_t row, int64_t col, Amax* amax) {
  constexpr int64_t kBlocks = kMxTileCols / kMxBlock;
  uint8_t row_scales[kMxBlock][kBlocks];
  uint8_t col_scales[kMxTileCols];
  Mxfp8Tile tile;
  tile.dtype = x.dtype;
  tile.x = x.At(row, col);
  tile.x_stride = x.cols;
  tile.rows = std::min<int64_t>(kMxBlock, x.rows - row);
  tile.cols = std::min(TileCols(x), x.cols - col);
  tile.code_stride = x.cols;
  tile.row_format = rowwise.format;
  tile.row = rowwise.codes == nullptr ? nullptr : rowwise.codes + row * x.cols + col;
  tile.col_format = colwise.format;
  tile.col = colwise.codes == nullptr ? nullptr : colwise.codes + row * x.cols + col;
  const Scales& rs = rowwise.scales;
  const Scales& cs = colwise.scales;
  const int64_t block = col / kMxBlock;
  tile.row_scale = rs.swizzled ? row_scales[0] : rs.data + row * rs.inner + block;
  tile.row_scale_stride = rs.swizzled ? kBlocks : rs.inner;
  tile.col_scale = cs.swizzled ? col_scales : cs.data + row / kMxBlock * x.cols + col;
  kernels.quantize_mxfp8(tile, amax);
  for (int64_t r = 0; tile.row != nullptr && rs.swizzled && r < tile.rows; ++r) {
    for (int64_t b = 0; b < CeilDiv(tile.cols, kMxBlock); ++b) {
      rs.At(row + r, block + b) = row_scales[r][b];
    }
  }
  for (int64_t c = 0; tile.col != nullptr && cs.swizzled && c < tile.cols; ++c) {
    cs.At(col + c, row / kMxBlock) = col_scales[c];
  }
}

// Down the columns of tiles: the kernels fetch the tile below while they encode one.
Amax QuantizeAll(ffi::ThreadPool& pool, const Matrix& x, const Copy& row, const Copy& col) {
  const int64_t tile_cols = TileCols(x);
  const int64_t across = CeilDiv(x.cols, tile_cols);
  const int64_t down = CeilDiv(x.rows, kMxBlock);
  const int64_t piece = std::min<int64_t>(kMxBlock, x.rows) * std::min(tile_cols, x.cols);
  const Kernels& kernels = Table();
  return ParallelAmax(
      pool, Cut(pool, across * down, piece), [&](int64_t begin, int64_t end, Amax* amax) {
        for (int64_t i = begin; i < end; ++i) {
          QuantizeTile(kernels, x, row, col, i % down * kMxBlock, i / down * tile_cols, amax);
        }
      });
}

ffi::Error QuantizeMxfp8Impl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, ReadMxCall(kWhere, args, rets, attrs));
  const bool swizzled = AttrOr(attrs, "swizzled", false);
  const Operands& all = call.all;
  if (call.noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(kWhere, all));
    if (keep) return ffi::Error::Success();
  }
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, call.x(), call.k_ndim));
  Copy rowwise;
  Copy colwise;
  rowwise.scales = {nullptr, x.rows, CeilDiv(x.cols, kMxBlock), swizzled};
  // The logical colwise scales are [M/32, K], the swizzled ones belong to the transpose.
  colwise.scales = {nullptr, x.cols, CeilDiv(x.rows, kMxBlock), swizzled};
  if (call.row) TE_RETURN_IF_ERROR(ReadCopy(all.rets[0], all.rets[1], x, &rowwise));
  const size_t at = call.row ? 2 : 0;
  if (call.col) TE_RETURN_IF_ERROR(ReadCopy(all.rets[at], all.rets[at + 1], x, &colwise));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  const bool empty = x.rows * x.cols == 0;
  WriteAmax(empty ? Amax{} : QuantizeAll(pool, x, rowwise, colwise), all.rets.back());
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row, row_scale] [col,
// col_scale] amax f32[2]. Attributes: row, col, swizzled, noop (bool), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizeMxfp8, QuantizeMxfp8Impl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
