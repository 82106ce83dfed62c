// FFI handlers for the largest magnitude of a tensor and the scales that it asks for.
#include "cpu/kernels.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "cpu/scalar.h"

namespace te_flax::cpu {
namespace {

ffi::Error AmaxImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax) {
  TE_ASSIGN_OR_RETURN(matrix, AsMatrix("amax", x, 0));
  TE_RETURN_IF_ERROR(CheckCount("amax", "amax", *amax, ffi::DataType::F32, 2));
  constexpr int64_t kPiece = 32 << 10;
  const int64_t n = matrix.rows;
  const Kernels& kernels = Table();
  const Amax all = ParallelAmax(pool, Cut(pool, (n + kPiece - 1) / kPiece, kPiece),
                                [&](int64_t begin, int64_t end, Amax* part) {
                                  const int64_t first = begin * kPiece;
                                  kernels.amax(matrix.dtype, matrix.data + first * matrix.Bytes(),
                                               std::min(n, end * kPiece) - first, part);
                                });
  WriteAmax(all, *amax);
  return ffi::Error::Success();
}

// scale = clamp(max / a * 2^-margin), with a = max(amax, epsilon); 1 where that is 0 or not finite.
float ScaleOf(float amax, float epsilon, float max, float shrink, bool power_of_2) {
  const float a = FlushScale(amax);
  if (!((BitCast<uint32_t>(a) & kAbs) < kInf)) return 1.0f;
  const float floor = FlushScale(epsilon);
  const float largest = a > floor ? a : floor;
  if (!(largest > 0.0f)) return 1.0f;
  float scale = max / largest * shrink;
  scale = scale > 0x1p-126f ? (scale < 0x1p126f ? scale : 0x1p126f) : 0x1p-126f;
  return power_of_2 ? BitCast<float>(BitCast<uint32_t>(scale) & kInf) : scale;
}

ffi::Error AmaxToScaleImpl(ffi::AnyBuffer amax, ffi::Result<ffi::AnyBuffer> scale,
                           ffi::Result<ffi::AnyBuffer> scale_inv, ffi::Dictionary attrs) {
  constexpr std::string_view kWhere = "amax_to_scale";
  TE_ASSIGN_OR_RETURN(format, Attr<std::string_view>(kWhere, attrs, "format"));
  TE_ASSIGN_OR_RETURN(margin, Attr<int64_t>(kWhere, attrs, "margin"));
  TE_ASSIGN_OR_RETURN(power_of_2, Attr<bool>(kWhere, attrs, "power_of_2"));
  TE_ASSIGN_OR_RETURN(epsilon, Attr<float>(kWhere, attrs, "epsilon"));
  if (format != "e4m3" && format != "e5m2") {
    return Invalid(kWhere, "format", "be e4m3 or e5m2", format, kReport);
  }
  if (margin < 0 || margin > 126) {
    return Invalid(kWhere, "margin", "be in 0..126", std::to_string(margin), kReport);
  }
  const auto n = static_cast<int64_t>(amax.element_count());
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "amax", amax, ffi::DataType::F32, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale", *scale, ffi::DataType::F32, n));
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "scale_inv", *scale_inv, ffi::DataType::F32, n));
  const float max = format == "e4m3" ? 448.0f : 57344.0f;
  const float shrink = BitCast<float>(static_cast<uint32_t>(127 - margin) << 23);
  const TestingFloatMode mode;
  for (int64_t i = 0; i < n; ++i) {
    const float s = ScaleOf(amax.typed_data<float>()[i], epsilon, max, shrink, power_of_2);
    scale->typed_data<float>()[i] = s;
    scale_inv->typed_data<float>()[i] = 1.0f / s;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Amax, AmaxImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()    // x [D..]
                                  .Ret<ffi::AnyBuffer>());  // amax f32[2]

XLA_FFI_DEFINE_HANDLER_SYMBOL(AmaxToScale, AmaxToScaleImpl,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // amax f32[B..]
                                  .Ret<ffi::AnyBuffer>()  // scale f32[B..]
                                  .Ret<ffi::AnyBuffer>()  // scale_inv f32[B..]
                                  .Attrs());              // format, margin, power_of_2, epsilon

}  // namespace te_flax::cpu
