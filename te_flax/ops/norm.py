"""LayerNorm and RMSNorm over ``K..``, forward and backward, with fused quantization."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from te_flax.errors import message
from te_flax.ops import _bits
from te_flax.ops._fused import X_VALUES, Family, Variant, variants
from te_flax.typing import FLOATS, Array

KINDS = ("layernorm", "rmsnorm")


def _wide(x: Array) -> Array:
    """float32, what is below 2^-126 a zero of its sign; float64 stays."""
    if x.dtype == jnp.float64:
        return x
    return _bits.as_float(_bits.flush(_bits.widen(x)))


def _flat(x: Array, k_ndim: int) -> Array:
    """[M.., K] with K flattened."""
    split = x.ndim - k_ndim
    return _wide(x).reshape(*x.shape[:split], math.prod(x.shape[split:]))


def _sum(x: Array) -> Array:
    """Sums the last axis over a fixed tree: a row's result depends on it only."""
    n = x.shape[-1]
    size = 1 << max(0, (n - 1).bit_length())
    if size != n:
        zeros = [(0, 0, 0)] * (x.ndim - 1) + [(0, size - n, 0)]
        x = lax.pad(x, jnp.zeros((), x.dtype), zeros)
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


def _scale(gamma: Array, zero_centered_gamma: bool) -> Array:
    wide = _wide(gamma).reshape(-1)
    return wide + 1 if zero_centered_gamma else wide


def _mean(x: Array) -> Array:
    return _sum(x) / jnp.asarray(x.shape[-1], x.dtype)


def _stored(x: Array) -> Array:
    """One NaN and no subnormal, as in h; float64 stays."""
    if x.dtype == jnp.float64:
        return x
    return _bits.narrow(_bits.flush(_bits.as_bits(x)), "float32")


def _epsilon(epsilon: float, kind: str) -> np.float32:
    if not 0 <= epsilon <= float(np.finfo(np.float32).max):
        rule, remedy = "be finite in float32 and >= 0", "use 1e-6"
        where = f"norm_fwd_{kind}"
        raise ValueError(message(where, "epsilon", rule, epsilon, remedy))
    return np.float32(epsilon if epsilon >= 2.0**-126 else 0)


def _forward(
    x: Array,
    gamma: Array,
    beta: Array | None = None,
    *,
    kind: str,
    k_ndim: int,
    epsilon: float,
    zero_centered_gamma: bool,
) -> tuple[Array, ...]:
    """Computes h = (x - mean) * rstd * gamma + beta; mean only for a LayerNorm.

    A row whose sum of squares is not finite in float32 is NaN: one with a NaN or an
    Inf, or with squares that add up to 2^128.
    """
    added, wide, mean = _epsilon(epsilon, kind), _flat(x, k_ndim), ()
    if kind == "layernorm":
        near = _mean(wide)
        # What the first sum lost: a constant row has exactly its own mean.
        mean = (near + _mean(wide - near),)
        wide = wide - mean[0]
    variance = _mean(wide * wide) + jnp.asarray(added, wide.dtype)
    rstd = jnp.where(variance < jnp.inf, 1 / lax.sqrt(variance), jnp.nan)
    h = wide * rstd * _scale(gamma, zero_centered_gamma).astype(wide.dtype)
    if beta is not None:
        h = h + _wide(beta).reshape(-1).astype(h.dtype)
    dims = x.shape[: x.ndim - k_ndim]
    stats = tuple(_stored(s).reshape(dims) for s in (*mean, rstd))
    return (h.reshape(x.shape), *stats)


def _backward(
    dy: Array,
    x: Array,
    gamma: Array,
    *stats: Array,
    kind: str,
    k_ndim: int,
    zero_centered_gamma: bool,
) -> tuple[Array, ...]:
    """Computes dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gamma."""
    *mean, rstd = (_wide(s)[..., None] for s in stats)
    wide = _flat(x, k_ndim)
    dh = _flat(dy, k_ndim).astype(wide.dtype)
    normed = (wide - mean[0] if mean else wide) * rstd
    g = dh * _scale(gamma, zero_centered_gamma).astype(dh.dtype)
    dx = g - normed * _mean(g * normed)
    if kind == "layernorm":
        dx = dx - _mean(g)
    tokens = tuple(range(dh.ndim - 1))
    sums = [jnp.sum(dh * normed, tokens)]
    if kind == "layernorm":
        sums.append(jnp.sum(dh, tokens))
    shaped = (_stored(s).reshape(gamma.shape) for s in sums)
    return ((dx * rstd).reshape(x.shape), *shaped)


def _scratch(kind: str, v: Variant, dy: Any, *_: Any, k_ndim: int, **attrs: Any) -> int:
    """Bytes: dx where only its codes are returned, and partial sums over the tokens.

    The sums of 128 groups of tokens or more, whatever the GPU: one order of all sums.
    """
    split = dy.ndim - k_ndim
    m, k = math.prod(dy.shape[:split]), math.prod(dy.shape[split:])
    groups = min(m, max(128, min(512, 2**21 // max(k, 1))))
    sums = 4 * groups * k * (2 if kind == "layernorm" else 1)
    if v.h:
        return sums
    dx = m * k * np.dtype(attrs["out_dtype"]).itemsize
    return -(-dx // 256) * 256 + sums


def _declare(kind: str, direction: str) -> Family:
    layernorm = kind == "layernorm"
    parameters = {"gamma": "K.."} | ({"beta": "K.."} if layernorm else {})
    stats = ({"mean": "M.."} if layernorm else {}) | {"rstd": "M.."}
    sums = {"dgamma": "K.."} | ({"dbeta": "K.."} if layernorm else {})
    forward = direction == "fwd"
    operands = (
        {"x": "M.. K.."} | parameters
        if forward
        else {"dy": "M.. K..", "x": "M.. K..", "gamma": "K.."} | stats
    )
    attrs = {"zero_centered_gamma": bool} | ({"epsilon": float} if forward else {})
    values = {"zero_centered_gamma": False} | ({"epsilon": 1e-6} if forward else {})
    return Family(
        name=f"norm_{direction}_{kind}",
        compute=functools.partial(_forward if forward else _backward, kind=kind),
        operands=operands,
        extras=stats if forward else sums,
        summed=() if forward else tuple(sums),
        attrs=attrs,
        dtypes={n: (jnp.float32,) if n in stats else FLOATS for n in operands},
        replicated=("K",),
        handler=f"norm_{direction}",
        handler_attrs={"kind": kind},
        workspace=None if forward else functools.partial(_scratch, kind),
        variants=variants(values=X_VALUES if forward else ()),
        examples={"ragged": ({}, values)},
    )


NORM_FWD = {kind: _declare(kind, "fwd") for kind in KINDS}
NORM_BWD = {kind: _declare(kind, "bwd") for kind in KINDS}
