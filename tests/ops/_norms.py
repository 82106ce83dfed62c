"""LayerNorm and RMSNorm in float64, and operands for them."""

from typing import NamedTuple

import numpy as np
from _quantizers import BF16, F16, F32, Implementation

from te_flax.ops._fused import Family, Variant
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.testing.numerics import UNIT, norm_bound, sum_bound

EPSILON = 1e-6
FAMILIES = {f.name: f for f in (*NORM_FWD.values(), *NORM_BWD.values())}
KINDS = tuple(NORM_FWD)
# x, then gamma, beta and dy.
DTYPES = ((F32, F32), (BF16, F32), (F16, F16), (F32, BF16), (BF16, F16))


class Exact(NamedTuple):
    """A norm of ``[M, K]`` in float64, given float32 operands."""

    h: np.ndarray
    size: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray
    xhat: np.ndarray
    scale: np.ndarray


def wide(x) -> np.ndarray:
    """float64, what is below 2^-126 as 0."""
    x = np.asarray(x, np.float64)
    return np.where(np.abs(x) < 2.0**-126, 0.0, x)


def exact(kind, x, gamma, beta=None, *, epsilon=EPSILON, zero_centered_gamma=False):
    """The forward pass, with the size that norm_bound wants."""
    x, scale = wide(x), wide(gamma) + zero_centered_gamma
    mean = np.mean(x, -1) if kind == "layernorm" else np.zeros(len(x))
    centred = x - mean[:, None]
    rstd = 1 / np.sqrt(np.mean(centred**2, -1) + float(np.float32(epsilon)))
    xhat = centred * rstd[:, None]
    h = xhat * scale
    size = np.abs(h)
    if kind == "layernorm":
        h = h + wide(beta)
        largest = np.max(np.abs(x), -1, keepdims=True) * rstd[:, None]
        size = largest * np.abs(scale) + np.abs(h) / 8
    return Exact(h, size, mean, rstd, xhat, scale)


def forward_bound(found: Exact, dtype) -> np.ndarray:
    """Of h."""
    k, factor = found.h.shape[-1], np.abs(found.scale)
    return norm_bound(found.size, k, found.h, dtype, factor=factor)


class Gradients(NamedTuple):
    """The backward pass of ``[M, K]`` in float64, and the bounds of its results."""

    dx: np.ndarray
    dx_bound: np.ndarray
    sums: tuple[np.ndarray, ...]
    sums_bound: tuple[np.ndarray, ...]


def gradients(kind, dy, x, gamma, *stats, zero_centered_gamma=False, out):
    """Given the float32 statistics, as the op takes them."""
    dy, x, scale = wide(dy), wide(x), wide(gamma) + zero_centered_gamma
    m, k = x.shape
    *mean, rstd = (wide(s)[:, None] for s in stats)
    xhat = (x - mean[0] if mean else x) * rstd
    g = dy * scale
    along = np.mean(g * xhat, -1, keepdims=True)
    dx = g - xhat * along
    size = np.abs(g) + np.abs(xhat) * np.mean(np.abs(g * xhat), -1, keepdims=True)
    sums, sizes = [dy * xhat], [np.abs(dy * xhat)]
    if kind == "layernorm":
        dx = dx - np.mean(g, -1, keepdims=True)
        size = size + np.mean(np.abs(g), -1, keepdims=True)
        sums, sizes = [*sums, dy], [*sizes, np.abs(dy)]
    dx = dx * rstd
    return Gradients(
        dx,
        norm_bound(size * rstd, k, dx, out, count=13, factor=rstd),
        tuple(s.sum(0) for s in sums),
        tuple(sum_bound(m, s.sum(0), rounded=3) for s in sizes),
    )


def stats_bounds(found: Exact) -> tuple[np.ndarray, np.ndarray]:
    """Of mean and rstd; the error of the mean adds its square to the variance."""
    k = found.h.shape[-1]
    spread = np.mean(np.abs(found.xhat), -1) / found.rstd
    mean = UNIT * (2 * np.abs(found.mean) + (4 + np.log2(k)) * spread)
    shift = 2 * UNIT * found.mean * found.rstd
    rstd = found.rstd * (UNIT * (8 + np.log2(k)) + shift**2)
    return mean, rstd


def draw(family: Family, m, k, dtypes=(F32, F32), seed=0):
    """The family's operands, ``m`` and ``k`` shapes; statistics are plausible."""
    rng = np.random.default_rng(seed)
    sizes = {"M..": m, "K..": k}

    def one(name, dims):
        shape = [n for word in dims.split() for n in sizes[word]]
        value = rng.standard_normal(shape)
        if name in ("mean", "rstd"):
            return (np.abs(value) + 0.1).astype(F32)
        if name in ("x", "dy"):
            value = value * 10.0 ** rng.uniform(-3, 2, shape)
        return value.astype(dtypes[name != "x"])

    return [one(name, dims) for name, dims in family.operands.items()]


def attributes(family: Family, k, dtype=F32, zero_centered_gamma=False, **more):
    """Attributes of a call without the formats."""
    own = {"epsilon": EPSILON} if "epsilon" in family.attrs else {}
    own |= {"zero_centered_gamma": zero_centered_gamma, **more}
    return {**own, "k_ndim": len(k), "out_dtype": np.dtype(dtype).name}


def plain(run: Implementation, family: Family, *own, **attrs) -> list[np.ndarray]:
    """h and the family's own results, without quantization."""
    h, _, *extras = run(family.ops[Variant()], *own, **attrs)
    return [h, *extras]
