// Plain loops for any processor: the meaning of the kernels, and the slow path of the vector ones.
#include "cpu/flush.h"
#include "cpu/fp6.h"
#include "cpu/kernels.h"
#include "cpu/lanes_base.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

#include "cpu/simd_activation.inc"
#include "cpu/simd_mxfp6.inc"
#include "cpu/simd_norm.inc"

inline void Join(uint32_t bits, Amax* amax) {
  const uint32_t a = bits & kAbs;
  if (a >= kInf) {
    amax->nonfinite = 1;
  } else if (a > amax->finite) {
    amax->finite = a;
  }
}

template <Float dtype>
void AmaxOf(const void* x, int64_t n, Amax* amax) {
  const auto* in = static_cast<const typename Element<dtype>::Type*>(x);
  for (int64_t i = 0; i < n; ++i) Join(Element<dtype>::Load(in[i]), amax);
}

template <Float dtype, Format format>
void QuantizeOf(const void* x, int64_t n, float scale, uint8_t* codes, Amax* amax) {
  const auto* in = static_cast<const typename Element<dtype>::Type*>(x);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = Element<dtype>::Load(in[i]);
    Join(bits, amax);
    codes[i] = Encode<format>(BitCast<uint32_t>(BitCast<float>(bits) * scale));
  }
}

template <Float dtype, Format format>
void BlockOf(const void* x, int64_t x_stride, int64_t code_stride, int64_t n, uint8_t e8m0,
             uint8_t* codes) {
  const auto* in = static_cast<const typename Element<dtype>::Type*>(x);
  // 2^-127 is subnormal, so a block with Inf is scaled in two normal steps.
  const float first = e8m0 == 254 ? 0x1p-63f : BitCast<float>((254u - (e8m0 % 254u)) << 23);
  const float second = e8m0 == 254 ? 0x1p-64f : 1.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float v = BitCast<float>(Element<dtype>::Load(in[i * x_stride]));
    codes[i * code_stride] =
        e8m0 == 255 ? kNanCode : Encode<format>(BitCast<uint32_t>(v * first * second));
  }
}

// Calls fn with the two enums as template arguments.
template <template <Float, Format> class Fn, typename... Args>
void Dispatch(Float dtype, Format format, Args... args) {
  const bool e4m3 = format == Format::kE4M3;
  if (dtype == Float::kF32) {
    e4m3 ? Fn<Float::kF32, Format::kE4M3>::Run(args...)
         : Fn<Float::kF32, Format::kE5M2>::Run(args...);
  } else if (dtype == Float::kBf16) {
    e4m3 ? Fn<Float::kBf16, Format::kE4M3>::Run(args...)
         : Fn<Float::kBf16, Format::kE5M2>::Run(args...);
  } else {
    e4m3 ? Fn<Float::kF16, Format::kE4M3>::Run(args...)
         : Fn<Float::kF16, Format::kE5M2>::Run(args...);
  }
}

template <Float dtype, Format format>
struct Quantize {
  static void Run(const void* x, int64_t n, float scale, uint8_t* codes, Amax* amax) {
    QuantizeOf<dtype, format>(x, n, scale, codes, amax);
  }
};

template <Float dtype, Format format>
struct Block {
  static void Run(const void* x, int64_t x_stride, int64_t code_stride, int64_t n, uint8_t e8m0,
                  uint8_t* codes) {
    BlockOf<dtype, format>(x, x_stride, code_stride, n, e8m0, codes);
  }
};

template <Float dtype, Format format>
struct Scale {
  static void Run(const void* x, int64_t stride, int64_t n, uint8_t* e8m0) {
    const auto* in = static_cast<const typename Element<dtype>::Type*>(x);
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t a = Element<dtype>::Load(in[i * stride]) & kAbs;
      largest = a > largest ? a : largest;
    }
    *e8m0 = BlockScale<format>(largest);
  }
};

inline const void* At(Float dtype, const void* x, int64_t i) {
  return static_cast<const char*>(x) + i * (dtype == Float::kF32 ? 4 : 2);
}

