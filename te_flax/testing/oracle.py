"""The quantization ops in plain numpy, written apart from the JAX references.

Everything follows docs/numerics.md in IEEE arithmetic, mostly float64 with one explicit
rounding, and ``ml_dtypes`` does the casts; the flush of small inputs is written out.
Nothing is imported from ``te_flax.ops``, so an error there cannot hide here.
"""

import math

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

FP8 = {
    "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    "e5m2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0),
}
_TINY = 2.0**-126
Arrays = tuple[np.ndarray, ...]


def _flushed(x: ArrayLike) -> np.ndarray:
    """Float64 values of x; a magnitude below 2^-126 is the zero of its sign."""
    with np.errstate(invalid="ignore"):
        x = np.asarray(x).astype(np.float32).astype(np.float64)
    return np.where(np.abs(x) < _TINY, np.copysign(0.0, x), x)


def _codes(v: np.ndarray, format: str) -> np.ndarray:
    """Float64 values, each a float32 or far below one code step, to FP8."""
    dtype, largest = FP8[format]
    clipped = np.clip(np.where(np.isnan(v), 0.0, v), -largest, largest)
    with np.errstate(under="ignore"):
        codes = clipped.astype(np.float32).astype(dtype).view(np.uint8)
    return np.where(np.isnan(v), np.uint8(0x7F), codes).view(dtype)


