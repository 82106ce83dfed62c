#include "cpu/fused.h"

#include <cstdlib>
#include <memory>
#include <string>

#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

ffi::ErrorOr<Float> NamedFloat(std::string_view where, std::string_view name) {
  if (name == "float32") return Float::kF32;
  if (name == "bfloat16") return Float::kBf16;
  if (name == "float16") return Float::kF16;
  return ffi::Unexpected(
      Invalid(where, "out_dtype", "be float32, bfloat16 or float16", name, kReport));
}

ffi::ErrorOr<Scaling> NamedScaling(std::string_view where, std::string_view name) {
  if (name == "none") return Scaling::kNone;
  if (name == "tensor") return Scaling::kTensor;
  if (name == "mxfp8") return Scaling::kMxfp8;
  return ffi::Unexpected(Invalid(where, "scaling", "be none, tensor or mxfp8", name, kReport));
}

// Which results a variant has.
struct Has {
  bool noop, h, row, col, dbias, scales;
  size_t Count() const {
    return size_t{h} + (size_t{row} + size_t{col}) * (1 + size_t{scales}) + size_t{dbias} + 1;
  }
};

template <typename T>
T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

ffi::Error AssignResults(const Has& has, FusedCall* call) {
  size_t at = 0;
  const auto next = [&]() -> const ffi::AnyBuffer& { return call->results[at++]; };
  if (has.h) call->h = Data<char>(next());
  for (const bool is_row : {true, false}) {
    if (!(is_row ? has.row : has.col)) continue;
    const ffi::AnyBuffer& codes = next();
    TE_ASSIGN_OR_RETURN(format,
                        FormatOf(call->where, is_row ? "row" : "col", codes.element_type()));
    (is_row ? call->row_format : call->col_format) = format;
    (is_row ? call->row : call->col) = Data<uint8_t>(codes);
    if (has.scales) (is_row ? call->row_scale : call->col_scale) = Data<uint8_t>(next());
  }
  if (has.dbias) call->dbias = Data<float>(next());
  call->amax = next().untyped_data();
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<FusedCall> ReadFused(std::string_view where, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets, ffi::Dictionary attrs, size_t n_own,
                                  size_t n_extras) {
  FusedCall call;
  call.where = where;
  TE_ASSIGN_OR_RETURN(scaling_name, Attr<std::string_view>(where, attrs, "scaling"));
  TE_ASSIGN_OR_RETURN(scaling, NamedScaling(where, scaling_name));
  TE_ASSIGN_OR_RETURN(dtype_name, Attr<std::string_view>(where, attrs, "out_dtype"));
  TE_ASSIGN_OR_RETURN(dtype, NamedFloat(where, dtype_name));
  call.scaling = scaling;
  call.dtype = dtype;
  const auto flag = [&](std::string_view name) { return AttrOr(attrs, name, false); };
  const Has has = {flag("noop"), flag("h"),     flag("row"),
                   flag("col"),  flag("dbias"), scaling == Scaling::kMxfp8};
  const size_t n_rets = has.Count() + n_extras;
  const size_t n_scale = scaling == Scaling::kTensor;
  const size_t n_args = n_own + n_scale + (has.noop ? 1 + n_rets : 0);
  TE_ASSIGN_OR_RETURN(all, Collect(where, args, rets, n_args, n_rets));
  if (has.noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(where, all));
    call.kept = keep;
  }
  const auto own = all.args.begin() + has.noop;
  call.own.assign(own, own + static_cast<ptrdiff_t>(n_own));
  if (scaling == Scaling::kTensor) {
    const ffi::AnyBuffer& scale = own[static_cast<ptrdiff_t>(n_own)];
    TE_RETURN_IF_ERROR(CheckCount(where, "scale", scale, ffi::DataType::F32, 1));
    call.scale = FlushScale(*scale.typed_data<float>());
  }
  const auto extras = all.rets.begin() + static_cast<ptrdiff_t>(has.Count());
  call.results.assign(all.rets.begin(), extras);
  call.extras.assign(extras, all.rets.end());
  TE_RETURN_IF_ERROR(AssignResults(has, &call));
  return call;
}

ffi::Error CheckResults(const FusedCall& call, const FusedShape& shape) {
  constexpr ffi::DataType kTypes[] = {ffi::DataType::F32, ffi::DataType::BF16, ffi::DataType::F16};
  const int64_t size = shape.rows * shape.Width();
  size_t at = 0;
  const auto check = [&](bool there, std::string_view name, ffi::DataType type, int64_t count) {
    if (!there) return ffi::Error::Success();
    const ffi::AnyBuffer& buffer = call.results[at++];
    AdviseHugePages(buffer);
    return CheckCount(call.where, name, buffer, type, count);
  };
  const auto code = [](Format format) {
    return format == Format::kE4M3 ? ffi::DataType::F8E4M3FN : ffi::DataType::F8E5M2;
  };
  constexpr ffi::DataType kByte = ffi::DataType::U8;
  TE_RETURN_IF_ERROR(check(call.h != nullptr, "h", kTypes[static_cast<int>(call.dtype)], size));
  TE_RETURN_IF_ERROR(check(call.row != nullptr, "row", code(call.row_format), size));
  TE_RETURN_IF_ERROR(check(call.row_scale != nullptr, "row_scale", kByte,
                           shape.rows * CeilDiv(shape.Width(), kMxBlock)));
  TE_RETURN_IF_ERROR(check(call.col != nullptr, "col", code(call.col_format), size));
  TE_RETURN_IF_ERROR(check(call.col_scale != nullptr, "col_scale", kByte,
                           CeilDiv(shape.rows, kMxBlock) * shape.Width()));
  TE_RETURN_IF_ERROR(check(call.dbias != nullptr, "dbias", ffi::DataType::F32, shape.Width()));
  return check(true, "amax", ffi::DataType::F32, 2);
}

