# pyright: reportMissingImports=false
"""Activations and their derivatives, as csrc/cuda/kernels/activation.cuh has them.

The same instructions in the same order, so that both give the same bits; the bounds are
derived there. x, value and slope are eight numbers each; slope None asks for the value.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from te_flax.backends import cutedsl_ptx as ptx

PACK = 8
LOG2E = float.fromhex("0x1.715476p+0")
FAR = 64.0
LINEAR = float.fromhex("0x1.988454p+0")
CUBIC = float.fromhex("0x1.b6676cp-3")
V = float.fromhex("-0x1.26aec2p+1")
V_CUBIC = float.fromhex("-0x1.a5a7d0p-4")
DENSITY = float.fromhex("0x1.988454p-2")
NEAR = ("0x1.988454p-2 -0x1.105832p-4 0x1.46ce4cp-7 -0x1.36fd42p-10 0x1.dbff1p-14 "
        "-0x1.00d526p-17")  # fmt: skip
RATIO = ("0x1.9884f2p-3 0x1.986d56p-3 0x1.33c182p-3 0x1.6c70cp-5 -0x1.3a02d8p-5 "
         "-0x1.4eeb8ap-3 -0x1.74df7ap-5 0x1.d1d8fp-2 -0x1.c3255cp-2 "
         "0x1.1ec742p-3")  # fmt: skip


def numbers():
    """Eight float32 in registers."""
    return cute.make_rmem_tensor((PACK,), Float32)


def _far(y, v):
    return ptx.mul_ftz(ptx.mul_ftz(y, ptx.exp2(ptx.subtract(FAR, v))), 2.0**-64)


@cute.jit
def _sigmoid(x, v, w, value, slope):
    highest = v[0]
    for j in cutlass.range_constexpr(PACK):
        e = ptx.exp2(v[j])
        d = ptx.add(1.0, e)
        s = ptx.reciprocal(d)
        if cutlass.const_expr(slope is None):
            s = ptx.fma(s, ptx.fma(ptx.negative(d), s, 1.0), s)
        value[j] = ptx.mul_ftz(x[j], s)
        if cutlass.const_expr(slope is not None):
            inner = ptx.fma(ptx.smaller(w[j], 2.0**60), ptx.mul(e, s), 1.0)
            slope[j] = ptx.mul_ftz(s, inner)
        highest = ptx.larger(highest, v[j])
    if highest > FAR:
        for j in cutlass.range_constexpr(PACK):
            if v[j] > FAR:
                value[j] = _far(ptx.maximum(x[j], -(2.0**100)), v[j])
                if cutlass.const_expr(slope is not None):
                    outer = ptx.add(1.0, ptx.maximum(w[j], -(2.0**60)))
                    slope[j] = _far(outer, v[j])


def gelu(x, value, slope):
    """The tanh form of gelu."""
    v, w = numbers(), numbers()
    for j in range(PACK):
        square = ptx.mul(x[j], x[j])
        v[j] = ptx.mul(x[j], ptx.fma(square, V_CUBIC, V))
        if slope is not None:
            w[j] = ptx.mul(x[j], ptx.fma(square, CUBIC, LINEAR))
    _sigmoid(x, v, w, value, slope)


def _scaled_silu(x, factor: float, value, slope):
    scaled = ptx.mul(factor, -LOG2E)
    v, w = numbers(), numbers()
    for j in range(PACK):
        v[j] = ptx.mul(x[j], scaled)
        w[j] = ptx.mul(x[j], factor)
    _sigmoid(x, v, w, value, slope)


def silu(x, value, slope):
    """``x sigmoid(x)``."""
    _scaled_silu(x, 1.0, value, slope)


def quick_gelu(x, value, slope):
    """``x sigmoid(1.702 x)``."""
    _scaled_silu(x, 1.702, value, slope)


def _horner(x, terms: str):
    *rest, total = (float.fromhex(t) for t in terms.split())
    for term in reversed(rest):
        total = ptx.fma(total, x, term)
    return total


def _ratio(a):
    d = ptx.fma(0.5, a, 1.0)
    t = ptx.reciprocal(d)
    t = ptx.fma(t, ptx.fma(ptx.negative(d), t, 1.0), t)
    return ptx.mul(t, _horner(t, RATIO))


@cute.jit
def gelu_exact(x, value, slope):
    """The erf form of gelu."""
    for j in cutlass.range_constexpr(PACK):
        one, zero = Float32(1.0), Float32(0.0)
        a = ptx.minimum(ptx.absolute(x[j]), 19.0)
        v = ptx.mul(ptx.mul(a, a), 0.5 * LOG2E)
        e = ptx.exp2(ptx.negative(v))
        ratio = _ratio(a)
        near = a < one
        p = ptx.fma(ptx.negative(a), _horner(ptx.mul(a, a), NEAR), 0.5)
        p = p if near else ratio
        f = one if near else e
        q = ptx.mul(p, f)
        rest = ptx.subtract(1.0, q)
        low = ptx.mul_ftz(ptx.mul(ptx.negative(a), p), f)
        high = ptx.mul_ftz(x[j], rest)
        value[j] = low if x[j] < zero else high
        if cutlass.const_expr(slope is not None):
            d = ptx.fma(ptx.negative(a), DENSITY, ratio)
            s = q if x[j] < zero else rest
            inner = ptx.fma(x[j], ptx.mul(DENSITY, e), s)
            far, close = _far(d, v), ptx.mul_ftz(d, e)
            tail = far if v > FAR else close
            flipped = ptx.subtract(1.0, tail)
            outer = tail if x[j] < zero else flipped
            slope[j] = inner if near else outer


def _positive(x):
    return ptx.add_ftz(ptx.maximum(x, 0.0), 0.0)


@cute.jit
def relu(x, value, slope):
    """``max(x, 0)``."""
    for j in cutlass.range_constexpr(PACK):
        value[j] = _positive(x[j])
        if cutlass.const_expr(slope is not None):
            slope[j] = Float32(1.0) if x[j] >= Float32(2.0**-126) else Float32(0.0)


def squared_relu(x, value, slope):
    """``max(x, 0)^2``."""
    for j in range(PACK):
        positive = _positive(x[j])
        value[j] = ptx.mul_ftz(positive, positive)
        if slope is not None:
            slope[j] = ptx.add(positive, positive)


def linear(x, value, slope):
    """The number itself."""
    for j in range(PACK):
        value[j] = ptx.mul_ftz(x[j], 1.0)
        if slope is not None:
            slope[j] = Float32(1.0)


FUNCTIONS = {
    "gelu": gelu,
    "gelu_exact": gelu_exact,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "relu": relu,
    "squared_relu": squared_relu,
    "linear": linear,
}
