#include "cpu/fused.h"

#include <cstdlib>
#include <memory>
#include <string>

#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {}  // namespace

ffi::ErrorOr<FusedCall> ReadFused(std::string_view where, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets, ffi::Dictionary attrs, size_t n_own,
                                  size_t n_extras) {
  FusedCall call;
  TE_RETURN_IF_ERROR(
      te_flax::ReadFused(where, args, rets, attrs, n_own, n_extras, Workspace::kNever, &call));
  if (call.has.noop) {
    TE_ASSIGN_OR_RETURN(keep, KeepsPrevious(where, call.all));
    call.kept = keep;
  }
  return call;
}

ffi::Error CheckResults(const FusedCall& call, const FusedShape& shape) {
  for (const ffi::AnyBuffer& result : call.results) AdviseHugePages(result);
  return te_flax::CheckResults(call, shape);
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
    t.scale = FlushScale(*call_.scale);
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