namespace {

// How h is cut. A tile has `cols` columns of every slice.
struct Tiling {
  int64_t rows;
  int64_t cols;
};

constexpr int64_t kTileBytes = 256 << 10;  // two of them, operands and h, fit the L2 cache

Tiling ChooseTiling(const FusedCall& call, const FusedShape& shape, const Function* function,
                    int64_t threads) {
  // A transposed copy wants whole cache lines of it.
  Tiling tiling{call.scaling == Scaling::kTensor && call.col != nullptr ? 256 : kSumRows, 0};
  const int64_t fit = kTileBytes / call.Bytes() / shape.slices;
  if (function != nullptr && function->WholeBands()) {
    const auto smaller = [&] {
      return tiling.rows * shape.Width() > 2 * kTileBytes / call.Bytes() ||
             CeilDiv(shape.rows, tiling.rows) < 2 * threads;
    };
    while (tiling.rows > kSumRows && smaller()) tiling.rows /= 2;
  }
  tiling.cols = fit / tiling.rows / kMxBlock * kMxBlock;
  // A block may straddle two slices: then every tile has whole rows.
  const bool straddles = shape.slices > 1 && shape.cols % kMxBlock != 0;
  if (tiling.cols >= shape.cols || (call.scaling == Scaling::kMxfp8 && straddles)) {
    tiling.cols = shape.cols;
  }
  return tiling;
}

struct Region {  // of h, in memory
  int64_t row;
  int64_t rows;
  int64_t col;  // of all slices
  int64_t cols;
  const char* h;
  int64_t stride;
};

class Runner {
 public:
  Runner(const FusedCall& call, const FusedShape& shape, const Function* function,
         const void* ready, int64_t threads)
      : call_(call),
        shape_(shape),
        function_(function),
        ready_(static_cast<const char*>(ready)),
        tiling_(ChooseTiling(call, shape, function, threads)),
        sums_(call.dbias == nullptr ? 0 : shape.rows, shape.Width()) {}

  Amax Run(ffi::ThreadPool& pool) const {
    const int64_t down = CeilDiv(shape_.rows, tiling_.rows);
    const int64_t across = CeilDiv(shape_.cols, tiling_.cols);
    const bool bands = function_ != nullptr && function_->WholeBands();
    const int64_t rows = std::min(tiling_.rows, shape_.rows);
    const int64_t elements = rows * (bands ? shape_.cols : std::min(tiling_.cols, shape_.cols));
    const Pieces pieces = Cut(pool, bands ? down : down * across, elements * shape_.slices);
    const Amax amax = ParallelAmax(pool, pieces, [&](int64_t begin, int64_t end, Amax* part) {
      const std::unique_ptr<char, decltype(&std::free)> scratch(Scratch(), &std::free);
      for (int64_t i = begin; i < end; ++i) {
        if (!bands) {
          Tile(i / across, i % across, scratch.get(), part);
          continue;
        }
        const int64_t row = i * tiling_.rows;
        function_->Prepare(row, std::min(tiling_.rows, shape_.rows - row));
        for (int64_t j = 0; j < across; ++j) Tile(i, j, scratch.get(), part);
      }
    });
    if (call_.dbias != nullptr) sums_.Join(pool, call_.dbias);
    return amax;
  }

 private:
  char* Scratch() const {
    if (call_.h != nullptr || ready_ != nullptr) return nullptr;
    const int64_t bytes = tiling_.rows * tiling_.cols * shape_.slices * call_.Bytes();
    return static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
  }

  void Tile(int64_t down, int64_t across, char* scratch, Amax* amax) const {
    Piece piece;
    piece.row = down * tiling_.rows;
    piece.rows = std::min(tiling_.rows, shape_.rows - piece.row);
    piece.col = across * tiling_.cols;
    piece.cols = std::min(tiling_.cols, shape_.cols - piece.col);
    const char* h = ready_ == nullptr ? call_.h : ready_;
    if (h == nullptr) {
      h = scratch;
      piece.slice_stride = piece.cols;
      piece.stride = piece.cols * shape_.slices;
    } else {
      h += (piece.row * shape_.Width() + piece.col) * call_.Bytes();
      piece.slice_stride = shape_.cols;
      piece.stride = shape_.Width();
    }
    if (ready_ == nullptr) {
      piece.to = const_cast<char*>(h);
      function_->Produce(piece);
    }
    const bool whole = piece.cols == shape_.cols;  // then the slices are neighbours
    for (int64_t s = 0; s < (whole ? 1 : shape_.slices); ++s) {
      Consume(
          {piece.row, piece.rows, s * shape_.cols + piece.col, whole ? shape_.Width() : piece.cols,
           h + s * piece.slice_stride * call_.Bytes(), piece.stride},
          amax);
    }
  }

