"""NVFP4 in plain numpy, block by block, written apart from the ops."""

import math

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from te_flax.testing.oracle import Arrays, _codes, _float32, _flushed, _rounded, amax

_BLOCK = 16
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def scale(amax: ArrayLike) -> Arrays:
    """min(2688 / amax, 2^126), 1 without one, and its inverse."""
    v = _flushed(amax)
    good = np.isfinite(v) & (v > 0)
    found = _float32(2688.0 / np.where(good, v, 1))
    found = np.where(good, np.minimum(found, 2.0**126), 1.0)
    return found.astype(np.float32), (1.0 / found).astype(np.float32)


def nearest(values: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 by distance, ties to the even code."""
    a = np.minimum(np.abs(values), 6.0)[..., None]
    distance = np.abs(a - _VALUES)
    order = np.lexsort((np.arange(8) % 2 * np.ones_like(distance), distance), axis=-1)
    return order[..., 0] + 8 * np.signbit(values)


def stochastic(values: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes 0 to 15, the one above with the probability of the fraction."""
    a = np.minimum(np.abs(values), 6.0)
    lower = np.searchsorted(_VALUES, a, side="right") - 1
    upper = np.minimum(lower + 1, 7)
    step = np.where(upper > lower, _VALUES[upper] - _VALUES[lower], 1)
    drawn = (np.floor(random / 2.0**9) + 0.5) / 2.0**23
    up = drawn < (a - _VALUES[lower]) / step
    return np.where(up, upper, lower) + 8 * np.signbit(values)


def pack(codes: np.ndarray) -> np.ndarray:
    """Pairs along the last axis, the first in the low half of a byte."""
    padded = np.zeros((*codes.shape[:-1], codes.shape[-1] + codes.shape[-1] % 2), int)
    padded[..., : codes.shape[-1]] = codes
    return (padded[..., ::2] + 16 * padded[..., 1::2]).astype(np.uint8)


def _block_scale(block: np.ndarray, tensor_scale: float) -> int:
    """The e4m3 byte of one block of flushed float64 values."""
    if np.isnan(block).any():
        return 0x7F
    if np.isinf(block).any():
        return 0x7E
    factor = _float32(np.float64(tensor_scale) * np.float64(np.float32(1 / 6)))
    u = _float32(np.max(np.abs(block), initial=0.0) * factor)
    return int(_codes(u, "e4m3").view(np.uint8))


def _quantize(v, tensor_scale: float, block: tuple[int, int], random=None):
    """Codes and e4m3 scales of a matrix of flushed float64 values."""
    rows, cols = (-(-n // b) for n, b in zip(v.shape, block, strict=True))
    codes = np.zeros(v.shape, int)
    scales = np.zeros((rows, cols), np.uint8)
    for r in range(rows):
        for c in range(cols):
            at = (
                slice(r * block[0], (r + 1) * block[0]),
                slice(c * block[1], (c + 1) * block[1]),
            )
            scales[r, c] = _block_scale(v[at], tensor_scale)
            s = float(scales[r, c : c + 1].view(_E4M3).astype(np.float64)[0])
            if math.isnan(s):
                continue
            inverse = _float32(np.float64(1 / s)) if s > 0 else 0.0
            with np.errstate(invalid="ignore"):
                t = _float32(v[at] * tensor_scale) * inverse
            t = np.copysign(np.where(np.isnan(t), 0.0, _float32(t)), v[at])
            codes[at] = nearest(t) if random is None else stochastic(t, random[at])
    return codes, scales.view(_E4M3)


def _matrix(x: np.ndarray, k_ndim: int) -> tuple[np.ndarray, tuple, tuple]:
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    return _flushed(x).reshape(math.prod(m_dims), math.prod(k_dims)), m_dims, k_dims


def quantize_row(
    x: ArrayLike, scale: ArrayLike, random: np.ndarray | None = None, *, k_ndim: int
) -> Arrays:
    """Packed codes with 1 x 16 blocks along K, their scales, and the amax."""
    v, m_dims, _ = _matrix(np.asarray(x), k_ndim)
    draws = None if random is None else random.reshape(v.shape)
    codes, scales = _quantize(v, float(_flushed(scale)), (1, _BLOCK), draws)
    data = pack(codes)
    row = data.reshape((*m_dims, data.shape[1]))
    return (row, scales.reshape((*m_dims, scales.shape[1])), *amax(x))


def quantize_2d(x: ArrayLike, scale: ArrayLike, *, k_ndim: int) -> Arrays:
    """Both packed copies with 16 x 16 blocks, their scales, and the amax."""
    v, m_dims, k_dims = _matrix(np.asarray(x), k_ndim)
    codes, scales = _quantize(v, float(_flushed(scale)), (_BLOCK, _BLOCK))
    row, col = pack(codes), pack(codes.T)
    return (
        row.reshape((*m_dims, row.shape[1])),
        col.reshape((*k_dims, col.shape[1])),
        scales,
        *amax(x),
    )


def values(data: np.ndarray, scale: np.ndarray, *, k_ndim: int, rows: int):
    """Float64 codes times block scales, the two of a byte in a last dim."""
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    pairs = np.stack([data % 16, data // 16], -1).reshape(m, 2 * k).astype(int)
    v = _VALUES[pairs % 8] * np.where(pairs < 8, 1.0, -1.0)
    grid = scale.astype(np.float64).reshape(-(-m // rows), -(-2 * k // _BLOCK))
    for r in range(m):
        for c in range(grid.shape[1]):
            v[r, _BLOCK * c : _BLOCK * (c + 1)] *= grid[r // rows, c]
    return v.reshape(*data.shape, 2)


def dequantize(
    data: np.ndarray,
    scale: np.ndarray,
    global_scale: ArrayLike,
    *,
    k_ndim: int,
    out_dtype: str,
    rows: int,
) -> Arrays:
    """Codes times block scales times the global scale."""
    with np.errstate(invalid="ignore"):
        y = values(data, scale, k_ndim=k_ndim, rows=rows) * _flushed(global_scale)
    mantissa, exponent = np.frexp(y)
    y = np.ldexp(np.rint(mantissa * 2.0**24) / 2.0**24, exponent)
    return (_rounded(y, out_dtype),)


def hadamard(signs: ArrayLike) -> np.ndarray:
    """The orthogonal 16 x 16 matrix that turns a block of tokens into its transform."""
    h = np.ones((1, 1))
    while len(h) < _BLOCK:
        h = np.block([[h, h], [h, -h]])
    return h / 4 * np.asarray(signs, np.float64)
