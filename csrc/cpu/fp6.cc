// FFI handlers of the FP6 codes: encode, decode, pack, unpack.
#include "cpu/fp6.h"

#include "cpu/operands.h"
#include "cpu/parallel.h"

namespace te_flax::cpu {
namespace {

constexpr int64_t kPiece = 32 << 10;  // elements

// Calls fn(begin, end) for ranges of n elements.
template <typename Fn>
void ForElements(ffi::ThreadPool& pool, int64_t n, const Fn& fn) {
  ParallelFor(pool, Cut(pool, CeilDiv(n, kPiece), kPiece),
              [&](int64_t begin, int64_t end) { fn(begin * kPiece, std::min(n, end * kPiece)); });
}

ffi::Error Fp6EncodeImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes,
                         ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_encode";
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  TE_ASSIGN_OR_RETURN(dtype, FloatOf(kWhere, "x", x.element_type()));
  const auto n = static_cast<int64_t>(x.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", *codes, ffi::DataType::U8, n));
  const Kernels& kernels = Table();
  const auto* from = static_cast<const char*>(x.untyped_data());
  uint8_t* to = codes->typed_data<uint8_t>();
  const int64_t bytes = dtype == Float::kF32 ? 4 : 2;
  ForElements(pool, n, [&](int64_t begin, int64_t end) {
    kernels.encode_fp6(dtype, format, from + begin * bytes, end - begin, to + begin);
  });
  return ffi::Error::Success();
}

ffi::Error Fp6DecodeImpl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::Result<ffi::AnyBuffer> x,
                         ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_decode";
  TE_ASSIGN_OR_RETURN(format, Fp6Of(kWhere, "format", attrs));
  const auto n = static_cast<int64_t>(codes.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, ffi::DataType::U8, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "x", *x, ffi::DataType::F32, n));
  const uint8_t* from = codes.typed_data<uint8_t>();
  float* to = x->typed_data<float>();
  WithFp6(format, [&](auto of) {
    float table[64];
    for (uint32_t code = 0; code < 64; ++code) table[code] = BitCast<float>(DecodeFp6<of()>(code));
    ForElements(pool, n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = table[from[i] & 63];
    });
  });
  return ffi::Error::Success();
}

ffi::Error Fp6PackImpl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::Result<ffi::AnyBuffer> data,
                       ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "fp6_pack";
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, codes, k_ndim));
  const int64_t groups = CeilDiv(extent.cols, kFp6Group);
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", codes, ffi::DataType::U8, extent.size()));
  TE_RETURN_IF_ERROR(
      CheckCount(kWhere, "data", *data, ffi::DataType::U8, extent.rows * groups * kFp6Bytes));
  const uint8_t* from = codes.typed_data<uint8_t>();
  uint8_t* to = data->typed_data<uint8_t>();
  ParallelFor(pool, Cut(pool, extent.rows, extent.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t c = g * kFp6Group;
        const uint32_t word = JoinFp6(from + r * extent.cols + c, extent.cols - c);
        StoreFp6Group(to + (r * groups + g) * kFp6Bytes, word);
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error Fp6UnpackImpl(ffi::ThreadPool pool, ffi::AnyBuffer data,
                         ffi::Result<ffi::AnyBuffer> codes, ffi::Dictionary) {
  constexpr std::string_view kWhere = "fp6_unpack";
  const auto groups = static_cast<int64_t>(data.element_count()) / kFp6Bytes;
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "data", data, ffi::DataType::U8, groups * kFp6Bytes));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "codes", *codes, ffi::DataType::U8, groups * kFp6Group));
  const uint8_t* from = data.typed_data<uint8_t>();
  uint8_t* to = codes->typed_data<uint8_t>();
  ForElements(pool, groups, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const uint32_t word = LoadFp6Group(from + g * kFp6Bytes);
      for (int j = 0; j < kFp6Group; ++j) to[g * kFp6Group + j] = word >> 6 * j & 63;
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Encode, Fp6EncodeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x [D..]
                                  .Ret<ffi::AnyBuffer>()  // codes u8 [D..]
                                  .Attrs());              // format

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Decode, Fp6DecodeImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [D..]
                                  .Ret<ffi::AnyBuffer>()  // x f32 [D..]
                                  .Attrs());              // format

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Pack, Fp6PackImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // codes u8 [M.. K..]
                                  .Ret<ffi::AnyBuffer>()  // data u8 [M.. K../4 3]
                                  .Attrs());              // k_ndim

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp6Unpack, Fp6UnpackImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data u8 [M.. K.. 3]
                                  .Ret<ffi::AnyBuffer>()  // codes u8 [M.. K.. 4]
                                  .Attrs());              // k_ndim

}  // namespace te_flax::cpu
