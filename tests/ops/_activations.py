"""The activations and their derivatives in float64, with the bounds of the ops."""

import functools
import math
from typing import NamedTuple

import numpy as np

from te_flax.testing.numerics import activation_bound
from te_flax.testing.patterns import every_pattern

_GELU = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def dense(largest: float = 3e38) -> np.ndarray:
    """Float32 values: every size, densely where a function bends, and the specials."""
    near = np.linspace(-16, 16, 60000)
    far = np.geomspace(1e-38, largest, 4000)
    tail = np.linspace(-110, -70, 8000)  # where exp and h leave the normal numbers
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 7.0, -7.0, 1e-40]
    return np.concatenate([near, far, -far, tail, edges]).astype(np.float32)


@functools.cache
def values(activation: str, dtype: np.dtype, largest: float) -> np.ndarray:
    """``[M, A, 64]`` of every pattern, the second slice moderate."""
    x = dense(largest) if dtype == np.float32 else every_pattern(dtype)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
        x = x[~(np.isfinite(wide) & (np.abs(wide) > largest))]
    x = x[: x.size // 64 * 64].reshape(-1, 64)
    if "," not in activation:
        return x[:, None]
    rng = np.random.default_rng(0)
    second = rng.standard_normal(x.shape) * 10.0 ** rng.uniform(-2, 1, x.shape)
    return np.stack([x, second.astype(dtype)], 1)


class Point(NamedTuple):
    """A function at x.

    Attributes:
        value: f(x).
        slope: f'(x).
        size: the magnitudes of the terms of the slope.
        argument: of the exponential.
    """

    value: np.ndarray
    slope: np.ndarray
    size: np.ndarray
    argument: np.ndarray


def _sigmoid(x, u, du):
    """x s(u) and s + x s (1 - s) du, in a form free of cancellation."""
    e = np.exp(-np.abs(u))
    low = u < 0
    s, t = np.where(low, e, 1) / (1 + e), np.where(low, 1, e) / (1 + e)
    # 0 and not inf * 0 where e is 0.
    second = np.where((s == 0) | (t == 0), 0, x * s * t * du)
    return Point(np.where(s == 0, 0, x * s), s + second, s + np.abs(second), np.abs(u))


def _gelu_exact(x):
    half = 0.5 * np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2))
    second = np.where(np.abs(x) > 1e3, 0, x * np.exp(-x * x / 2) * (_GELU / 4))
    value = np.where(half == 0, 0, x * half)
    return Point(value, half + second, half + np.abs(second), x * x / 2)


def _plain(value, slope):
    return Point(value, slope, np.abs(slope), np.zeros_like(value))


def point(name: str, x, *, limit=7.0, alpha=1.702, offset=1.0) -> Point:
    """One slice, x float64 without infinities (1e300 stands for one)."""
    nan = np.isnan(x)
    x = np.where(nan, 0, x)
    match name:
        case "gelu":
            u = _GELU * (x + _CUBIC * x**3)
            found = _sigmoid(x, u, _GELU * (1 + 3 * _CUBIC * x * x))
        case "gelu_exact":
            found = _gelu_exact(x)
        case "quick_gelu":
            found = _sigmoid(x, 1.702 * x, np.full_like(x, 1.702))
        case "silu":
            found = _sigmoid(x, x, np.ones_like(x))
        case "relu":
            found = _plain(np.maximum(x, 0), np.where(x > 0, 1.0, 0.0))
        case "squared_relu":
            found = _plain(np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0))
        case "linear":
            found = _plain(x, np.ones_like(x))
        case "clamped_silu":
            alpha = float(np.float32(alpha))
            a = np.minimum(x, limit)
            f = _sigmoid(a, alpha * a, np.full_like(a, alpha))
            inside = x <= limit
            found = f._replace(slope=f.slope * inside, size=f.size * inside)
        case "clamped_linear":
            clipped = np.clip(x, -limit, limit)
            slope = np.where(np.abs(x) <= limit, 1.0, 0.0)
            found = _plain(clipped + offset, slope)
    # A comparison with NaN is false: such slopes are numbers.
    steps = "relu", "linear", "clamped_silu", "clamped_linear"
    slope = found.slope if name in steps else np.where(nan, np.nan, found.slope)
    if name in ("relu", "clamped_silu", "clamped_linear"):
        slope = np.where(nan, 0, slope)
    return found._replace(value=np.where(nan, np.nan, found.value), slope=slope)