def _float32(v: np.ndarray | np.float64) -> np.ndarray:
    """One IEEE rounding to float32, back in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(v).astype(np.float32).astype(np.float64)


def amax(x: ArrayLike) -> Arrays:
    """[largest finite |x|, 1.0 if any element is NaN or Inf else 0.0]."""
    v = _flushed(x).ravel()
    good = np.isfinite(v)
    largest = np.max(np.abs(v[good]), initial=0.0)
    return (np.array([largest, 0.0 if good.all() else 1.0], np.float32),)


def amax_to_scale(
    amax: ArrayLike, *, format: str, margin: int, power_of_2: bool, epsilon: float
) -> Arrays:
    """Of a = max(amax, epsilon): scale = clamp((max / a) * 2^-margin), 1 / scale."""
    scales = []
    floor = float(np.float32(epsilon))
    floor = floor if floor >= _TINY else 0.0
    for value in _flushed(amax).ravel():
        a = max(value, floor)
        if not math.isfinite(value) or a <= 0:
            scales.append(1.0)
            continue
        # max and a have 24 bits: the double quotient rounds to float32 innocuously.
        ratio = _float32(np.float64(FP8[format][1]) / np.float64(a))
        scale = float(np.clip(_float32(ratio * 2.0**-margin), _TINY, 2.0**126))
        if power_of_2:
            scale = 2.0 ** (math.frexp(scale)[1] - 1)
        scales.append(scale)
    scale = np.array(scales, np.float32).reshape(np.shape(amax))
    return scale, (1.0 / scale.astype(np.float64)).astype(np.float32)


def quantize(
    x: ArrayLike,
    scale: ArrayLike,
    *,
    k_ndim: int,
    row_format: str | None = None,
    col_format: str | None = None,
) -> Arrays:
    """Codes of x * scale, as x and with the K dims first, and the amax of x."""
    with np.errstate(invalid="ignore", over="ignore"):
        v = _float32(_flushed(x) * _flushed(scale))
    results = []
    if row_format is not None:
        results.append(_codes(v, row_format))
    if col_format is not None:
        m_ndim = v.ndim - k_ndim
        order = [*range(m_ndim, v.ndim), *range(m_ndim)]
        results.append(_codes(v, col_format).transpose(order).copy())
    return (*results, *amax(x))


def e8m0(block: np.ndarray, largest: float) -> int:
    """The shared exponent byte of one block of flushed float64 values.

    ``largest`` is the magnitude that the format of the codes goes up to.
    """
    if np.isnan(block).any():
        return 255
    if np.isinf(block).any():
        return 254
    reciprocal = np.float64(np.float32(1.0 / largest))
    product = np.max(np.abs(block), initial=0.0) * reciprocal  # 48 bits: exact
    if product == 0:
        return 0
    # One rounding to 24 bits with no lower limit on the exponent, then up to 2^n.
    mantissa, exponent = np.frexp(product)
    mantissa = np.rint(mantissa * 2.0**24) / 2.0**24
    exponent = int(exponent) - 1 if mantissa == 0.5 else int(exponent)
    return max(exponent + 127, 0)


def _quantize_rows(v: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponent bytes of a 2-D array with its blocks along the rows."""
    rows, size = v.shape
    codes = np.zeros(v.shape, FP8[format][0])
    scales = np.zeros((rows, -(-size // 32)), np.uint8)
    for r in range(rows):
        for b in range(scales.shape[1]):
            block = v[r, 32 * b : 32 * b + 32]
            e = e8m0(block, FP8[format][1])
            scales[r, b] = e
            scaled = (
                np.full_like(block, np.nan) if e == 255 else block * 2.0 ** (127 - e)
            )
            codes[r, 32 * b : 32 * b + 32] = _codes(scaled, format)
    return codes, scales


def swizzle(scales: np.ndarray) -> np.ndarray:
    """[rows, blocks] to tiles of 128 x 4: entry (r, c) by its index in the tile."""
    rows, cols = scales.shape
    tiles = np.zeros((-(-rows // 128), -(-cols // 4), 32, 4, 4), np.uint8)
    for r in range(rows):
        for c in range(cols):
            tiles[r // 128, c // 4, r % 32, r % 128 // 32, c % 4] = scales[r, c]
    return tiles


def quantize_mxfp8(
    x: ArrayLike,
    *,
    k_ndim: int,
    row_format: str | None = None,
    col_format: str | None = None,
    swizzled: bool = False,
) -> Arrays:
    """Codes with blocks along K and along M, their exponent bytes, the amax of x."""
    x = np.asarray(x)
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    m, k = math.prod(m_dims), math.prod(k_dims)
    v = _flushed(x).reshape(m, k)
    results = []
    if row_format is not None:
        codes, scales = _quantize_rows(v, row_format)
        plain = scales.reshape(*m_dims, scales.shape[1])
        results += [codes.reshape(x.shape), swizzle(scales) if swizzled else plain]
    if col_format is not None:
        codes, scales = _quantize_rows(v.T, col_format)
        plain = np.ascontiguousarray(scales.T).reshape(scales.shape[1], *k_dims)
        codes = np.ascontiguousarray(codes.T).reshape(x.shape)
        results += [codes, swizzle(scales) if swizzled else plain]
    return (*results, *amax(x))


def noop(flag: ArrayLike, previous: Arrays, new: Arrays) -> Arrays:
    """The previous results where flag[0] is not zero."""
    return new if _flushed(flag)[0] == 0 else previous


def _rounded(y: np.ndarray, out_dtype: str) -> np.ndarray:
    """Products of 24 bits to out_dtype; below 2^-126 zero, every NaN positive."""
    # Before float32 could round one that is just below 2^-126 up to it.
    y = np.where(np.abs(y) < _TINY, np.copysign(0.0, y), y)
    y = np.where(np.isnan(y), np.nan, y)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return y.astype(np.float32).astype(np.dtype(out_dtype))


def dequantize(data: np.ndarray, scale_inv: ArrayLike, *, out_dtype: str) -> Arrays:
    """The codes times scale_inv."""
    with np.errstate(invalid="ignore"):
        y = data.astype(np.float64) * _flushed(scale_inv)
    # Rounded to 24 bits as if the exponent had no lower limit, and flushed after it.
    mantissa, exponent = np.frexp(y)
    y = np.ldexp(np.rint(mantissa * 2.0**24) / 2.0**24, exponent)
    return (_rounded(y, out_dtype),)


def dequantize_mxfp8(
    data: np.ndarray, scale: ArrayLike, *, k_ndim: int, out_dtype: str, axis: int
) -> Arrays:
    """The codes times 2^(e - 127); axis 1: blocks along K, axis 0: along M."""
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    blocks = np.asarray(scale).reshape(
        (m, -(-k // 32)) if axis == 1 else (-(-m // 32), k)
    )
    e = np.repeat(blocks, 32, axis=axis)[:m, :k].astype(np.int64)
    x = data.reshape(m, k).astype(np.float64)
    return (times_e8m0(x, e, out_dtype).reshape(data.shape),)


def times_e8m0(x: np.ndarray, e: np.ndarray, out_dtype: str) -> np.ndarray:
    """Float64 values times 2^(e - 127), e an integer for each, rounded once."""
    y = np.where(e == 255, np.nan, np.ldexp(x, e - 127))
    return _rounded(y, out_dtype)
