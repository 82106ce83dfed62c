// Activations and their derivatives, a few elements at a time. Raw pointers, no XLA or nanobind.
//
// Every step is one instruction whose rounding is named: the same element has the same bits in
// every kernel. In units of 2^-24 of the result, x sigmoid(u) = x / (1 + E) with E = exp(-u) sees
// near u = 0 half of E's error, 1 of 1 + E, 0.7 of the quotient after a Newton step and 1 of the
// product: 2.8 together with a correctly rounded E, over four million float32. The library promises
// 4 (1 + 2 |u|), which leaves E another 1.2 units, 1.2 ulp, where |u| < 0.06, of the 2 that
// ex2.approx is documented with. Further out E has up to 4.5 |u| for the rounded argument. The
// slope has 8 and needs no Newton step: 6.5 with both hardware functions at their documented
// limits.
#ifndef TE_FLAX_CUDA_KERNELS_ACTIVATION_CUH_
#define TE_FLAX_CUDA_KERNELS_ACTIVATION_CUH_

#include "cuda/kernels/column_sum.cuh"
#include "cuda/kernels/numerics.cuh"

namespace te_flax::cuda {

// Elements computed together: a pack at once would take too many registers.
constexpr int kGroup = 4;
using Group = float[kGroup];

struct Parameters {
  float limit, alpha, offset;
};

__device__ inline float Exp2(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

__device__ inline float Reciprocal(float d) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(d));
  return quotient;
}

// NaN if one of them is.
__device__ inline float Max(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ inline float Min(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

constexpr float kLog2E = 0x1.715476p+0f;

// From here on 1 + 2^v is 2^v, and 2^v 2^-kFar is used instead: y exp(u) need not be subnormal
// where exp(u) is.
constexpr float kFar = 64.0f;

__device__ inline float TimesFar(float y, float v) {
  return MulFtz(MulFtz(y, Exp2(__fsub_rn(kFar, v))), 0x1p-64f);
}

// value = x s with s = sigmoid(u) = 1 / (1 + E) and E = 2^v, v = -u log2(e); slope = s + w s (1 -
// s) = s (1 + w E s) with w = x du/dx. Groups with a large v are rare.
template <bool kSlope>
__device__ inline void Sigmoid(const Group& x, const Group& v, const Group& w, Group& value,
                               Group& slope) {
  float highest = v[0];
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    const float e = Exp2(v[j]);
    const float d = __fadd_rn(1.0f, e);
    float s = Reciprocal(d);
    if constexpr (!kSlope) s = __fmaf_rn(s, __fmaf_rn(-d, s, 1.0f), s);
    value[j] = MulFtz(x[j], s);
    // The clamp changes something only where E s is 0: no inf * 0.
    if constexpr (kSlope) {
      slope[j] = MulFtz(s, __fmaf_rn(fminf(w[j], 0x1p60f), __fmul_rn(e, s), 1.0f));
    }
    highest = fmaxf(highest, v[j]);
  }
  if (!(highest > kFar)) return;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (!(v[j] > kFar)) continue;
    value[j] = TimesFar(Max(x[j], -0x1p100f), v[j]);
    if constexpr (kSlope) slope[j] = TimesFar(__fadd_rn(1.0f, Max(w[j], -0x1p60f)), v[j]);
  }
}

struct Gelu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
    constexpr float kLinear = 0x1.988454p+0f;      // 2 sqrt(2 / pi)
    constexpr float kSlopeCubic = 0x1.b6676cp-3f;  // 3 times 0.044715 times that
    constexpr float kV = -0x1.26aec2p+1f;          // -log2(e) 2 sqrt(2 / pi)
    constexpr float kVCubic = -0x1.a5a7d0p-4f;     // 0.044715 times that
    Group v, w;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float square = __fmul_rn(x[j], x[j]);
      v[j] = __fmul_rn(x[j], __fmaf_rn(square, kVCubic, kV));
      w[j] = kSlope ? __fmul_rn(x[j], __fmaf_rn(square, kSlopeCubic, kLinear)) : 0.0f;
    }
    Sigmoid<kSlope>(x, v, w, value, slope);
  }
};

// x sigmoid(factor x).
template <bool kSlope>
__device__ inline void ScaledSilu(const Group& x, float factor, Group& value, Group& slope) {
  const float scaled = __fmul_rn(factor, -kLog2E);
  Group v, w;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    v[j] = __fmul_rn(x[j], scaled);
    w[j] = __fmul_rn(x[j], factor);
  }
  Sigmoid<kSlope>(x, v, w, value, slope);
}

struct QuickGelu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
    ScaledSilu<kSlope>(x, 1.702f, value, slope);
  }
};

struct Silu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
    ScaledSilu<kSlope>(x, 1.0f, value, slope);
  }
};

struct ClampedSilu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters& p, Group& value, Group& slope) {
    Group a;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) a[j] = Min(x[j], p.limit);
    ScaledSilu<kSlope>(a, p.alpha, value, slope);
    if constexpr (kSlope) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j) slope[j] = x[j] <= p.limit ? slope[j] : 0.0f;
    }
  }
};

template <int kCount>
__device__ inline float Horner(float x, const float (&coefficients)[kCount]) {
  float sum = coefficients[kCount - 1];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) sum = __fmaf_rn(sum, x, coefficients[i]);
  return sum;
}

