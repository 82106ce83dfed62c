"""Activations, alone and gated, forward and backward, with fused quantization.

``x [M.., A, K..]`` holds one slice per activation of a name such as ``"gelu"`` (A = 1)
or ``"silu,linear"`` (A = 2); h is the product of the activated slices. Every form is
free of cancellation: no ``1 + tanh`` and no ``1 - sigmoid``.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.ops._fused import Family, variants
from te_flax.typing import FLOATS, Array

_GELU = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_QUICK = 1.702


def _sigmoid(u: Array) -> tuple[Array, Array]:
    """sigmoid(u) and sigmoid(-u), each to full relative precision."""
    e = jnp.exp(-jnp.abs(u))
    large, small = 1 / (1 + e), e / (1 + e)
    return jnp.where(u < 0, small, large), jnp.where(u < 0, large, small)


def _gated_sigmoid(x: Array, u: Array, du: Array) -> tuple[Array, Array]:
    """Returns x * sigmoid(u) and its derivative s + x s (1 - s) du."""
    s, t = _sigmoid(u)
    return x * s, s + x * s * t * du


def _gelu(x: Array, *_) -> tuple[Array, Array]:
    u = 2 * _GELU * (x + _CUBIC * x * x * x)
    return _gated_sigmoid(x, u, 2 * _GELU * (1 + 3 * _CUBIC * x * x))


def _gelu_exact(x: Array, *_) -> tuple[Array, Array]:
    half = 0.5 * lax.erfc(-x * math.sqrt(0.5))
    density = jnp.exp(-0.5 * x * x) * (0.5 * _GELU)
    return x * half, half + x * density


def _quick_gelu(x: Array, *_) -> tuple[Array, Array]:
    return _gated_sigmoid(x, _QUICK * x, jnp.full_like(x, _QUICK))


def _silu(x: Array, *_) -> tuple[Array, Array]:
    return _gated_sigmoid(x, x, jnp.ones_like(x))


def _relu(x: Array, *_) -> tuple[Array, Array]:
    return jnp.maximum(x, 0), (x > 0).astype(x.dtype)


def _squared_relu(x: Array, *_) -> tuple[Array, Array]:
    positive = jnp.maximum(x, 0)
    return positive * positive, 2 * positive


def _linear(x: Array, *_) -> tuple[Array, Array]:
    return x, jnp.ones_like(x)


def _clamped_silu(x: Array, limit, alpha, offset) -> tuple[Array, Array]:
    a = jnp.minimum(x, limit)
    y, slope = _gated_sigmoid(a, alpha * a, jnp.full_like(x, alpha))
    return y, jnp.where(x <= limit, slope, 0)


def _clamped_linear(x: Array, limit, alpha, offset) -> tuple[Array, Array]:
    inside = (jnp.abs(x) <= limit).astype(x.dtype)
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
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
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
    dh = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
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
    variants=variants(),
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
    variants=variants(dbias=(False, True)),
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
    variants=variants(dbias=(True,), h=(False,)),
    examples={"ragged": ({}, {})},
)
