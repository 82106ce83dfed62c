"""MXFP6 in plain numpy, block by block, written apart from the ops."""

import math

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from te_flax.testing.oracle import Arrays, _flushed, amax, e8m0, times_e8m0

FP6 = {
    "e2m3": (np.dtype(ml_dtypes.float6_e2m3fn), 7.5),
    "e3m2": (np.dtype(ml_dtypes.float6_e3m2fn), 28.0),
}


def encode(values: ArrayLike, format: str) -> np.ndarray:
    """Codes 0 to 63 of float32 values; that of NaN is 0."""
    dtype, largest = FP6[format]
    with np.errstate(invalid="ignore", under="ignore"):
        v = np.asarray(values).astype(np.float32)
        finite = np.clip(np.where(np.isnan(v), 0, np.abs(v)), 0, np.float32(largest))
        codes = finite.astype(dtype).view(np.uint8)
    return np.where(np.isnan(v), np.uint8(0), codes | (np.signbit(v) * np.uint8(32)))


def decode(codes: ArrayLike, format: str) -> np.ndarray:
    """The float64 values of codes 0 to 63."""
    return np.asarray(codes, np.uint8).view(FP6[format][0]).astype(np.float64)


def pack(codes: np.ndarray) -> np.ndarray:
    """The bits of the codes along the last axis in a row, lowest first, as bytes."""
    n = codes.shape[-1]
    padded = np.zeros((*codes.shape[:-1], n + -n % 4), np.uint8)
    padded[..., :n] = codes
    bits = np.unpackbits(padded[..., None], axis=-1, bitorder="little")[..., :6]
    bits = bits.reshape(*codes.shape[:-1], 6 * padded.shape[-1])
    return np.packbits(bits, axis=-1, bitorder="little")


def unpack(data: np.ndarray) -> np.ndarray:
    """Undoes pack."""
    bits = np.unpackbits(data, axis=-1, bitorder="little")
    bits = bits.reshape(*data.shape[:-1], 4 * data.shape[-1] // 3, 6)
    return np.packbits(bits, axis=-1, bitorder="little")[..., 0]


def _quantize_rows(v: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponent bytes of a matrix with its blocks along the rows."""
    rows, size = v.shape
    codes = np.zeros(v.shape, np.uint8)
    scales = np.zeros((rows, -(-size // 32)), np.uint8)
    for r in range(rows):
        for b in range(scales.shape[1]):
            block = v[r, 32 * b : 32 * b + 32]
            e = scales[r, b] = e8m0(block, FP6[format][1])
            if e != 255:
                scaled = block * 2.0 ** (127 - int(e))
                codes[r, 32 * b : 32 * b + 32] = encode(scaled, format)
    return codes, scales


def quantize(
    x: ArrayLike,
    *,
    k_ndim: int,
    row_format: str | None = None,
    col_format: str | None = None,
) -> Arrays:
    """Packed codes with blocks along K and along M, their bytes, the amax of x."""
    x = np.asarray(x)
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    v = _flushed(x).reshape(math.prod(m_dims), math.prod(k_dims))
    results = []
    for format, along_k in ((row_format, True), (col_format, False)):
        if format is None:
            continue
        codes, scales = _quantize_rows(v if along_k else v.T, format)
        data = pack(codes if along_k else codes.T)
        groups = data.shape[-1] // 3
        if along_k:
            scales = scales.reshape((*m_dims, scales.shape[1]))
        else:
            scales = scales.T.reshape((scales.shape[1], *k_dims))
        results += [data.reshape((*m_dims, groups, 3)), scales]
    return (*results, *amax(x))


def dequantize(
    data: np.ndarray,
    scale: np.ndarray,
    *,
    k_ndim: int,
    format: str,
    out_dtype: str,
    axis: int,
) -> Arrays:
    """The four codes of each group [.., 3] times 2^(e - 127) of their blocks."""
    m = math.prod(data.shape[: data.ndim - k_ndim - 1])
    n = 4 * math.prod(data.shape[data.ndim - k_ndim - 1 : -1])
    values = decode(unpack(data.reshape(m, 3 * n // 4)), format)
    grid = scale.reshape((m, -(-n // 32)) if axis == 1 else (-(-m // 32), n))
    e = np.repeat(grid, 32, axis=axis)[:m, :n].astype(np.int64)
    return (times_e8m0(values, e, out_dtype).reshape(*data.shape[:-1], 4),)