void BaseQuantizeTensor(const TensorTile& t, Amax* amax) {
  constexpr int64_t kSegment = 256;
  uint8_t codes[kSegment];
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; c += kSegment) {
      const int64_t n = t.cols - c < kSegment ? t.cols - c : kSegment;
      const void* x = At(t.dtype, t.x, r * t.x_stride + c);
      if (t.row != nullptr) {
        ScalarQuantize(t.dtype, t.row_format, x, n, t.scale, t.row + r * t.row_stride + c, amax);
      }
      if (t.col == nullptr) continue;
      ScalarQuantize(t.dtype, t.col_format, x, n, t.scale, codes, amax);
      for (int64_t i = 0; i < n; ++i) t.col[(c + i) * t.col_stride + r] = codes[i];
    }
  }
}

void BaseQuantizeRuns(const Runs& runs, Amax* amax) {
  for (int64_t r = 0; r < runs.count; ++r) {
    ScalarQuantize(runs.dtype, runs.format, At(runs.dtype, runs.x, r * runs.x_stride), runs.n,
                   runs.scales[r], runs.codes + r * runs.code_stride, amax);
  }
}

void BaseQuantizeMxfp8(const Mxfp8Tile& t, Amax* amax) {
  for (int64_t r = 0; r < t.rows; ++r) {
    ScalarAmax(t.dtype, At(t.dtype, t.x, r * t.x_stride), t.cols, amax);
    for (int64_t c = 0; t.row != nullptr && c < t.cols; c += kMxBlock) {
      const int64_t n = t.cols - c < kMxBlock ? t.cols - c : kMxBlock;
      const void* x = At(t.dtype, t.x, r * t.x_stride + c);
      uint8_t* e8m0 = t.row_scale + r * t.row_scale_stride + c / kMxBlock;
      Dispatch<Scale>(t.dtype, t.row_format, x, int64_t{1}, n, e8m0);
      Dispatch<Block>(t.dtype, t.row_format, x, int64_t{1}, int64_t{1}, n, *e8m0,
                      t.row + r * t.code_stride + c);
    }
  }
  for (int64_t c = 0; t.col != nullptr && c < t.cols; ++c) {
    const void* x = At(t.dtype, t.x, c);
    Dispatch<Scale>(t.dtype, t.col_format, x, t.x_stride, t.rows, t.col_scale + c);
    Dispatch<Block>(t.dtype, t.col_format, x, t.x_stride, t.code_stride, t.rows, t.col_scale[c],
                    t.col + c);
  }
}

template <Float dtype>
void SumRowsOf(const void* data, int64_t x_stride, int64_t rows, int64_t cols, float* sums) {
  const auto* x = static_cast<const typename Element<dtype>::Type*>(data);
  for (int64_t c = 0; c < cols; ++c) sums[c] = 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      // A sum below 2^-126 is exact, so it does not matter who flushes it.
      sums[c] = FlushScale(sums[c] + BitCast<float>(Element<dtype>::Load(x[r * x_stride + c])));
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    if (!(sums[c] == sums[c])) sums[c] = BitCast<float>(kQuietNan);
  }
}

void BaseSumRows(Float dtype, const void* x, int64_t x_stride, int64_t rows, int64_t cols,
                 float* sums) {
  if (dtype == Float::kF32) return SumRowsOf<Float::kF32>(x, x_stride, rows, cols, sums);
  if (dtype == Float::kBf16) return SumRowsOf<Float::kBf16>(x, x_stride, rows, cols, sums);
  return SumRowsOf<Float::kF16>(x, x_stride, rows, cols, sums);
}

}  // namespace

void ScalarAmax(Float dtype, const void* x, int64_t n, Amax* amax) noexcept {
  if (dtype == Float::kF32) return AmaxOf<Float::kF32>(x, n, amax);
  if (dtype == Float::kBf16) return AmaxOf<Float::kBf16>(x, n, amax);
  return AmaxOf<Float::kF16>(x, n, amax);
}

void ScalarQuantize(Float dtype, Format format, const void* x, int64_t n, float scale,
                    uint8_t* codes, Amax* amax) noexcept {
  Dispatch<Quantize>(dtype, format, x, n, scale, codes, amax);
}

void ScalarMxfp8Block(Float dtype, Format format, const void* x, int64_t x_stride,
                      int64_t code_stride, int64_t n, uint8_t e8m0, uint8_t* codes) noexcept {
  Dispatch<Block>(dtype, format, x, x_stride, code_stride, n, e8m0, codes);
}

const Kernels kBaseKernels = {
    "base",        ScalarAmax,   BaseQuantizeTensor, BaseQuantizeRuns, BaseQuantizeMxfp8,
    QuantizeMxfp6, EncodeFp6All, BaseSumRows,        Activate,         kNormKernels};

}  // namespace te_flax::cpu
