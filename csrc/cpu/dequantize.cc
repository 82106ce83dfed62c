// FFI handlers that turn FP8 and FP6 codes back into float32, bfloat16 or float16.
//
// No vector code: all that depends on a code is looked up in tables of 256 entries.
#include "cpu/fp6.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

constexpr int64_t kPiece = 32 << 10;
constexpr int64_t kFloatBlock = 128;

// float32 bits of every code; NaN loses its sign.
void DecodeTable(Format format, uint32_t* table) {
  const bool e4m3 = format == Format::kE4M3;
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t magnitude = code & 0x7f;
    const uint32_t sign = (code & 0x80) << 24;
    uint32_t bits = e4m3 ? DecodeMagnitude<Format::kE4M3>(magnitude)
                         : DecodeMagnitude<Format::kE5M2>(magnitude);
    if (!e4m3 && magnitude == 0x7c) bits = kInf;
    const bool nan = e4m3 ? magnitude == 0x7f : magnitude > 0x7c;
    table[code] = nan ? kQuietNan : bits | sign;
  }
}

// One factor for many codes: value * factor, or value * lifted * 2^-64 where the factor is small.
struct Factor {
  float factor;
  bool lifted;
};

inline uint32_t Scaled(uint32_t value, Factor f) {
  const uint32_t u = BitCast<uint32_t>(BitCast<float>(value) * f.factor);
  const uint32_t a = u & kAbs;
  if (a > kInf) return kQuietNan;
  if (!f.lifted) return u;
  if (a < 0x20800000u) return u & ~kAbs;  // 2^-62: the result is below 2^-126
  return BitCast<uint32_t>(BitCast<float>(u) * 0x1p-64f);
}

inline Factor TensorFactor(float scale_inv) {
  const float scale = FlushScale(scale_inv);
  const bool lifted = (BitCast<uint32_t>(scale) & kAbs) < 0x21800000u;  // 2^-60
  return {lifted ? scale * 0x1p64f : scale, lifted};
}

inline Factor BlockFactor(uint8_t e8m0) {
  if (e8m0 == 255) return {BitCast<float>(kQuietNan), false};
  const bool lifted = e8m0 < 64;
  return {BitCast<float>(static_cast<uint32_t>(e8m0 + (lifted ? 64 : 0)) << 23), lifted};
}

// Rounds float32 bits once, to nearest even.
template <Float out>
struct Narrow;
template <>
struct Narrow<Float::kF32> {
  using Type = uint32_t;
  static Type Of(uint32_t bits) { return bits; }
};
template <>
struct Narrow<Float::kBf16> {
  using Type = uint16_t;
  static Type Of(uint32_t bits) {
    if ((bits & kAbs) > kInf) return 0x7fc0;
    return static_cast<Type>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};
template <>
struct Narrow<Float::kF16> {
  using Type = uint16_t;
  static Type Of(uint32_t bits) {
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t a = bits & kAbs;
    if (a > kInf) return 0x7e00;
    if (a < 0x38800000u) {  // 2^-14: the last place of 0.5 is float16's smallest subnormal
      const uint32_t sum = BitCast<uint32_t>(BitCast<float>(a) + 0.5f);
      return static_cast<Type>(sign | (sum - 0x3f000000u));
    }
    const uint32_t rounded = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    return static_cast<Type>(sign | (rounded < 0x7c00 ? rounded : 0x7c00));
  }
};

// What the handlers share: the codes as a matrix, and where the values go.
struct Job {
  const uint8_t* codes = nullptr;
  uint32_t decode[256] = {};  // by the code; FP6: the first 64
  int64_t rows = 1;
  int64_t cols = 1;
  void* out = nullptr;
  Float dtype = Float::kF32;
};

ffi::ErrorOr<Job> MakeJob(std::string_view where, const ffi::AnyBuffer& data,
                          const ffi::AnyBuffer& x, int64_t k_ndim) {
  TE_ASSIGN_OR_RETURN(format, FormatOf(where, "data", data.element_type()));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(where, "x", x.element_type()));
  const Dims dims = data.dimensions();
  if (k_ndim < 0 || k_ndim > static_cast<int64_t>(dims.size())) {
    return ffi::Unexpected(
        Invalid(where, "k_ndim", "be at most data's rank", std::to_string(k_ndim), kReport));
  }
  const size_t split = dims.size() - static_cast<size_t>(k_ndim);
  Job job;
  job.codes = static_cast<const uint8_t*>(data.untyped_data());
  DecodeTable(format, job.decode);
  job.rows = Product(dims, 0, split);
  job.cols = Product(dims, split, dims.size());
  job.out = x.untyped_data();
  job.dtype = dtype;
  TE_RETURN_IF_ERROR(CheckCount(where, "x", x, x.element_type(), job.rows * job.cols));
  AdviseHugePages(x);
  return job;
}

