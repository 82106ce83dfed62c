// FFI handler of float32 block scaling: 1 x 128 blocks of each copy, or 128 x 128 shared by both.
//
// A block's amax is found by the kernel of the amax op; its codes are those of tensor scaling with
// its scale.
#include "cpu/kernels.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

constexpr std::string_view kWhere = "quantize_block";

constexpr int64_t kBlock = 128;
constexpr int64_t kTileCols = 8 * kBlock;
constexpr int64_t kStrip = 32;  // columns transposed at a time: whole cache lines, 16 KB

struct Scale {
  float scale;
  float inverse;
};

struct Options {
  bool power_of_2;
  uint32_t epsilon;  // float32 bits, 0 below 2^-126
};

// max / amax held to [2^-126, 2^126], of the bits of the largest finite magnitude.
Scale ScaleOf(uint32_t amax, Format format, const Options& options) {
  const uint32_t a = std::max(amax, options.epsilon);
  if (a == 0) return {1.0f, 1.0f};
  const bool e4m3 = format == Format::kE4M3;
  if (options.power_of_2) {
    // The maxima are 1.75 * 2^n: above that significand the quotient's exponent is one less.
    const int32_t n =
        e4m3 ? FormatFacts<Format::kE4M3>::kMaxExponent : FormatFacts<Format::kE5M2>::kMaxExponent;
    const int32_t e = n + 254 - static_cast<int32_t>((a + kRoundUp) >> 23);
    const uint32_t held = static_cast<uint32_t>(std::min(std::max(e, 1), 253));
    return {BitCast<float>(held << 23), BitCast<float>((254 - held) << 23)};
  }
  const float ratio = (e4m3 ? 448.0f : 57344.0f) / BitCast<float>(a);
  const float scale = std::min(std::max(ratio, 0x1p-126f), 0x1p126f);
  return {scale, 1.0f / scale};
}

// One copy, or with 128 x 128 blocks both: then `scale_inv` is that of the first.
struct Copy {
  uint8_t* codes = nullptr;
  Format format = Format::kE4M3;
  float* scale_inv = nullptr;
};

static_assert(kTileCols / kBlock <= kStrip && kBlock <= kLongestRun, "runs of a kernel call");

struct Call {
  const Kernels& kernels;
  Matrix x;
  Options options;
  Copy row;
  Copy col;
};

// Equally long blocks of contiguous elements, at most kStrip of them.
void QuantizeBlocks(const Call& call, const Copy& copy, Runs runs, float* scale_inv,
                    int64_t scale_stride, Amax* amax) {
  float scales[kStrip];
  const char* x = static_cast<const char*>(runs.x);
  for (int64_t i = 0; i < runs.count; ++i) {
    Amax found;
    call.kernels.amax(runs.dtype, x + i * runs.x_stride * call.x.Bytes(), runs.n, &found);
    const Scale scale = ScaleOf(found.finite, copy.format, call.options);
    scales[i] = scale.scale;
    scale_inv[i * scale_stride] = scale.inverse;
  }
  runs.scales = scales;
  call.kernels.quantize_runs(runs, amax);
}

void QuantizeRows(const Call& call, int64_t row, int64_t col, int64_t rows, int64_t cols,
                  Amax* amax) {
  const Copy& copy = call.row;
  const int64_t across = CeilDiv(call.x.cols, kBlock);
  const int64_t whole = cols / kBlock;
  const int64_t rest = cols % kBlock;
  const auto blocks = [&](int64_t r, int64_t c, int64_t count, int64_t n) {
    const Runs runs = {call.x.dtype, copy.format, call.x.At(r, c), kBlock,
                       count,        n,           nullptr,         copy.codes + r * call.x.cols + c,
                       kBlock};
    QuantizeBlocks(call, copy, runs, copy.scale_inv + r * across + c / kBlock, 1, amax);
  };
  for (int64_t r = row; r < row + rows; ++r) {
    if (whole > 0) blocks(r, col, whole, kBlock);
    if (rest > 0) blocks(r, col + whole * kBlock, 1, rest);
  }
}

