"""Bit patterns that the quantizers must get right: all of them, or every edge."""

import ml_dtypes
import numpy as np

_VIEW = {2: np.uint16, 4: np.uint32}


def every_pattern(dtype: np.dtype) -> np.ndarray:
    """All 65,536 values of a 16-bit float type, in the order of their bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def float32_edges() -> np.ndarray:
    """Every sign and exponent with the mantissas at which some rounding turns.

    The mantissas are those around the ties and steps of e4m3 and e5m2, around the
    mantissas of their maxima and of the reciprocals of those, all zeros, all ones and
    single bits. Exponents 0 and 255 give subnormals, infinities and NaN payloads.
    """
    turns = [n << 19 for n in range(16)]  # steps of e4m3, e5m2 and their ties
    turns += [(448 * 2**14) & 0x7FFFFF, (57344 * 2**7) & 0x7FFFFF]
    turns += [int(np.float32(1 / m).view(np.uint32)) & 0x7FFFFF for m in (448, 57344)]
    mantissas = {1 << n for n in range(23)} | {0x7FFFFF, 0x7FFFFE, 0x7FEFFF, 0x7FF000}
    mantissas |= {(t + d) & 0x7FFFFF for t in turns for d in (-2, -1, 0, 1, 2)}
    high = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    return (high | np.array(sorted(mantissas), np.uint32)).view(np.float32).ravel()


def patterns(dtype: np.dtype) -> np.ndarray:
    """Every pattern of a 16-bit float type, the edges of float32."""
    if np.dtype(dtype) == np.float32:
        return float32_edges()
    return every_pattern(dtype)


def amax_edges(format: str) -> np.ndarray:
    """Float32 magnitudes whose product with 1/max lies around a power of two.

    For every exponent, the values within 3 ulp of max * 2^n.
    """
    largest = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0}[format]
    values = []
    for n in range(-150, 128):
        centre = np.float64(largest) * 2.0**n
        if 2.0**-126 <= centre < 2.0**127:
            bits = int(np.float32(centre).view(np.uint32))
            values += [bits + d for d in range(-3, 4)]
    return np.array(values, np.uint32).view(np.float32)


def special_blocks(dtype: np.dtype) -> np.ndarray:
    """[n, 32] blocks: zeros, NaN of both signs, Inf, both, subnormals, lone values."""
    tiny = (
        np.finfo(np.float32).tiny
        if dtype == np.float32
        else ml_dtypes.finfo(dtype).tiny
    )
    nan = np.array([np.nan, np.nan], dtype)
    nan.view(_VIEW[nan.itemsize])[1] |= 1 << (8 * nan.itemsize - 1)
    rows = [
        [0.0], [-0.0], [0.0, -0.0], [nan[0]], [nan[1]], [np.inf], [-np.inf],
        [nan[0], np.inf], [-np.inf, nan[1], 1.0], [np.inf, -3.0, 0.0, -0.0],
        [np.inf, ml_dtypes.finfo(dtype).max, -ml_dtypes.finfo(dtype).max],
        [tiny], [-tiny], [tiny / 2, -tiny / 2], [tiny / 2, tiny],
        [ml_dtypes.finfo(dtype).max], [1.0], [448.0, -449.0], [57344.0, -61440.0],
    ]  # fmt: skip
    blocks = np.zeros((2 * len(rows), 32), dtype)
    for i, row in enumerate(rows):
        blocks[2 * i, : len(row)] = np.array(row).astype(dtype)
        blocks[2 * i + 1, -len(row) :] = np.array(row).astype(dtype)
    return blocks


def same_bits(got: object, expected: np.ndarray) -> None:
    """Asserts equal shape, dtype and bits; names the first entries that differ."""
    a, b = np.asarray(got), np.asarray(expected)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), (
        a.shape,
        a.dtype,
        b.shape,
        b.dtype,
    )
    view = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.itemsize]
    x, y = (np.ascontiguousarray(v).reshape(-1).view(view) for v in (a, b))
    bad = np.flatnonzero(x != y)
    assert not len(bad), f"{len(bad)} of {x.size} differ, at {bad[:5]}: " + ", ".join(
        f"{x[i]:#x} for {y[i]:#x}" for i in bad[:5]
    )
