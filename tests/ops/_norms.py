"""LayerNorm and RMSNorm in float64, and operands for them."""

from typing import NamedTuple

import numpy as np
from _activations import close_to_limits
from _quantizers import BF16, F16, F32, Implementation

from te_flax.ops._fused import Family, Variant
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.testing.numerics import UNIT, close_to, norm_bound, sum_bound

EPSILON = 1e-6
FAMILIES = {f.name: f for f in (*NORM_FWD.values(), *NORM_BWD.values())}
KINDS = tuple(NORM_FWD)
# x, then gamma, beta and dy.
DTYPES = ((F32, F32), (BF16, F32), (F16, F16), (F32, BF16), (BF16, F16))
OUTS = (F32, BF16, BF16, F32, BF16)  # of dx, which goes beyond float16
NOT_FINITE = {  # the first values of a row whose h is NaN
    "nan": [np.nan, 1.0],
    "negative_nan": [-np.nan, 1.0],
    "inf": [np.inf, 1.0],
    "both_infs": [np.inf, -np.inf],
    "largest": [3e38, -3e38],
    "overflowing_squares": [2e19, -1e19],
}


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


def hard(k: int) -> np.ndarray:
    """Rows that a careless mean, variance or sum gets wrong."""
    rng = np.random.default_rng(k)
    normal = rng.standard_normal((5, k))
    near = 4e4 + normal * np.array([[0.0], [0.004], [0.05], [1.0], [100.0]])
    growing = np.linspace(1, 2, k) * 10.0 ** np.arange(-8, 8)[:, None]
    lone = np.where(np.arange(k) == k // 2, 3e4, 1e-3)[None]
    signs = np.where(rng.uniform(size=(2, k)) < 0.5, -1.0, 1.0) * [[1e3], [0.1]]
    return np.concatenate([near, -near, growing, lone, -lone, signs]).astype(F32)


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
        norm_bound(size * np.abs(rstd), k, dx, out, count=13, factor=np.abs(rstd)),
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


def pop_own(op, attrs, given, found) -> None:
    """Checks h and pops the results that only norms have; m and k of any rank."""
    k = int(np.prod(given["gamma"].shape))
    kind, out = op.handler_attrs["kind"], attrs["out_dtype"]
    option = {"zero_centered_gamma": attrs["zero_centered_gamma"]}
    named = ("x", "gamma", "beta") if op.handler == "norm_fwd" else BACKWARD
    own = [_matrix(name, given[name], k) for name in named if name in given]
    h = _matrix("x", found["h"], k)
    with np.errstate(all="ignore"):
        if op.handler == "norm_fwd":
            want = exact(kind, *own, epsilon=attrs["epsilon"], **option)
            close_to_limits(h, want.h, forward_bound(want, out))
            bounds = dict(zip(("mean", "rstd"), stats_bounds(want), strict=True))
            for name in bounds.keys() & found.keys():
                got = found.pop(name).reshape(-1)
                close_to(got, getattr(want, name), bounds[name])
            return
        want = gradients(kind, *own, **option, out=out)
        close_to_limits(h, want.dx, want.dx_bound)
        names = ("dgamma", "dbeta")
        for name, sums, bound in zip(names, want.sums, want.sums_bound, strict=False):
            close_to(found.pop(name).reshape(-1), sums, bound)


BACKWARD = ("dy", "x", "gamma", "mean", "rstd")


def _matrix(name: str, array, k: int):
    if name in ("x", "dy"):
        return array.reshape(array.size // k if k else 0, k)
    return array.reshape(-1)
