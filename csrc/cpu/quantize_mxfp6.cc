// FFI handler of the MXFP6 quantizers: row, col or both, noop or not.
//
// The unit of work is a tile of 32 x 32 elements, one block each way, whose bits lie on the stack.
// Plain loops with fixed bounds, which compilers vectorize; there is no code per instruction set.
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

struct Tile {
  int64_t row, col, rows, cols;
  uint32_t bits[kMxBlock][kMxBlock];  // float32, flushed; zeros beyond rows and cols
};

template <Float dtype>
void Load(const Matrix& x, Tile* t, Amax* amax) {
  for (int64_t r = 0; r < kMxBlock; ++r) {
    std::memset(t->bits[r], 0, sizeof(t->bits[r]));
    if (r >= t->rows) continue;
    const auto* from =
        reinterpret_cast<const typename Element<dtype>::Type*>(x.At(t->row + r, t->col));
    for (int64_t c = 0; c < t->cols; ++c) t->bits[r][c] = Element<dtype>::Load(from[c]);
    for (int64_t c = 0; c < kMxBlock; ++c) {
      const uint32_t a = t->bits[r][c] & kAbs;
      amax->nonfinite |= a >= kInf;
      amax->finite = std::max(amax->finite, a < kInf ? a : 0);
    }
  }
}

// Packs a row of a tile whose columns have these scales.
template <Format format>
void PackRow(const Tile& t, int64_t r, const uint8_t (&e8m0)[kMxBlock], uint8_t* to) {
  uint8_t codes[kMxBlock];
  for (int64_t c = 0; c < kMxBlock; ++c) {
    const uint32_t e = e8m0[c];
    // 2^-127 is subnormal, so a block with Inf is scaled in two normal steps.
    const float first = BitCast<float>((e >= 254 ? 64 : 254 - e) << 23);
    const float second = e >= 254 ? 0x1p-64f : 1.0f;
    const float v = BitCast<float>(t.bits[r][c]) * first * second;
    codes[c] = e == 255 ? 0 : EncodeFp6<format>(BitCast<uint32_t>(v));
  }
  for (int64_t g = 0; g < CeilDiv(t.cols, kFp6Group); ++g) {
    StoreFp6Group(to + g * kFp6Bytes, JoinFp6(codes + g * kFp6Group));
  }
}

uint8_t* RowOf(const Copy& copy, const Matrix& x, const Tile& t, int64_t r) {
  const int64_t groups = CeilDiv(x.cols, kFp6Group);
  return copy.data + (t.row + r) * groups * kFp6Bytes + t.col / kMxBlock * kBlockBytes;
}

template <Format format>
void QuantizeRows(const Matrix& x, const Tile& t, const Copy& copy) {
  uint8_t* scale = copy.scales + t.row * CeilDiv(x.cols, kMxBlock) + t.col / kMxBlock;
  for (int64_t r = 0; r < t.rows; ++r, scale += CeilDiv(x.cols, kMxBlock)) {
    uint32_t largest = 0;
    for (int64_t c = 0; c < kMxBlock; ++c) largest = std::max(largest, t.bits[r][c] & kAbs);
    *scale = BlockScale<format>(largest);
    uint8_t e8m0[kMxBlock];
    std::memset(e8m0, *scale, sizeof(e8m0));
    PackRow<format>(t, r, e8m0, RowOf(copy, x, t, r));
  }
}

template <Format format>
void QuantizeColumns(const Matrix& x, const Tile& t, const Copy& copy) {
  uint32_t largest[kMxBlock] = {};
  for (int64_t r = 0; r < kMxBlock; ++r) {
    for (int64_t c = 0; c < kMxBlock; ++c) {
      largest[c] = std::max(largest[c], t.bits[r][c] & kAbs);
    }
  }
  uint8_t e8m0[kMxBlock];
  for (int64_t c = 0; c < kMxBlock; ++c) e8m0[c] = BlockScale<format>(largest[c]);
  std::memcpy(copy.scales + t.row / kMxBlock * x.cols + t.col, e8m0, static_cast<size_t>(t.cols));
  for (int64_t r = 0; r < t.rows; ++r) PackRow<format>(t, r, e8m0, RowOf(copy, x, t, r));
}

Amax QuantizeAll(ffi::ThreadPool& pool, const Matrix& x, const Copy& row, const Copy& col) {
  const int64_t across = CeilDiv(x.cols, kMxBlock);
  const Pieces pieces = Cut(pool, across * CeilDiv(x.rows, kMxBlock), kMxBlock * kMxBlock);
  return ParallelAmax(pool, pieces, [&](int64_t begin, int64_t end, Amax* amax) {
    Tile t;
    for (int64_t i = begin; i < end; ++i) {
      t.row = i / across * kMxBlock;
      t.col = i % across * kMxBlock;
      t.rows = std::min<int64_t>(kMxBlock, x.rows - t.row);
      t.cols = std::min<int64_t>(kMxBlock, x.cols - t.col);
      WithFloat(x.dtype, [&](auto type) { Load<type()>(x, &t, amax); });
      if (row.data != nullptr) {
        WithFp6(row.format, [&](auto of) { QuantizeRows<of()>(x, t, row); });
      }
      if (col.data != nullptr) {
        WithFp6(col.format, [&](auto of) { QuantizeColumns<of()>(x, t, col); });
      }
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
  const bool noop = AttrOr(attrs, "noop", false);
  const bool row = AttrOr(attrs, "row", false);
  const bool col = AttrOr(attrs, "col", false);
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  const size_t n_rets = 2 * (size_t{row} + size_t{col}) + 1;
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, noop ? 2 + n_rets : 1, n_rets));
  if (noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(kWhere, all));
    if (keep) return ffi::Error::Success();
  }
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, all.args[noop], k_ndim));
  Copy rowwise;
  Copy colwise;
  if (row) {
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "row_format", attrs));
    const int64_t scales = x.rows * CeilDiv(x.cols, kMxBlock);
    TE_RETURN_IF_ERROR(ReadCopy(all, 0, x, scales, format, &rowwise));
  }
  if (col) {
    TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "col_format", attrs));
    const int64_t scales = CeilDiv(x.rows, kMxBlock) * x.cols;
    TE_RETURN_IF_ERROR(ReadCopy(all, row ? 2 : 0, x, scales, format, &colwise));
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
