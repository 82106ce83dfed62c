// Sources of h = f(x0) [g(x1)] and of its cotangents. Raw pointers, no XLA or nanobind includes.
#ifndef TE_FLAX_CUDA_KERNELS_ACTIVATION_SOURCE_CUH_
#define TE_FLAX_CUDA_KERNELS_ACTIVATION_SOURCE_CUH_

#include "cuda/kernels/activation.cuh"
#include "cuda/kernels/source.cuh"

namespace te_flax::cuda {

// Eight elements of a type that is known when the kernel runs. Without kWide it has 16 bits.
template <bool kWide>
struct AnyPack {
  uint32_t words[kWide ? 8 : 4];

  template <Float dtype>
  __device__ void Take(const Pack<dtype>& pack) {
#pragma unroll
    for (int i = 0; i < Pack<dtype>::kWords; ++i) words[i] = pack.words[i];
  }

  template <Float dtype>
  __device__ Pack<dtype> As() const {
    Pack<dtype> pack;
#pragma unroll
    for (int i = 0; i < Pack<dtype>::kWords; ++i) pack.words[i] = words[i];
    return pack;
  }

  template <Float dtype>
  __device__ void WidenAs(int first, Group& v) const {
    const Pack<dtype> pack = As<dtype>();
#pragma unroll
    for (int j = 0; j < kGroup; ++j) v[j] = __uint_as_float(pack.Bits(first + j));
  }

  __device__ void Load(Float dtype, const void* __restrict__ x, int64_t index, int valid,
                       bool aligned) {
    if constexpr (kWide) {
      if (dtype == Float::kF32) {
        Pack<Float::kF32> pack;
        pack.Load(x, index, valid, aligned);
        return Take(pack);
      }
    }
    Pack<Float::kBf16> pack;  // float16 lies in memory alike
    pack.Load(x, index, valid, aligned);
    Take(pack);
  }

  // The elements from `first` on.
  __device__ void Widen(Float dtype, int first, Group& v) const {
    if constexpr (kWide) {
      if (dtype == Float::kF32) return WidenAs<Float::kF32>(first, v);
    }
    if (dtype == Float::kBf16) return WidenAs<Float::kBf16>(first, v);
    WidenAs<Float::kF16>(first, v);
  }
};

// h is x in another dtype.
template <Float dtype>
struct Rounded {
  static constexpr Float kType = dtype;
  static constexpr int kSlices = 1;
  static constexpr int kLoads = 1;
  static constexpr bool kFused = true;
  static constexpr bool kSums = true;
  static constexpr bool kWhole = false;
  using Raw = AnyPack<true>;
  struct Columns {};

  Float x_dtype;
  const void* x;
  int64_t k;

  __device__ Columns Begin(const Lane&) const { return {}; }
  __device__ void Load(const Position& at, Raw* raw) const {
    raw->Load(x_dtype, x, at.m * k + at.k, at.valid, at.aligned);
  }
  __device__ void Make(const Columns&, const Position&, const Raw& raw, Pack<dtype> (&h)[1]) const {
#pragma unroll
    for (int first = 0; first < kPack; first += kGroup) {
      Group wide, value, slope;
      raw.Widen(x_dtype, first, wide);
      Linear::At<false>(wide, {}, value, slope);
      h[0].Round(value, first);
    }
  }
};

// x [m, slices, k] and dy [m, k].
struct ActivationInput {
  Activation activation;
  int slices;
  Parameters parameters;
  int64_t k;
  Float x_dtype;
  const void* x;
  Float dy_dtype;
  const void* dy;
};

// What a kernel knows of its input when it is compiled: nothing,
struct AtRunTime {
  static constexpr bool kWhole = false;
  static constexpr int kMaxSlices = 2;
  __device__ static ActivationInput Of(const ActivationInput& in) { return in; }
};

// or all but the shape, which has whole tiles. That is less than half of the instructions.
template <Activation activation, int slices, Float dtype>
struct Known {
  static constexpr Float kType = dtype;
  static constexpr bool kWhole = true;
  static constexpr int kMaxSlices = slices;

  static bool Fits(const ActivationInput& in) {
    return in.activation == activation && in.slices == slices && in.x_dtype == dtype &&
           (in.dy == nullptr || in.dy_dtype == dtype);
  }
  __device__ static ActivationInput Of(ActivationInput in) {
    in.activation = activation;
    in.slices = slices;
    in.x_dtype = in.dy_dtype = dtype;
    return in;
  }
};

template <Float dtype, bool kWide, class Known>
struct ActivationForward {
  static constexpr Float kType = dtype;
  static constexpr int kSlices = 1;
  static constexpr bool kWhole = Known::kWhole;
  static constexpr int kLoads = Known::kMaxSlices == 1 ? kLaneRows : kWide ? 1 : 2;
  static constexpr bool kFused = true;
  static constexpr bool kSums = false;
  struct Raw {
    AnyPack<kWide> x[Known::kMaxSlices];
  };
  struct Columns {};

  ActivationInput given;

  __device__ Columns Begin(const Lane&) const { return {}; }

  __device__ void Load(const Position& at, Raw* raw) const {
    const ActivationInput in = Known::Of(given);
    const int64_t index = at.m * in.slices * in.k + at.k;
    raw->x[0].Load(in.x_dtype, in.x, index, at.valid, at.aligned);
    if (in.slices == 2) raw->x[1].Load(in.x_dtype, in.x, index + in.k, at.valid, at.aligned);
  }

