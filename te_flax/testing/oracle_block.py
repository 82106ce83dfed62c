"""Float32 block scaling in plain numpy, block by block, written apart from the ops."""

import math

import numpy as np
from numpy.typing import ArrayLike

from te_flax.testing.oracle import (
    FP8,
    Arrays,
    _codes,
    _float32,
    _flushed,
    amax,
    amax_to_scale,
    dequantize,
)

_BLOCK = 128


def _quantize(
    v: np.ndarray, block: tuple[int, int], format: str, **options
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and inverse scales of a matrix of flushed float64 values."""
    rows, cols = (-(-n // b) for n, b in zip(v.shape, block, strict=True))
    codes = np.zeros(v.shape, FP8[format][0])
    scale_invs = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for c in range(cols):
            at = (
                slice(r * block[0], (r + 1) * block[0]),
                slice(c * block[1], (c + 1) * block[1]),
            )
            part = v[at]
            largest = np.max(np.abs(part[np.isfinite(part)]), initial=0.0)
            scale, scale_invs[r, c] = amax_to_scale(
                np.float32(largest), format=format, margin=0, **options
            )
            with np.errstate(invalid="ignore"):
                codes[at] = _codes(_float32(part * scale.astype(np.float64)), format)
    return codes, scale_invs


def _matrix(x: np.ndarray, k_ndim: int) -> tuple[np.ndarray, tuple, tuple]:
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    return _flushed(x).reshape(math.prod(m_dims), math.prod(k_dims)), m_dims, k_dims


def quantize_block(
    x: ArrayLike,
    *,
    k_ndim: int,
    power_of_2: bool,
    epsilon: float,
    row_format: str | None = None,
    col_format: str | None = None,
) -> Arrays:
    """Copies with 1 x 128 blocks along K, and along M transposed, and the amax."""
    v, m_dims, k_dims = _matrix(np.asarray(x), k_ndim)
    results = []
    for matrix, format, kept, cut in (
        (v, row_format, m_dims, k_dims),
        (v.T, col_format, k_dims, m_dims),
    ):
        if format is not None:
            codes, scale_inv = _quantize(
                matrix, (1, _BLOCK), format, power_of_2=power_of_2, epsilon=epsilon
            )
            results.append(codes.reshape((*kept, *cut)))
            results.append(scale_inv.reshape((*kept, scale_inv.shape[1])))
    return (*results, *amax(x))


def quantize_block2d(
    x: ArrayLike, *, k_ndim: int, format: str, power_of_2: bool, epsilon: float
) -> Arrays:
    """Both copies with 128 x 128 blocks, their scales, and the amax."""
    v, m_dims, k_dims = _matrix(np.asarray(x), k_ndim)
    codes, scale_inv = _quantize(
        v, (_BLOCK, _BLOCK), format, power_of_2=power_of_2, epsilon=epsilon
    )
    row = codes.reshape((*m_dims, *k_dims))
    col = np.ascontiguousarray(codes.T).reshape((*k_dims, *m_dims))
    return (row, col, scale_inv, *amax(x))


def dequantize_block(
    data: np.ndarray, scale_inv: np.ndarray, *, k_ndim: int, out_dtype: str, rows: int
) -> Arrays:
    """The codes times the inverse scales of blocks of rows x 128."""
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    codes = data.reshape(m, k)
    x = np.zeros((m, k), np.dtype(out_dtype))
    grid = scale_inv.reshape(-(-m // rows), -(-k // _BLOCK))
    for (r, c), value in np.ndenumerate(grid):
        at = (
            slice(r * rows, (r + 1) * rows),
            slice(c * _BLOCK, (c + 1) * _BLOCK),
        )
        (x[at],) = dequantize(codes[at], value, out_dtype=out_dtype)
    return (x.reshape(data.shape),)