template <Float out>
void WriteTensor(ffi::ThreadPool& pool, const Job& job, float scale_inv) {
  using Type = typename Narrow<out>::Type;
  Type table[256];
  const Factor factor = TensorFactor(scale_inv);
  for (int i = 0; i < 256; ++i) table[i] = Narrow<out>::Of(Scaled(job.decode[i], factor));
  const int64_t n = job.rows * job.cols;
  Type* x = static_cast<Type*>(job.out);
  const Pieces pieces = Cut(pool, (n + kPiece - 1) / kPiece, kPiece);
  ParallelFor(pool, pieces, [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(n, end * kPiece);
    for (int64_t i = begin * kPiece; i < last; ++i) x[i] = table[job.codes[i]];
  });
}

// Scales are [rows, ceil(cols / 32)] for axis 1 and [ceil(rows / 32), cols] for axis 0.
template <Float out>
void WriteBlocks(ffi::ThreadPool& pool, const Job& job, const uint8_t* scales, bool rowwise) {
  using Type = typename Narrow<out>::Type;
  Type* x = static_cast<Type*>(job.out);
  Factor factors[256];
  for (int e = 0; e < 256; ++e) factors[e] = BlockFactor(static_cast<uint8_t>(e));
  const int64_t blocks = (job.cols + kMxBlock - 1) / kMxBlock;
  ParallelFor(pool, Cut(pool, job.rows, job.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* row = scales + (rowwise ? r * blocks : r / kMxBlock * job.cols);
      for (int64_t c = 0; c < job.cols; ++c) {
        const uint8_t e8m0 = row[rowwise ? c / kMxBlock : c];
        const int64_t i = r * job.cols + c;
        x[i] = Narrow<out>::Of(Scaled(job.decode[job.codes[i]], factors[e8m0]));
      }
    }
  });
}

// Scales are float32, [ceil(rows / high), ceil(cols / 128)].
template <Float out>
void WriteFloatBlocks(ffi::ThreadPool& pool, const Job& job, const float* scales, int64_t high) {
  using Type = typename Narrow<out>::Type;
  Type* x = static_cast<Type*>(job.out);
  const int64_t blocks = (job.cols + kFloatBlock - 1) / kFloatBlock;
  ParallelFor(pool, Cut(pool, job.rows, job.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = scales + r / high * blocks;
      for (int64_t c = 0; c < job.cols; c += kFloatBlock) {
        const Factor factor = TensorFactor(row[c / kFloatBlock]);
        const int64_t last = r * job.cols + std::min(c + kFloatBlock, job.cols);
        for (int64_t i = r * job.cols + c; i < last; ++i) {
          x[i] = Narrow<out>::Of(Scaled(job.decode[job.codes[i]], factor));
        }
      }
    }
  });
}

// FP6 codes in groups of three bytes. Scales are [rows, ceil(cols / 32)] for axis 1 and
// [ceil(rows / 32), cols] for axis 0.
template <Float out>
void WriteFp6Blocks(ffi::ThreadPool& pool, const Job& job, const uint8_t* scales, bool rowwise) {
  using Type = typename Narrow<out>::Type;
  Type* x = static_cast<Type*>(job.out);
  Factor factors[256];
  for (int e = 0; e < 256; ++e) factors[e] = BlockFactor(static_cast<uint8_t>(e));
  const int64_t blocks = (job.cols + kMxBlock - 1) / kMxBlock;
  ParallelFor(pool, Cut(pool, job.rows, job.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* row = scales + (rowwise ? r * blocks : r / kMxBlock * job.cols);
      for (int64_t c = 0; c < job.cols; c += kFp6Group) {
        const int64_t i = r * job.cols + c;
        const uint32_t word = LoadFp6Group(job.codes + i / kFp6Group * kFp6Bytes);
        for (int j = 0; j < kFp6Group; ++j) {
          const uint8_t e8m0 = row[rowwise ? c / kMxBlock : c + j];
          x[i + j] = Narrow<out>::Of(Scaled(job.decode[word >> 6 * j & 63], factors[e8m0]));
        }
      }
    }
  });
}

ffi::Error DequantizeTensorImpl(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                                ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary) {
  TE_RETURN_IF_ERROR(CheckCount("dequantize", "scale_inv", scale_inv, ffi::DataType::F32, 1));
  TE_ASSIGN_OR_RETURN(job, MakeJob("dequantize", data, *x, 0));
  const float scale = *scale_inv.typed_data<float>();
  switch (job.dtype) {
    case Float::kF32:
      WriteTensor<Float::kF32>(pool, job, scale);
      break;
    case Float::kBf16:
      WriteTensor<Float::kBf16>(pool, job, scale);
      break;
    case Float::kF16:
      WriteTensor<Float::kF16>(pool, job, scale);
      break;
  }
  return ffi::Error::Success();
}

