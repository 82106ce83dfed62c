// What the handlers of the fused ops share: h = f(..) is computed piece by piece, and while a piece
// is in the second-level cache the plain quantizers read it.
//
// So codes, scales, amax and the sum over the tokens are those of the rounded h, bit for bit, and
// memory sees h at most once. h lies in its result if the variant returns it, else in scratch.
#ifndef TE_FLAX_CPU_FUSED_H_
#define TE_FLAX_CPU_FUSED_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "common/fused.h"
#include "cpu/kernels.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"

namespace te_flax::cpu {

struct FusedCall : te_flax::FusedCall {
  bool kept = false;  // noop: the results are written, nothing is left to do
};

// A piece of h: rows [row, row + rows) of columns [col, col + cols) of every slice. Element (r, c)
// of slice s goes to to[(r - row) * stride + s * slice_stride + c - col], in the dtype of h.
struct Piece {
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
  void* to;
  int64_t stride;
  int64_t slice_stride;
};

// Computes h. The rows of a piece start at a multiple of kSumRows and its columns at one of 32.
class Function {
 public:
  virtual ~Function() = default;
  // True: one thread takes whole bands of rows, Prepare and then the columns from left to right.
  virtual bool WholeBands() const { return false; }
  // Before the pieces of these rows, if WholeBands().
  virtual void Prepare(int64_t /*row*/, int64_t /*rows*/) const {}
  virtual void Produce(const Piece& piece) const = 0;
};

// Reads a call as in common/fused.h, without workspace, and obeys noop.
ffi::ErrorOr<FusedCall> ReadFused(std::string_view where, ffi::RemainingArgs args,
                                  ffi::RemainingRets rets, ffi::Dictionary attrs, size_t n_own,
                                  size_t n_extras);

// Checks the sizes of all results but the extras, and asks for huge pages.
ffi::Error CheckResults(const FusedCall& call, const FusedShape& shape);

// Writes every result but the extras.
void RunFused(ffi::ThreadPool& pool, const FusedCall& call, const FusedShape& shape,
              const Function& function);
// The same for an h that lies in memory already, which the variant does not return.
void RunFused(ffi::ThreadPool& pool, const FusedCall& call, const FusedShape& shape, const void* h);

// Sums over rows take one order on every machine: one by one within blocks of kSumRows rows, then
// the blocks one by one.
constexpr int64_t kSumRows = 64;

// Sums of each block, to be joined.
class RowSums {
 public:
  RowSums(int64_t rows, int64_t cols)
      : blocks_((rows + kSumRows - 1) / kSumRows),
        cols_(cols),
        sums_(new float[static_cast<size_t>(blocks_ * cols)]) {}  // not initialized
  // The sums of the block that row belongs to, [cols].
  float* Block(int64_t row) const { return sums_.get() + row / kSumRows * cols_; }
  // Writes sums[cols]; without rows they are 0.
  void Join(ffi::ThreadPool& pool, float* sums) const;

 private:
  int64_t blocks_;
  int64_t cols_;
  std::unique_ptr<float[]> sums_;
};

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_FUSED_H_
