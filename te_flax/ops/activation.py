"""Activations, alone and gated, forward and backward, with fused quantization.

``x [M.., A, K..]`` holds one slice per activation of a name such as ``"gelu"`` (A = 1)
or ``"silu,linear"`` (A = 2); h is the product of the activated slices. Every form is
free of cancellation: no ``1 + tanh`` and no ``1 - sigmoid``. At an infinity it takes
its limit.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.ops._fused import DY_VALUES, X_VALUES, Family, variants
from te_flax.typing import FLOATS, Array, wider

_GELU = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_QUICK = 1.702
_DENSITY = 1 / math.sqrt(2 * math.pi)
# Q(a) = erfc(a / sqrt(2)) / 2 is 1/2 - a times the first polynomial in a^2 up to 1,
# and exp(-a^2 / 2) t times the second in t = 1 / (1 + a / 2) from there to 19; both are
# minimax, as in csrc/cpu/simd_activation.inc.
_NEAR = (0.398942292, -0.0664903596, 0.00997332297, -0.00118632999, 0.00011348637,
         -7.65420828e-06)  # fmt: skip
_FAR = (0.199472323, 0.199427292, 0.150271431, 0.0444873571, -0.0383314341,
        -0.163535193, -0.0455167182, 0.454929113, -0.440572202,
        0.140028492)  # fmt: skip


def _times_exp(y: Array, half: Array) -> Array:
    """Y exp(v), given exp(v / 2): a small exp(v) times a large y is no 0."""
    return y * half * half


def _gated_sigmoid(x: Array, u: Array, w: Array) -> tuple[Array, Array]:
    """Returns x s with s = sigmoid(u), and s + w s (1 - s), where w = x du/dx."""
    half = jnp.exp(-0.5 * jnp.abs(u))
    e = half * half
    g = 1 / (1 + e)
    # Where these clamps change something the result is 0 or 1: no inf * 0.
    w = jnp.clip(w, -(2.0**60), 2.0**60)
    low = jnp.maximum(x, -(2.0**100)) * g, g * (1 + w * g)
    high = x * g, g * (1 + w * (e * g))
    value = jnp.where(u < 0, _times_exp(low[0], half), high[0])
    return value, jnp.where(u < 0, _times_exp(low[1], half), high[1])


def _gelu(x: Array, *_) -> tuple[Array, Array]:
    square = x * x
    u = x * (_GELU + _GELU * _CUBIC * square)
    return _gated_sigmoid(x, u, x * (_GELU + 3 * _GELU * _CUBIC * square))


def _gelu_exact(x: Array, *_) -> tuple[Array, Array]:
    """X (1 - Q(x)) and 1 - Q(x) + x exp(-x^2 / 2) / sqrt(2 pi), Q(-a) = 1 - Q(a)."""
    a = jnp.minimum(jnp.abs(x), 19)  # from there on Q is 0
    half = jnp.exp(-0.25 * a * a)
    e = half * half
    near = 0.5 - a * jnp.polyval(jnp.array(_NEAR[::-1], x.dtype), a * a)
    t = 1 / (1 + 0.5 * a)
    ratio = t * jnp.polyval(jnp.array(_FAR[::-1], x.dtype), t)
    d = ratio - a * _DENSITY
    q = jnp.where(a < 1, near, ratio * e)
    rest = 1 - q
    tail = jnp.where(a < 1, -a * q, _times_exp(-a * ratio, half))
    slope = jnp.where(x < 0, q, rest) + x * (_DENSITY * e)
    far = jnp.where(x < 0, _times_exp(d, half), 1 - d * e)
    return jnp.where(x < 0, tail, x * rest), jnp.where(a < 1, slope, far)


def _quick_gelu(x: Array, *_) -> tuple[Array, Array]:
    return _gated_sigmoid(x, _QUICK * x, _QUICK * x)


def _silu(x: Array, *_) -> tuple[Array, Array]:
    return _gated_sigmoid(x, x, x)


def _relu(x: Array, *_) -> tuple[Array, Array]:
    return jnp.maximum(x, 0), jnp.where(x > 0, jnp.ones_like(x), 0)


def _squared_relu(x: Array, *_) -> tuple[Array, Array]:
    positive = jnp.maximum(x, 0)
    return positive * positive, 2 * positive


def _linear(x: Array, *_) -> tuple[Array, Array]:
    return x, jnp.ones_like(x)


def _clamped_silu(x: Array, limit, alpha, offset) -> tuple[Array, Array]:
    a = jnp.minimum(x, limit)
    y, slope = _gated_sigmoid(a, alpha * a, alpha * a)
    return y, jnp.where(x <= limit, slope, 0)


def _clamped_linear(x: Array, limit, alpha, offset) -> tuple[Array, Array]:
    inside = jnp.where(jnp.abs(x) <= limit, jnp.ones_like(x), 0)
    return jnp.clip(x, -limit, limit) + offset, inside


_FUNCTIONS: dict[str, Callable] = {
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "quick_gelu": _quick_gelu,
    "silu": _silu,
    "relu": _relu,
    "squared_relu": _squared_relu,
    "linear": _linear,
    "clamped_silu": _clamped_silu,
    "clamped_linear": _clamped_linear,
}
PLAIN = ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu", "linear")
ACTIVATIONS = (
    *PLAIN,
    *(f"{name},linear" for name in PLAIN),
    "clamped_silu,clamped_linear",
)


def _check(where: str, x: Array, activation: str, k_ndim: int) -> tuple[str, ...]:
    if activation not in ACTIVATIONS:
        rule = f"be one of {' '.join(ACTIVATIONS)}"
        remedy = "compose others from jax.nn"
        raise ValueError(message(where, "activation", rule, repr(activation), remedy))
    names = tuple(activation.split(","))
    axis = x.ndim - k_ndim - 1
    if x.shape[axis] != len(names):
        rule = f"have size {len(names)} at axis {axis}, one slice per activation"
        remedy = "stack the slices there"
        raise ValueError(message(where, "x", rule, f"shape {x.shape}", remedy))
    return names


def _slices(x: Array, names: tuple[str, ...], k_ndim: int, params: tuple):
    """Value and slope of each activated slice, float32."""
    wide = x.astype(wider(x.dtype, jnp.float32))
    axis = x.ndim - k_ndim - 1
    parts = [lax.index_in_dim(wide, i, axis, keepdims=False) for i in range(len(names))]
    return [_FUNCTIONS[n](p, *params) for n, p in zip(names, parts, strict=True)]


def _forward(
    x: Array,
    *,
    activation: str,
    k_ndim: int,
    limit: float,
    alpha: float,
    offset: float,
) -> tuple[Array]:
    """Computes h = f(x0) or f(x0) * g(x1)."""
    names = _check("act_fwd", x, activation, k_ndim)
    parts = _slices(x, names, k_ndim, (limit, alpha, offset))
    return (math.prod([value for value, _ in parts[1:]], start=parts[0][0]),)


def _backward(
    dy: Array,
    x: Array,
    *,
    activation: str,
    k_ndim: int,
    limit: float,
    alpha: float,
    offset: float,
) -> tuple[Array]:
    """Computes dx0 = dy f'(x0) g(x1), dx1 = dy f(x0) g'(x1)."""
    names = _check("act_bwd", x, activation, k_ndim)
    parts = _slices(x, names, k_ndim, (limit, alpha, offset))
    dh = dy.astype(wider(dy.dtype, jnp.float32))
    if len(parts) == 1:
        found = [dh * parts[0][1]]
    else:
        (f, df), (g, dg) = parts
        found = [dh * df * g, dh * f * dg]
    return (jnp.stack(found, axis=x.ndim - k_ndim - 1),)


_ATTRS = {"activation": str, "limit": float, "alpha": float, "offset": float}
_VALUES = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
_EXAMPLES = {
    "gelu": ({"A": 1}, {"activation": "gelu", **_VALUES}),
    "silu_linear": ({"A": 2}, {"activation": "silu,linear", **_VALUES}),
}

ACT_FWD = Family(
    name="act_fwd",
    compute=_forward,
    operands={"x": "M.. A K.."},
    attrs=_ATTRS,
    dtypes={"x": FLOATS},
    replicated=("A",),
    handler="act_fwd",
    unit_dims={"x": "A"},
    variants=variants(values=X_VALUES),
    examples=_EXAMPLES,
)
ACT_BWD = Family(
    name="act_bwd",
    compute=_backward,
    operands={"dy": "M.. K..", "x": "M.. A K.."},
    dim="A",
    attrs=_ATTRS,
    dtypes={"dy": FLOATS, "x": FLOATS},
    replicated=("A",),
    handler="act_bwd",
    unit_dims={"x": "A"},
    variants=variants(dbias=(False, True), values=DY_VALUES),
    examples=_EXAMPLES,
)


def _identity(x: Array, *, k_ndim: int) -> tuple[Array]:
    return (x.astype(jnp.float32),)


# The quantizers with dbias: h is x itself, so it is never returned.
QUANTIZE_DBIAS = Family(
    name="quantize_dbias",
    compute=_identity,
    operands={"x": "M.. K.."},
    dtypes={"x": FLOATS},
    handler="quantize_dbias",
    variants=variants(dbias=(True,), h=(False,), values=DY_VALUES),
    examples={"ragged": ({}, {})},
)