  void Consume(const Region& r, Amax* amax) const {
    const Kernels& kernels = Table();
    if (call_.scaling == Scaling::kTensor) {
      kernels.quantize_tensor(TensorPart(r), amax);
    } else if (call_.scaling == Scaling::kMxfp8) {
      for (int64_t i = 0; i < r.rows; i += kMxBlock) {
        for (int64_t c = 0; c < r.cols; c += kMxTileCols) {
          kernels.quantize_mxfp8(Mxfp8Part(r, i, c), amax);
        }
      }
    } else {
      for (int64_t i = 0; i < r.rows; ++i) {
        kernels.amax(call_.dtype, r.h + i * r.stride * call_.Bytes(), r.cols, amax);
      }
    }
    for (int64_t i = 0; call_.dbias != nullptr && i < r.rows; i += kSumRows) {
      kernels.sum_rows(call_.dtype, r.h + i * r.stride * call_.Bytes(), r.stride,
                       std::min(kSumRows, r.rows - i), r.cols, sums_.Block(r.row + i) + r.col);
    }
  }

  TensorTile TensorPart(const Region& r) const {
    const int64_t width = shape_.Width();
    TensorTile t;
    t.dtype = call_.dtype;
    t.x = r.h;
    t.x_stride = r.stride;
    t.rows = r.rows;
    t.cols = r.cols;
    t.scale = call_.scale;
    t.row_format = call_.row_format;
    t.row = call_.row == nullptr ? nullptr : call_.row + r.row * width + r.col;
    t.row_stride = width;
    t.col_format = call_.col_format;
    t.col = call_.col == nullptr ? nullptr : call_.col + r.col * shape_.rows + r.row;
    t.col_stride = shape_.rows;
    return t;
  }

  Mxfp8Tile Mxfp8Part(const Region& r, int64_t i, int64_t c) const {
    const int64_t width = shape_.Width();
    const int64_t inner = CeilDiv(width, kMxBlock);
    const int64_t at = (r.row + i) * width + r.col + c;
    Mxfp8Tile t;
    t.dtype = call_.dtype;
    t.x = r.h + (i * r.stride + c) * call_.Bytes();
    t.x_stride = r.stride;
    t.rows = std::min<int64_t>(kMxBlock, r.rows - i);
    t.cols = std::min<int64_t>(kMxTileCols, r.cols - c);
    t.code_stride = width;
    t.row_format = call_.row_format;
    t.row = call_.row == nullptr ? nullptr : call_.row + at;
    t.row_scale = call_.row_scale + (r.row + i) * inner + (r.col + c) / kMxBlock;
    t.row_scale_stride = inner;
    t.col_format = call_.col_format;
    t.col = call_.col == nullptr ? nullptr : call_.col + at;
    t.col_scale = call_.col_scale + (r.row + i) / kMxBlock * width + r.col + c;
    return t;
  }

  const FusedCall& call_;
  const FusedShape& shape_;
  const Function* function_;  // null if h is `ready_`
  const char* ready_;
  Tiling tiling_;
  RowSums sums_;
};

void Run(ffi::ThreadPool& pool, const FusedCall& call, const FusedShape& shape,
         const Function* function, const void* ready) {
  Amax amax;
  if (shape.rows * shape.Width() > 0) {
    amax = Runner(call, shape, function, ready, Threads(pool)).Run(pool);
  } else if (call.dbias != nullptr) {
    RowSums(0, shape.Width()).Join(pool, call.dbias);
  }
  WriteAmax(amax, call.amax);
}

}  // namespace

void RunFused(ffi::ThreadPool& pool, const FusedCall& call, const FusedShape& shape,
              const Function& function) {
  Run(pool, call, shape, &function, nullptr);
}

void RunFused(ffi::ThreadPool& pool, const FusedCall& call, const FusedShape& shape,
              const void* h) {
  Run(pool, call, shape, nullptr, h);
}

void RowSums::Join(ffi::ThreadPool& pool, float* sums) const {
  constexpr int64_t kCols = 1024;
  const Pieces pieces = Cut(pool, CeilDiv(cols_, kCols), (blocks_ + 1) * kCols);
  ParallelFor(pool, pieces, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kCols;
    Table().sum_rows(Float::kF32, sums_.get() + first, cols_, blocks_,
                     std::min(cols_, end * kCols) - first, sums + first);
  });
}

}  // namespace te_flax::cpu