template <typename T>
void Transpose(const Matrix& x, int64_t row, int64_t col, int64_t rows, int64_t cols, T* out) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* in = reinterpret_cast<const T*>(x.At(row + r, col));
    for (int64_t c = 0; c < cols; ++c) out[c * kBlock + r] = in[c];
  }
}

// The blocks of `rows` tokens below each other, at most 128, become the rows of a small matrix.
void QuantizeCols(const Call& call, int64_t row, int64_t col, int64_t rows, int64_t cols,
                  Amax* amax) {
  const Copy& copy = call.col;
  alignas(64) char strip[kStrip * kBlock * sizeof(uint32_t)];
  const int64_t blocks = CeilDiv(call.x.rows, kBlock);
  for (int64_t c = col; c < col + cols; c += kStrip) {
    const int64_t n = std::min(kStrip, col + cols - c);
    if (call.x.dtype == Float::kF32) {
      Transpose(call.x, row, c, rows, n, reinterpret_cast<uint32_t*>(strip));
    } else {
      Transpose(call.x, row, c, rows, n, reinterpret_cast<uint16_t*>(strip));
    }
    const Runs runs = {call.x.dtype,
                       copy.format,
                       strip,
                       kBlock,
                       n,
                       rows,
                       nullptr,
                       copy.codes + c * call.x.rows + row,
                       call.x.rows};
    QuantizeBlocks(call, copy, runs, copy.scale_inv + c * blocks + row / kBlock, blocks, amax);
  }
}

void QuantizeSquares(const Call& call, int64_t row, int64_t col, int64_t rows, int64_t cols,
                     Amax* amax) {
  const Format format = call.row.codes != nullptr ? call.row.format : call.col.format;
  const int64_t blocks = CeilDiv(call.x.cols, kBlock);
  for (int64_t c = col; c < col + cols; c += kBlock) {
    const int64_t n = std::min(kBlock, col + cols - c);
    Amax found;
    for (int64_t r = 0; r < rows; ++r) {
      call.kernels.amax(call.x.dtype, call.x.At(row + r, c), n, &found);
    }
    const Scale scale = ScaleOf(found.finite, format, call.options);
    call.row.scale_inv[row / kBlock * blocks + c / kBlock] = scale.inverse;
    TensorTile tile = {};
    tile.dtype = call.x.dtype;
    tile.x = call.x.At(row, c);
    tile.x_stride = call.x.cols;
    tile.rows = rows;
    tile.cols = n;
    tile.scale = scale.scale;
    tile.row_format = tile.col_format = format;
    tile.row_stride = call.x.cols;
    tile.col_stride = call.x.rows;
    if (call.row.codes != nullptr) tile.row = call.row.codes + row * call.x.cols + c;
    if (call.col.codes != nullptr) tile.col = call.col.codes + c * call.x.rows + row;
    call.kernels.quantize_tensor(tile, amax);
  }
}

Amax QuantizeAll(ffi::ThreadPool& pool, const Call& call, bool two_dimensional) {
  const Matrix& x = call.x;
  const int64_t across = CeilDiv(x.cols, kTileCols);
  const int64_t down = CeilDiv(x.rows, kBlock);
  const int64_t piece = std::min(kBlock, x.rows) * std::min(kTileCols, x.cols);
  return ParallelAmax(pool, Cut(pool, across * down, piece),
                      [&](int64_t begin, int64_t end, Amax* amax) {
                        for (int64_t i = begin; i < end; ++i) {
                          const int64_t row = i / across * kBlock;
                          const int64_t col = i % across * kTileCols;
                          const int64_t rows = std::min(kBlock, x.rows - row);
                          const int64_t cols = std::min(kTileCols, x.cols - col);
                          if (two_dimensional) {
                            QuantizeSquares(call, row, col, rows, cols, amax);
                            continue;
                          }
                          if (call.row.codes != nullptr)
                            QuantizeRows(call, row, col, rows, cols, amax);
                          if (call.col.codes != nullptr)
                            QuantizeCols(call, row, col, rows, cols, amax);
                        }
                      });
}

