// The CPU kernels as tables of functions, one table per instruction set.
//
// A kernel sees one rectangular piece of a matrix, runs on the calling thread and knows neither
// XLA nor threads. This header and all that the vector files include use only <stdint.h>,
// <string.h> and <immintrin.h>: a std:: template compiled with -mavx2 could be the copy that the
// linker keeps for everybody (tests/test_build.py looks for weak symbols). Every table gives the
// same bits, whatever the FTZ and DAZ flags of the caller.
#ifndef TE_FLAX_CPU_KERNELS_H_
#define TE_FLAX_CPU_KERNELS_H_

#include <stdint.h>

#include "common/formats.h"

namespace te_flax::cpu {

// Largest finite magnitude as float32 bits (0 below 2^-126), and 1 if a NaN or an Inf was seen.
struct Amax {
  uint32_t finite = 0;
  uint32_t nonfinite = 0;
};

// One piece of x for tensor scaling. `row` and `col` may be null; col is the transpose of x.
struct TensorTile {
  Float dtype;
  const void* x;
  int64_t x_stride;  // elements between rows of x
  int64_t rows;
  int64_t cols;
  float scale;
  Format row_format;
  uint8_t* row;
  int64_t row_stride;
  Format col_format;
  uint8_t* col;  // element (r, c) goes to col[c * col_stride + r]
  int64_t col_stride;
};

// Runs of contiguous elements, each with a scale of its own, a positive normal number.
constexpr int kLongestRun = 128;
struct Runs {
  Float dtype;
  Format format;
  const void* x;
  int64_t x_stride;  // elements between the starts of two runs
  int64_t count;
  int64_t n;  // elements of a run, at most kLongestRun
  const float* scales;
  uint8_t* codes;
  int64_t code_stride;
};

constexpr int kMxBlock = 32;
// The widest piece that the MXFP8 kernels take: their scales live on the stack.
constexpr int kMxTileCols = 4096;

// One piece of x for MXFP8: at most 32 rows and kMxTileCols columns, starting at a block border
// in both directions. `row` and `col` may be null; both lie as x does.
struct Mxfp8Tile {
  Float dtype;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  int64_t cols;
  int64_t code_stride;  // of row and of col
  Format row_format;
  uint8_t* row;
  uint8_t* row_scale;  // [rows, ceil(cols / 32)], row_scale_stride apart
  int64_t row_scale_stride;
  Format col_format;
  uint8_t* col;
  uint8_t* col_scale;  // [cols]
};

// One block each way of x for MXFP6: at most 32 rows and 32 columns. `row` and `col` may be null;
// both hold rows of packed codes, the last group of a row filled with codes 0.
struct Mxfp6Tile {
  Float dtype;
  const void* x;
  int64_t x_stride;
  int64_t rows;
  int64_t cols;
  int64_t code_stride;  // bytes between rows of row and of col
  Format row_format;
  uint8_t* row;
  uint8_t* row_scale;  // [rows], row_scale_stride apart
  int64_t row_scale_stride;
  Format col_format;
  uint8_t* col;
  uint8_t* col_scale;  // [cols]
};

// One piece of h = f(x0) [g(x1)], or of [dx0, dx1] where dy is not null. Strides count elements.
struct ActivationTile {
  Activation activation;
  int slices;  // of x: 1 or 2
  float limit, alpha, offset;
  int64_t rows;
  int64_t cols;
  Float x_dtype;
  const void* x;
  int64_t x_stride;
  int64_t x_slice_stride;
  Float dy_dtype;
  const void* dy;
  int64_t dy_stride;
  Float h_dtype;
  void* h;
  int64_t h_stride;
  int64_t h_slice_stride;
};

// Some rows of a LayerNorm or an RMSNorm, or some columns of them. Statistics need whole rows.
struct NormTile {
  bool layernorm;
  int64_t rows;
  int64_t cols;
  Float x_dtype;
  const void* x;
  int64_t stride;      // elements between rows of x and of dy
  const float* gamma;  // [cols]
  const float* beta;   // [cols]; null: none
  float* mean;         // [rows], of a LayerNorm
  float* rstd;         // [rows]
  Float out_dtype;
  void* out;
  int64_t out_stride;
  // Backward, with g = dy * gamma and xhat = (x - mean) * rstd.
  Float dy_dtype;
  const void* dy;
  float* mean_g;       // [rows], of a LayerNorm
  float* mean_g_xhat;  // [rows]
};

// A row's results depend on that row only: sums over it run over a fixed tree of 16 lanes.
struct NormKernels {
  // Writes mean and rstd = 1 / sqrt(E[(x - mean)^2] + epsilon), NaN where the latter sum is.
  void (*stats)(const NormTile& tile, float epsilon);
  // out = (x - mean) * rstd * gamma + beta.
  void (*forward)(const NormTile& tile);
  // Writes mean_g and mean_g_xhat.
  void (*backward_stats)(const NormTile& tile);
  // out = (g - xhat * mean_g_xhat - mean_g) * rstd.
  void (*backward)(const NormTile& tile);
  // dgamma[c] = sum of dy * xhat, dbeta[c] = sum of dy, row after row; dbeta may be null.
  void (*backward_sums)(const NormTile& tile, float* dgamma, float* dbeta);
};

struct Kernels {
  const char* name;
  // Each of them joins what it saw into *amax.
  void (*amax)(Float dtype, const void* x, int64_t n, Amax* amax);
  void (*quantize_tensor)(const TensorTile& tile, Amax* amax);
  void (*quantize_runs)(const Runs& runs, Amax* amax);
  void (*quantize_mxfp8)(const Mxfp8Tile& tile, Amax* amax);
  void (*quantize_mxfp6)(const Mxfp6Tile& tile, Amax* amax);
  void (*encode_fp6)(Float dtype, Format format, const void* x, int64_t n, uint8_t* codes);
  // sums[c] = (x[0][c] + x[1][c]) + x[2][c] ..., in float32; 0 without rows, NaN is kQuietNan.
  void (*sum_rows)(Float dtype, const void* x, int64_t x_stride, int64_t rows, int64_t cols,
                   float* sums);
  void (*activate)(const ActivationTile& tile);
  NormKernels norm;
};

extern const Kernels kBaseKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The plain loops behind kBaseKernels. The vector kernels hand them what is rare: pieces with NaN
// or Inf, and scales that are not positive normal numbers.
void ScalarAmax(Float dtype, const void* x, int64_t n, Amax* amax) noexcept;
void ScalarQuantize(Float dtype, Format format, const void* x, int64_t n, float scale,
                    uint8_t* codes, Amax* amax) noexcept;
// Codes of one MXFP8 block whose e8m0 scale is known; the strides are between its elements.
void ScalarMxfp8Block(Float dtype, Format format, const void* x, int64_t x_stride,
                      int64_t code_stride, int64_t n, uint8_t e8m0, uint8_t* codes) noexcept;

}  // namespace te_flax::cpu

#endif  // TE_FLAX_CPU_KERNELS_H_