  __device__ void Make(const Columns&, const Position&, const Raw& raw, Pack<dtype> (&h)[1]) const {
    const ActivationInput in = Known::Of(given);
#pragma unroll
    for (int first = 0; first < kPack; first += kGroup) {
      Group x, value, slope;
      raw.x[0].Widen(in.x_dtype, first, x);
      Activate<false>(in.activation, x, in.parameters, value, slope);
      if (in.slices == 2) {
        Group gate;
        raw.x[1].Widen(in.x_dtype, first, x);
        Gate<false>(in.activation, x, in.parameters, gate, slope);
#pragma unroll
        for (int j = 0; j < kGroup; ++j) value[j] = MulFtz(value[j], gate[j]);
      }
      h[0].Round(value, first);
    }
  }
};

// dx0 = dy f'(x0) g(x1) and dx1 = dy f(x0) g'(x1), or dx0 = dy f'(x0) alone.
template <int kSlices, bool kWide>
struct Cotangents {
  struct Raw {
    AnyPack<kWide> dy;
    AnyPack<kWide> x[kSlices];
  };

  // The elements from `first` on.
  __device__ static void Make(const ActivationInput& in, const Raw& raw, int first,
                              Group (&dx)[kSlices]) {
    Group x, dy, value, slope;
    raw.x[0].Widen(in.x_dtype, first, x);
    Activate<true>(in.activation, x, in.parameters, value, slope);
    raw.dy.Widen(in.dy_dtype, first, dy);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) dx[0][j] = MulFtz(dy[j], slope[j]);
    if constexpr (kSlices == 2) {
      Group gate, gate_slope;
      raw.x[1].Widen(in.x_dtype, first, x);
      Gate<true>(in.activation, x, in.parameters, gate, gate_slope);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        dx[0][j] = MulFtz(dx[0][j], gate[j]);
        dx[1][j] = MulFtz(MulFtz(dy[j], value[j]), gate_slope[j]);
      }
    }
  }
};

template <Float dtype, bool kWide, int slices, class Known>
struct ActivationBackward {
  static constexpr Float kType = dtype;
  static constexpr int kSlices = slices;
  static constexpr bool kWhole = Known::kWhole;
  static constexpr int kLoads = kWide || slices == 2 ? 1 : 2;
  static constexpr bool kFused = true;
  static constexpr bool kSums = true;
  using Raw = typename Cotangents<slices, kWide>::Raw;
  struct Columns {};

  ActivationInput given;

  __device__ Columns Begin(const Lane&) const { return {}; }

  __device__ void Load(const Position& at, Raw* raw) const {
    const ActivationInput in = Known::Of(given);
    raw->dy.Load(in.dy_dtype, in.dy, at.m * in.k + at.k, at.valid, at.aligned);
#pragma unroll
    for (int s = 0; s < slices; ++s) {
      const int64_t index = (at.m * slices + s) * in.k + at.k;
      raw->x[s].Load(in.x_dtype, in.x, index, at.valid, at.aligned);
    }
  }

  __device__ void Make(const Columns&, const Position&, const Raw& raw,
                       Pack<dtype> (&h)[slices]) const {
    const ActivationInput in = Known::Of(given);
#pragma unroll
    for (int first = 0; first < kPack; first += kGroup) {
      Group dx[slices];
      Cotangents<slices, kWide>::Make(in, raw, first, dx);
#pragma unroll
      for (int s = 0; s < slices; ++s) h[s].Round(dx[s], first);
    }
  }
};

// Both cotangents as one slice of 2 k columns, for MXFP8 blocks that straddle the slices and for
// what does not fit (kFitsMxfp8): element by element, and each is computed twice.
template <Float dtype>
struct StraddlingBackward {
  static constexpr Float kType = dtype;
  static constexpr int kSlices = 1;
  static constexpr int kLoads = 1;
  static constexpr bool kFused = true;
  static constexpr bool kSums = true;
  static constexpr bool kWhole = false;
  using Raw = Cotangents<2, true>::Raw;
  struct Columns {};

  ActivationInput in;

  __device__ Columns Begin(const Lane&) const { return {}; }

  __device__ void Load(const Position& at, Raw* raw) const {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const int64_t k = (at.k + j) % in.k;
      const bool valid = j < at.valid;
      raw->dy.words[j] = One(in.dy_dtype, in.dy, at.m * in.k + k, valid);
      raw->x[0].words[j] = One(in.x_dtype, in.x, at.m * 2 * in.k + k, valid);
      raw->x[1].words[j] = One(in.x_dtype, in.x, (at.m * 2 + 1) * in.k + k, valid);
    }
  }

  __device__ void Make(const Columns&, const Position& at, const Raw& raw,
                       Pack<dtype> (&h)[1]) const {
    ActivationInput wide = in;
    wide.x_dtype = wide.dy_dtype = Float::kF32;
#pragma unroll
    for (int first = 0; first < kPack; first += kGroup) {
      Group dx[2];
      Cotangents<2, true>::Make(wide, raw, first, dx);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (at.k + first + j >= in.k) dx[0][j] = dx[1][j];
      }
      h[0].Round(dx[0], first);
    }
  }

  // Float32 bits.
  __device__ static uint32_t One(Float type, const void* x, int64_t index, bool valid) {
    if (!valid) return 0;
    if (type == Float::kF32) return __ldg(static_cast<const uint32_t*>(x) + index);
    const uint16_t bits = __ldg(static_cast<const uint16_t*>(x) + index);
    if (type == Float::kBf16) return uint32_t{bits} << 16;
    return __float_as_uint(__half2float(__ushort_as_half(bits)));
  }
};

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_ACTIVATION_SOURCE_CUH_
