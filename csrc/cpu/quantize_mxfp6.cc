// FFI handler of the MXFP6 quantizers: row, col or both, noop or not.
//
// The unit of work is a tile of 32 x 32 elements, one block each way.
#include "cpu/fp6.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kWhere = "quantize_mxfp6";
constexpr int64_t kBlockBytes = kMxBlock / kFp6Group * kFp6Bytes;

// Null: not a result of the call.
struct Copy {
  uint8_t* data = nullptr;    // rows of 3 * ceil(cols / 4) bytes
  uint8_t* scales = nullptr;  // row: [rows, ceil(cols / 32)], col: [ceil(rows / 32), cols]
  Format format = Format::kE2M3;
};

// The tile whose first element is (row, col), both multiples of 32.
void QuantizeTile(const Kernels& kernels, const Matrix& x, const Copy& rowwise, const Copy& colwise,
                  int64_t row, int64_t col, Amax* amax) {
  const int64_t stride = CeilDiv(x.cols, kFp6Group) * kFp6Bytes;
  const int64_t first = row * stride + col / kMxBlock * kBlockBytes;
  const int64_t blocks = CeilDiv(x.cols, kMxBlock);
  Mxfp6Tile tile = {};
  tile.dtype = x.dtype;
  tile.x = x.At(row, col);
  tile.x_stride = x.cols;
  tile.rows = std::min<int64_t>(kMxBlock, x.rows - row);
  tile.cols = std::min<int64_t>(kMxBlock, x.cols - col);
  tile.code_stride = stride;
  if (rowwise.data != nullptr) {
    tile.row_format = rowwise.format;
    tile.row = rowwise.data + first;
    tile.row_scale = rowwise.scales + row * blocks + col / kMxBlock;
    tile.row_scale_stride = blocks;
  }
  if (colwise.data != nullptr) {
    tile.col_format = colwise.format;
    tile.col = colwise.data + first;
    tile.col_scale = colwise.scales + row / kMxBlock * x.cols + col;
  }
  kernels.quantize_mxfp6(tile, amax);
}

Amax QuantizeAll(ffi::ThreadPool& pool, const Matrix& x, const Copy& row, const Copy& col) {
  const int64_t across = CeilDiv(x.cols, kMxBlock);
  const Pieces pieces = Cut(pool, across * CeilDiv(x.rows, kMxBlock), kMxBlock * kMxBlock);
  const Kernels& kernels = Table();
  return ParallelAmax(pool, pieces, [&](int64_t begin, int64_t end, Amax* amax) {
    for (int64_t i = begin; i < end; ++i) {
      QuantizeTile(kernels, x, row, col, i / across * kMxBlock, i % across * kMxBlock, amax);
    }
  });
}

ffi::Error ReadCopy(const Operands& all, size_t at, const Matrix& x, int64_t scales, Format format,
                    Copy* copy) {
  const int64_t bytes = x.rows * CeilDiv(x.cols, kFp6Group) * kFp6Bytes;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", all.rets[at], ffi::DataType::U8, bytes));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scales", all.rets[at + 1], ffi::DataType::U8, scales));
  AdviseHugePages(all.rets[at]);
  copy->data = static_cast<uint8_t*>(all.rets[at].untyped_data());
  copy->scales = static_cast<uint8_t*>(all.rets[at + 1].untyped_data());
  copy->format = format;
  return ffi::Error::Success();
}

ffi::Error QuantizeMxfp6Impl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  TE_ASSIGN_OR_RETURN(call, ReadMxCall(kWhere, args, rets, attrs));
  const Operands& all = call.all;
  if (call.noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(kWhere, all));
    if (keep) return ffi::Error::Success();
  }
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, call.x(), call.k_ndim));
  Copy rowwise;
  Copy colwise;
  if (call.row) {
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "row_format", attrs));
    const int64_t scales = x.rows * CeilDiv(x.cols, kMxBlock);
    TE_RETURN_IF_ERROR(ReadCopy(all, 0, x, scales, format, &rowwise));
  }
  if (call.col) {
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "col_format", attrs));
    const int64_t scales = CeilDiv(x.rows, kMxBlock) * x.cols;
    TE_RETURN_IF_ERROR(ReadCopy(all, call.row ? 2 : 0, x, scales, format, &colwise));
  }
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2));
  const bool empty = x.rows * x.cols == 0;
  WriteAmax(empty ? Amax{} : QuantizeAll(pool, x, rowwise, colwise), all.rets.back());
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row u8 [M.. K../4 3],
// row_scale] [col likewise, col_scale] amax f32[2]. Attributes: row, col, noop (bool), k_ndim
// (int64), row_format, col_format.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizeMxfp6, QuantizeMxfp6Impl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