ffi::Error DequantizeMxfp8Impl(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_mxfp8";
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(axis, Attr<int64_t>(kWhere, attrs, "axis"));
  TE_ASSIGN_OR_RETURN(job, MakeJob(kWhere, data, *x, k_ndim));
  const bool rowwise = axis == 1;
  const int64_t blocked = rowwise ? job.cols : job.rows;
  const int64_t count = (blocked + kMxBlock - 1) / kMxBlock * (rowwise ? job.rows : job.cols);
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", scale, ffi::DataType::U8, count));
  const auto* scales = static_cast<const uint8_t*>(scale.untyped_data());
  switch (job.dtype) {
    case Float::kF32:
      WriteBlocks<Float::kF32>(pool, job, scales, rowwise);
      break;
    case Float::kBf16:
      WriteBlocks<Float::kBf16>(pool, job, scales, rowwise);
      break;
    case Float::kF16:
      WriteBlocks<Float::kF16>(pool, job, scales, rowwise);
      break;
  }
  return ffi::Error::Success();
}

ffi::Error DequantizeMxfp6Impl(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_mxfp6";
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(axis, Attr<int64_t>(kWhere, attrs, "axis"));
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, data, k_ndim + 1));
  Job job;
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x->element_type()));
  job.dtype = dtype;
  job.codes = static_cast<const uint8_t*>(data.untyped_data());
  job.rows = extent.rows;
  job.cols = extent.cols / kFp6Bytes * kFp6Group;
  job.out = x->untyped_data();
  WithFp6(format, [&](auto of) {
    for (uint32_t code = 0; code < 64; ++code) job.decode[code] = DecodeFp6<of()>(code);
  });
  const bool rowwise = axis == 1;
  const int64_t blocked = rowwise ? job.cols : job.rows;
  const int64_t count = (blocked + kMxBlock - 1) / kMxBlock * (rowwise ? job.rows : job.cols);
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", scale, ffi::DataType::U8, count));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, x->element_type(), job.rows * job.cols));
  AdviseHugePages(*x);
  WithFloat(dtype, [&](auto type) {
    WriteFp6Blocks<type()>(pool, job, scale.typed_data<uint8_t>(), rowwise);
  });
  return ffi::Error::Success();
}

ffi::Error DequantizeBlockImpl(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                               ffi::Result<ffi::AnyBuffer> x, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "dequantize_block";
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(rows, Attr<int64_t>(kWhere, attrs, "rows"));
  TE_ASSIGN_OR_RETURN(job, MakeJob(kWhere, data, *x, k_ndim));
  const int64_t count = (job.rows + rows - 1) / rows * ((job.cols + kFloatBlock - 1) / kFloatBlock);
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", scale_inv, ffi::DataType::F32, count));
  const float* scales = scale_inv.typed_data<float>();
  switch (job.dtype) {
    case Float::kF32:
      WriteFloatBlocks<Float::kF32>(pool, job, scales, rows);
      break;
    case Float::kBf16:
      WriteFloatBlocks<Float::kBf16>(pool, job, scales, rows);
      break;
    case Float::kF16:
      WriteFloatBlocks<Float::kF16>(pool, job, scales, rows);
      break;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeTensor, DequantizeTensorImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data [D..]
                                  .Arg<ffi::AnyBuffer>()  // scale_inv f32[]
                                  .Ret<ffi::AnyBuffer>()  // x [D..]
                                  .Attrs());              // out_dtype: x has it

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeMxfp8, DequantizeMxfp8Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data [M.. K..]
                                  .Arg<ffi::AnyBuffer>()  // scale u8 [M.. K../32] or [M../32 K..]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K..]
                                  .Attrs());              // k_ndim, axis (1 row, 0 col)

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeMxfp6, DequantizeMxfp6Impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data u8 [M.. K.. 3]
                                  .Arg<ffi::AnyBuffer>()  // scale u8 [M.. K../8] or [M../32 K.. 4]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K.. 4]
                                  .Attrs());              // k_ndim, format, axis (1 row, 0 col)

XLA_FFI_DEFINE_HANDLER_SYMBOL(DequantizeBlock, DequantizeBlockImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data [M.. K..]
                                  .Arg<ffi::AnyBuffer>()  // scale_inv f32 [M../rows K../128]
                                  .Ret<ffi::AnyBuffer>()  // x [M.. K..]
                                  .Attrs());              // k_ndim, rows (1 or 128)

}  // namespace te_flax::cpu
