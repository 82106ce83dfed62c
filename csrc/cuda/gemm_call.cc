#include "cuda/gemm_call.h"

#include <array>

#include "cuda/launch.h"

namespace te_flax::cuda {
namespace {

namespace lt = ::te_flax::cublaslt;

constexpr std::string_view kWhere = "gemm";
constexpr int64_t kMxfp8Block = 32;

bool IsFp8(cudaDataType type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

int64_t ByteSize(cudaDataType type) { return IsFp8(type) ? 1 : type == CUDA_R_32F ? 4 : 2; }

cudaDataType CudaType(Float type) {
  return type == Float::kF32 ? CUDA_R_32F : type == Float::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
}

ffi::ErrorOr<cudaDataType> OperandType(const Side& side, ffi::DataType type, Scaling scaling) {
  if (scaling == Scaling::kNone) {
    if (type == ffi::DataType::BF16) return CUDA_R_16BF;
    if (type == ffi::DataType::F16) return CUDA_R_16F;
    return ffi::Unexpected(Invalid(kWhere, side.name, "be bfloat16 or float16",
                                   "type " + std::to_string(static_cast<int>(type)), kReport));
  }
  TE_ASSIGN_OR_RETURN(format, FormatOf(kWhere, side.name, type));
  return format == Format::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

ffi::ErrorOr<Scaling> ScalingOf(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames = {"none", "tensor", "mxfp8", "block_1d",
                                                      "block_2d"};
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Scaling>(i);
  }
  return ffi::Unexpected(Invalid(kWhere, "scaling", "be one that the handler serves", name,
                                 "use te.kernels('gemm=reference')"));
}

// Fills in an operand and returns the size of its contraction.
ffi::ErrorOr<int64_t> ReadSide(Side* side, const ffi::AnyBuffer& data, Scaling scaling,
                               int64_t k_ndim) {
  const auto ndim = static_cast<int64_t>(data.dimensions().size());
  TE_ASSIGN_OR_RETURN(extent, AsExtent(kWhere, data, side->last ? k_ndim : ndim - k_ndim));
  TE_ASSIGN_OR_RETURN(type, OperandType(*side, data.element_type(), scaling));
  side->data = data.untyped_data();
  side->type = type;
  side->rows = side->last ? extent.rows : extent.cols;
  if (!AlignedTo(side->data, kPointerAlignment)) {
    return ffi::Unexpected(
        Invalid(kWhere, side->name, "lie at a multiple of 16 bytes", "another address", kReport));
  }
  return side->last ? extent.cols : extent.rows;
}

ffi::Error ReadScale(Side* side, const ffi::AnyBuffer& scale, Scaling scaling, int64_t k) {
  const std::string name = std::string(side->name) + "_scale_inv";
  side->scale = scale.untyped_data();
  if (scaling == Scaling::kTensor) {
    return CheckCount(kWhere, name, scale, ffi::DataType::F32, 1);
  }
  if (scaling == Scaling::kMxfp8) {
    return CheckCount(kWhere, name, scale, ffi::DataType::U8, side->rows * CeilDiv(k, kMxfp8Block));
  }
  return CheckCount(kWhere, name, scale, ffi::DataType::F32,
                    CeilDiv(side->rows, side->scale_rows) * CeilDiv(k, 128));
}

// The operands, scales, bias and result of the call.
ffi::ErrorOr<Call> Read(const Operands& all, const ffi::Dictionary& attrs, bool bias) {
  Call call;
  TE_ASSIGN_OR_RETURN(k_ndim, Attr<int64_t>(kWhere, attrs, "k_ndim"));
  TE_ASSIGN_OR_RETURN(split, Attr<bool>(kWhere, attrs, "split_accumulator"));
  TE_ASSIGN_OR_RETURN(name, Attr<std::string_view>(kWhere, attrs, "scaling"));
  TE_ASSIGN_OR_RETURN(orientation, Attr<std::string_view>(kWhere, attrs, "orientation"));
  TE_ASSIGN_OR_RETURN(scaling, ScalingOf(name));
  call.scaling = scaling;
  call.lhs.name = "lhs";
  call.rhs.name = "rhs";
  call.lhs.last = orientation == "nn" || orientation == "nt";
  call.rhs.last = orientation == "nt" || orientation == "tt";
  call.rhs.scale_rows = scaling == Scaling::kBlock2d ? 128 : 1;
  TE_ASSIGN_OR_RETURN(k, ReadSide(&call.lhs, all.args[0], scaling, k_ndim));
  TE_ASSIGN_OR_RETURN(rhs_k, ReadSide(&call.rhs, all.args[1], scaling, k_ndim));
  if (rhs_k != k) {
    return ffi::Unexpected(Invalid(kWhere, "rhs", "have K.. = " + std::to_string(k) + " like lhs",
                                   std::to_string(rhs_k), kReport));
  }
  call.k = k;
  if (scaling != Scaling::kNone) {
    TE_RETURN_IF_ERROR(ReadScale(&call.lhs, all.args[2], scaling, k));
    TE_RETURN_IF_ERROR(ReadScale(&call.rhs, all.args[3], scaling, k));
  }
  if (bias) {
    const ffi::AnyBuffer& b = all.args.back();
    TE_RETURN_IF_ERROR(CheckCount(kWhere, "bias", b, b.element_type(), call.n()));
    TE_ASSIGN_OR_RETURN(type, FloatOf(kWhere, "bias", b.element_type()));
    call.bias_type = type;
    call.bias = b.untyped_data();
  }
  const ffi::AnyBuffer& out = all.rets[0];
  TE_RETURN_IF_ERROR(CheckCount(kWhere, "out", out, out.element_type(), call.m() * call.n()));
  TE_ASSIGN_OR_RETURN(out_type, FloatOf(kWhere, "out", out.element_type()));
  call.out_type = out_type;
  call.out = out.untyped_data();
  // Block scales need sums in registers anyway; fast accumulation excludes them.
  call.fast = !split && scaling == Scaling::kTensor;
  return call;
}

// Whether rows of 16-bit operands and results lie at multiples of 16 bytes. Where they do not, the
// library may add the bias in a kernel of its own, to a product that was already rounded.
bool AlignedRows(const Call& call) {
  const int64_t lhs = call.lhs.last ? call.k : call.m();
  const int64_t rhs = call.rhs.last ? call.k : call.n();
  return lhs % 8 == 0 && rhs % 8 == 0 && call.n() % 8 == 0;
}

// Whether cuBLASLt can write the result itself, with the bias.
bool WritesOut(const Call& call) {
  const bool blocks = call.scaling == Scaling::kBlock1d || call.scaling == Scaling::kBlock2d;
  const bool codes = blocks || call.scaling == Scaling::kTensor;
  const Float out = call.out_type;
  if (call.n() % 16 != 0 && codes) return false;
  if (call.m() % 16 != 0 && blocks) return false;
  if (out == Float::kF16 && (blocks || call.matmul.a == CUDA_R_16BF)) return false;
  if (out == Float::kBf16 && call.matmul.a == CUDA_R_16F) return false;
  if (call.bias == nullptr) return true;
  if (out != Float::kF32) return call.bias_type == out && (codes || AlignedRows(call));
  return call.bias_type == (codes ? Float::kBf16 : Float::kF32);
}

// Whether the GPU multiplies MXFP8 codes itself. Never run yet: there was no such GPU.
ffi::ErrorOr<bool> MultipliesMxfp8(const Call& call) {
  int device = 0, major = 0;
  TE_RETURN_IF_ERROR(CudaStatus(kWhere, cudaGetDevice(&device)));
  TE_RETURN_IF_ERROR(CudaStatus(
      kWhere, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)));
  const bool whole = call.m() % 16 == 0 && call.n() % 16 == 0 && call.k % kMxfp8Block == 0;
  const bool wide_bias = call.bias != nullptr && call.out_type == Float::kF32;
  return major >= 10 && call.lhs.last && call.rhs.last && whole && !wide_bias &&
         CublasLtVersion() >= 120800;
}

// Decides on copies of an operand and its scales. te_flax/ops/gemm_cuda.py counts the same bytes.
void PlaceSide(const Call& call, Scratch* scratch, Side* side) {
  const bool blocks = call.scaling == Scaling::kBlock1d || call.scaling == Scaling::kBlock2d;
  side->padded_rows = side->rows;
  if (call.widened) {
    side->copy = scratch->Take(2 * side->rows * call.k);
  } else if (call.scaling == Scaling::kMxfp8) {
    side->scale_copy = scratch->Take(CeilDiv(side->rows, 128) * CeilDiv(call.k, 128) * 512);
  } else if (call.scaling != Scaling::kNone) {
    if (blocks || side == &call.rhs) side->padded_rows = RoundUp(side->rows, 16);
    if (side->padded_rows != side->rows || call.padded_k != call.k) {
      side->copy = scratch->Take(side->padded_rows * call.padded_k);
    }
  }
  if (!blocks) return;
  const int64_t across = call.padded_k / 128;
  if (side->scale_rows == 1) {
    side->scale_copy = scratch->Take(4 * across * side->padded_rows);
  } else if (across % 4 != 0) {
    side->scale_copy = scratch->Take(4 * CeilDiv(side->padded_rows, 128) * RoundUp(across, 4));
  }
}

int32_t ScaleMode(const Call& call, const Side& side) {
  switch (call.scaling) {
    case Scaling::kTensor:  // where sums are finished apart, so are they scaled
      return call.sum == nullptr ? lt::kScaleTensor : kUnscaled;
    case Scaling::kMxfp8:
      return call.widened ? kUnscaled : lt::kScaleVec32;
    case Scaling::kBlock1d:
    case Scaling::kBlock2d:
      return side.scale_rows == 1 ? lt::kScaleVec128 : lt::kScaleBlock128;
    default:
      return kUnscaled;
  }
}

// Describes the product and lays out the scratch memory, which must hold enough.
ffi::Error Plan(Call* call, void* workspace, int64_t bytes) {
  Matmul& p = call->matmul;
  if (call->scaling == Scaling::kMxfp8) {
    TE_ASSIGN_OR_RETURN(native, MultipliesMxfp8(*call));
    call->widened = !native;
  }
  const bool blocks = call->scaling == Scaling::kBlock1d || call->scaling == Scaling::kBlock2d;
  const bool codes = blocks || call->scaling == Scaling::kTensor;
  call->padded_k = codes ? RoundUp(call->k, blocks ? 128 : 16) : call->k;
  p.a = call->widened ? CUDA_R_16BF : call->rhs.type;
  p.b = call->widened ? CUDA_R_16BF : call->lhs.type;
  Scratch scratch(workspace);
  call->at.workspace = scratch.Take(kLibraryBytes);
  for (Side* side : {&call->lhs, &call->rhs}) PlaceSide(*call, &scratch, side);
  const bool direct = WritesOut(*call);
  p.m = call->rhs.padded_rows;
  p.n = call->lhs.padded_rows;
  p.k = call->padded_k;
  const bool in_place = call->out_type == Float::kF32 && p.m == call->n() && p.n == call->m();
  if (!direct) {
    call->sum = static_cast<float*>(in_place ? call->out : scratch.Take(4 * p.m * p.n));
  }
  if (scratch.used() > bytes) {
    return Invalid(kWhere, "the scratch memory",
                   "have " + std::to_string(scratch.used()) + " bytes", std::to_string(bytes),
                   kReport);
  }
  p.trans_a = call->rhs.last;  // a row-major matrix is the transpose of a column-major one
  p.trans_b = !call->lhs.last;
  p.d = direct ? CudaType(call->out_type) : CUDA_R_32F;
  p.a_scale = ScaleMode(*call, call->rhs);
  p.b_scale = ScaleMode(*call, call->lhs);
  p.fast = call->fast;
  call->at.d = direct ? call->out : call->sum;
  if (direct && call->bias != nullptr) {
    p.epilogue = lt::kEpilogueBias;
    p.bias = CudaType(call->bias_type);
    call->at.bias = call->bias;
  }
  const auto used = [](const void* copy, const void* own) { return copy == nullptr ? own : copy; };
  call->at.a = used(call->rhs.copy, call->rhs.data);
  call->at.b = used(call->lhs.copy, call->lhs.data);
  call->at.a_scale = used(call->rhs.scale_copy, call->rhs.scale);
  call->at.b_scale = used(call->lhs.scale_copy, call->lhs.scale);
  return ffi::Error::Success();
}

}  // namespace

ffi::ErrorOr<Call> Describe(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                            const ffi::Dictionary& attrs) {
  const bool bias = AttrOr(attrs, "bias", false);
  const bool scaled = AttrOr<std::string_view>(attrs, "scaling", "") != "none";
  TE_ASSIGN_OR_RETURN(all, Collect(kWhere, args, rets, 2 + 2 * size_t{scaled} + size_t{bias}, 2));
  TE_ASSIGN_OR_RETURN(call, Read(all, attrs, bias));
  const ffi::AnyBuffer& workspace = all.rets[1];
  TE_RETURN_IF_ERROR(
      Plan(&call, workspace.untyped_data(), static_cast<int64_t>(workspace.size_bytes())));
  return call;
}

MatmulBuffers TuningBuffers(const Matmul& p, Scratch* scratch) {
  const auto scales = [](int64_t rows, int64_t k) {  // at least those of every mode
    return (rows + 128) * (CeilDiv(k, 128) * 4 + 4);
  };
  MatmulBuffers at;
  at.workspace = scratch->Take(kLibraryBytes);
  at.a = scratch->Take(p.m * p.k * ByteSize(p.a));
  at.b = scratch->Take(p.n * p.k * ByteSize(p.b));
  at.a_scale = scratch->Take(scales(p.m, p.k));
  at.b_scale = scratch->Take(scales(p.n, p.k));
  at.bias = scratch->Take(4 * p.m);
  at.d = scratch->Take(p.m * p.n * ByteSize(p.d));
  return at;
}

}  // namespace te_flax::cuda