def _points(x, attrs):
    names = attrs["activation"].split(",")
    axis = x.ndim - attrs["k_ndim"] - 1
    wide = np.asarray(x).astype(np.float64)
    wide = np.where(np.abs(wide) < 2.0**-126, 0, wide)
    wide = np.where(np.isinf(wide), np.copysign(1e300, wide), wide)
    params = {k: attrs[k] for k in ("limit", "alpha", "offset")}
    slices = np.moveaxis(wide, axis, 0)
    return [point(n, s, **params) for n, s in zip(names, slices, strict=True)]


def _second(p: Point, attrs):
    """Value and magnitude of the slice that multiplies: clamped, it is a sum."""
    clamped = attrs["activation"].startswith("clamped")
    extra = 2 * abs(attrs["offset"]) if clamped else 0
    return p.value, np.abs(p.value) + extra


def forward(x, attrs) -> tuple[np.ndarray, np.ndarray]:
    """h in float64 and its bound."""
    with np.errstate(all="ignore"):
        f, *rest = _points(x, attrs)
        exact, size, factor = f.value, np.abs(f.value), np.zeros_like(f.value)
        if rest:
            g, factor = _second(rest[0], attrs)
            exact, size = exact * g, size * factor
        count = 4 + 2 * len(rest)
        options = {"count": count, "factor": factor}
        out = attrs["out_dtype"]
        return exact, activation_bound(size, f.argument, exact, out, **options)


def backward(dy, x, attrs) -> tuple[np.ndarray, np.ndarray]:
    """The stacked cotangents in float64 and their bounds."""
    out, axis = attrs["out_dtype"], x.ndim - attrs["k_ndim"] - 1
    with np.errstate(all="ignore"):
        wide = np.asarray(dy).astype(np.float64)
        f, *rest = _points(x, attrs)
        size = np.abs(wide)
        terms = [(wide * f.slope, size * f.size, size)]
        if rest:
            g, factor = _second(rest[0], attrs)
            terms = [
                (wide * f.slope * g, size * f.size * factor, (1 + size) * (1 + factor)),
                (wide * f.value * rest[0].slope, size * np.abs(f.value), 1 + size),
            ]
        count = 8 + 2 * len(rest)
        found = [
            (e, activation_bound(s, f.argument, e, out, count=count, factor=t))
            for e, s, t in terms
        ]
        exact, bound = (np.stack(v, axis) for v in zip(*found, strict=True))
        return exact, bound


def close_to_limits(got, exact, bound) -> None:
    """Within the bound, NaN where it is, and Inf or the maximum beyond the dtype."""
    found = np.asarray(got)
    largest = float(np.finfo(np.float32).max)
    if found.dtype == np.float16:
        largest = 65504.0
    value = found.astype(np.float64)
    assert value.shape == exact.shape
    np.testing.assert_array_equal(np.isnan(value), np.isnan(exact))
    with np.errstate(all="ignore"):
        inside = np.abs(exact) + bound < largest * (1 - 2.0**-8)
        over = (np.abs(exact) >= largest * (1 - 2.0**-8)) & ~np.isnan(exact)
        worst = np.max((np.abs(value - exact) - bound)[inside], initial=-1.0)
    assert worst <= 0, f"beyond the bound by {worst}"
    assert np.all(np.abs(value[over]) >= largest * (1 - 2.0**-7))
    assert np.all(np.sign(value[over]) == np.sign(exact[over]))