// With Q(a) = erfc(a / sqrt(2)) / 2 = R(a) exp(-a^2 / 2) for a = |x|: x Q or x (1 - Q), and the
// derivative Q - a d or 1 - Q + a d with the density d = exp(-a^2 / 2) / sqrt(2 pi).
struct GeluExact {
  // Q from (1/2 - Q(a)) / a over a^2 on [0, 1], minimax: 0.02 * 2^-24.
  __device__ static float Near(float a) {
    constexpr float kTerms[] = {0x1.988454p-2f,   -0x1.105832p-4f, 0x1.46ce4cp-7f,
                                -0x1.36fd42p-10f, 0x1.dbff1p-14f,  -0x1.00d526p-17f};
    return __fmaf_rn(-a, Horner(__fmul_rn(a, a), kTerms), 0.5f);
  }
  // R from R(a) / t over t = 1 / (1 + a / 2) on a in [1, 19], minimax: 0.08 * 2^-24. The quotient
  // gets one Newton step: R grows with t^1.6.
  __device__ static float Ratio(float a) {
    constexpr float kTerms[] = {0x1.9884f2p-3f,  0x1.986d56p-3f,  0x1.33c182p-3f,  0x1.6c70cp-5f,
                                -0x1.3a02d8p-5f, -0x1.4eeb8ap-3f, -0x1.74df7ap-5f, 0x1.d1d8fp-2f,
                                -0x1.c3255cp-2f, 0x1.1ec742p-3f};
    const float d = __fmaf_rn(0.5f, a, 1.0f);
    float t = Reciprocal(d);
    t = __fmaf_rn(t, __fmaf_rn(-d, t, 1.0f), t);
    return __fmul_rn(t, Horner(t, kTerms));
  }
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
    constexpr float kDensity = 0x1.988454p-2f;  // 1 / sqrt(2 pi)
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float a = Min(fabsf(x[j]), 19.0f);  // from there on Q is 0
      const float v = __fmul_rn(__fmul_rn(a, a), 0.5f * kLog2E);
      const float e = Exp2(-v);
      const float ratio = Ratio(a);
      const bool near = a < 1.0f;
      // Q is p f. Where e is subnormal, so is a Q, as a R < 1/2; Q alone may be before.
      const float p = near ? Near(a) : ratio;
      const float f = near ? 1.0f : e;
      const float q = __fmul_rn(p, f);
      const float rest = __fsub_rn(1.0f, q);
      value[j] = x[j] < 0 ? MulFtz(__fmul_rn(-a, p), f) : MulFtz(x[j], rest);
      if constexpr (kSlope) {
        const float d = __fmaf_rn(-a, kDensity, ratio);  // Q - a times the density, over e
        const float s = x[j] < 0 ? q : rest;
        const float inner = __fmaf_rn(x[j], __fmul_rn(kDensity, e), s);
        const float tail = v > kFar ? TimesFar(d, v) : MulFtz(d, e);
        const float outer = x[j] < 0 ? tail : __fsub_rn(1.0f, tail);
        slope[j] = near ? inner : outer;
      }
    }
  }
};

// The sum with 0 makes zeros of -0 and of what is below 2^-126.
__device__ inline float Positive(float x) { return AddFtz(Max(x, 0.0f), 0.0f); }

struct Relu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      value[j] = Positive(x[j]);
      if constexpr (kSlope) slope[j] = x[j] >= 0x1p-126f ? 1.0f : 0.0f;
    }
  }
};

struct SquaredRelu {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float positive = Positive(x[j]);
      value[j] = MulFtz(positive, positive);
      if constexpr (kSlope) slope[j] = __fadd_rn(positive, positive);
    }
  }
};

struct Linear {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters&, Group& value, Group& slope) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      value[j] = MulFtz(x[j], 1.0f);
      if constexpr (kSlope) slope[j] = 1.0f;
    }
  }
};

struct ClampedLinear {
  template <bool kSlope>
  __device__ static void At(const Group& x, const Parameters& p, Group& value, Group& slope) {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      value[j] = AddFtz(Min(Max(x[j], -p.limit), p.limit), p.offset);
      if constexpr (kSlope) slope[j] = fabsf(x[j]) <= p.limit ? 1.0f : 0.0f;
    }
  }
};

// The first slice of x: value and slope of a run-time activation, the same for all threads.
template <bool kSlope>
__device__ inline void Activate(Activation activation, const Group& x, const Parameters& p,
                                Group& value, Group& slope) {
  switch (activation) {
    case Activation::kGelu:
      return Gelu::At<kSlope>(x, p, value, slope);
    case Activation::kGeluExact:
      return GeluExact::At<kSlope>(x, p, value, slope);
    case Activation::kQuickGelu:
      return QuickGelu::At<kSlope>(x, p, value, slope);
    case Activation::kSilu:
      return Silu::At<kSlope>(x, p, value, slope);
    case Activation::kRelu:
      return Relu::At<kSlope>(x, p, value, slope);
    case Activation::kSquaredRelu:
      return SquaredRelu::At<kSlope>(x, p, value, slope);
    case Activation::kLinear:
      return Linear::At<kSlope>(x, p, value, slope);
    case Activation::kClampedSilu:
      return ClampedSilu::At<kSlope>(x, p, value, slope);
  }
}

// The second slice.
template <bool kSlope>
__device__ inline void Gate(Activation activation, const Group& x, const Parameters& p,
                            Group& value, Group& slope) {
  if (activation == Activation::kClampedSilu) {
    return ClampedLinear::At<kSlope>(x, p, value, slope);
  }
  Linear::At<kSlope>(x, p, value, slope);
}

}  // namespace te_flax::cuda

#endif  // TE_FLAX_CUDA_KERNELS_ACTIVATION_CUH_