ffi::Error ReadCodes(const ffi::AnyBuffer& codes, const Matrix& x, Copy* copy) {
  TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, "codes", codes.element_type()));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, codes.element_type(), x.rows * x.cols));
  AdviseHugePages(codes);
  copy->format = format;
  copy->codes = static_cast<uint8_t*>(codes.untyped_data());
  return ffi::Error::Success();
}

ffi::Error ReadScales(const ffi::AnyBuffer& scales, int64_t count, Copy* copy) {
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", scales, ffi::DataType::F32, count));
  copy->scale_inv = static_cast<float*>(scales.untyped_data());
  return ffi::Error::Success();
}

// The results in their order: codes and scales of each copy, or the codes and one set of scales.
ffi::Error ReadResults(const Operands& all, bool row, bool col, bool two_dimensional, Call* call) {
  const Matrix& x = call->x;
  const int64_t across = CeilDiv(x.cols, kBlock);
  const int64_t down = CeilDiv(x.rows, kBlock);
  size_t at = 0;
  if (row) TE_RETURN_IF_ERROR(ReadCodes(all.rets[at++], x, &call->row));
  if (row && !two_dimensional) {
    TE_RETURN_IF_ERROR(ReadScales(all.rets[at++], x.rows * across, &call->row));
  }
  if (col) TE_RETURN_IF_ERROR(ReadCodes(all.rets[at++], x, &call->col));
  if (col && !two_dimensional) {
    TE_RETURN_IF_ERROR(ReadScales(all.rets[at++], x.cols * down, &call->col));
  }
  if (two_dimensional) {
    TE_RETURN_IF_ERROR(ReadScales(all.rets[at++], down * across, &call->row));
  }
  return CheckCount(kWhere, "amax", all.rets.back(), ffi::DataType::F32, 2);
}

ffi::Error QuantizeBlockImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             ffi::Dictionary attrs) {
  const bool noop = AttrOr(attrs, "noop", false);
  const bool row = AttrOr(attrs, "row", false);
  const bool col = AttrOr(attrs, "col", false);
  const bool two_dimensional = AttrOr(attrs, "two_dimensional", false);
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(power_of_2, Attr<bool>(kWhere, attrs, "power_of_2"));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(kWhere, attrs, "epsilon"));
  const size_t copies = size_t{row} + size_t{col};
  const size_t n_rets = (two_dimensional ? copies + 1 : 2 * copies) + 1;
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, noop ? 2 + n_rets : 1, n_rets));
  if (noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(kWhere, all));
    if (keep) return ffi::Error::Success();
  }
  TE_ASSIGN_OR_RETURN(x, AsMatrix(kWhere, all.args[noop], k_ndim));
  const uint32_t floor = BitCast<uint32_t>(FlushScale(epsilon));
  Call call = {Table(), x, {power_of_2, floor}, {}, {}};
  TE_RETURN_IF_ERROR(ReadResults(all, row, col, two_dimensional, &call));
  const bool empty = x.rows * x.cols == 0;
  WriteAmax(empty ? Amax{} : QuantizeAll(pool, call, two_dimensional), all.rets.back());
  return ffi::Error::Success();
}

}  // namespace

// Operands: [noop f32[1]] x [M.. K..] [previous results]; results: [row, row_scale] [col [K..
// M..], col_scale], or [row] [col] scale_inv when two_dimensional, and amax f32[2]. Attributes:
// row, col, noop, two_dimensional, power_of_2 (bool), epsilon (float), k_ndim (int64).
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    QuantizeBlock, QuantizeBlockImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace te_flax::cpu
