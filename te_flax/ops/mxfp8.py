"""MXFP8 quantization: blocks of 32 along the contraction, one power of two each."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from te_flax.ops import _bits
from te_flax.ops._op import KernelOp
from te_flax.ops.quantize import declare
from te_flax.typing import FLOATS, FP8_MAX, Array

BLOCK = 32
_NAN_SCALE = 255
_INF_SCALE = 254


def _block_exponent(a: Array, largest: float) -> Array:
    """The e8m0 byte, as int32, of blocks whose amax has the float32 pattern a."""
    # Below 2^-100 the product with 1/max could be subnormal: work 2^64 higher.
    small = a < (27 << 23)
    lift = jnp.where(small, jnp.float32(2.0**64), jnp.float32(1))
    t = _bits.as_bits(_bits.as_float(a) * lift * np.float32(1 / largest))
    round_up = ((t & 0x7FFFFF) != 0).astype(jnp.int32)
    e = jnp.maximum((t >> 23) + round_up - jnp.where(small, 64, 0), 0)
    e = jnp.where(a == _bits.INF, _INF_SCALE, e)
    return jnp.where(a > _bits.INF, _NAN_SCALE, e)


def scaled_blocks(bits: Array, axis: int, largest: float) -> tuple[Array, Array]:
    """Scales blocks of 32 along one axis into the range of a format.

    Args:
        bits: float32 patterns of a flushed matrix.
        axis: of the blocks, the last one of which may be partial.
        largest: magnitude in the format.

    Returns:
        The patterns of ``x * 2^(127 - e)``, the positive NaN throughout a block with
        one, and the e8m0 bytes.
    """
    padded = _bits.pad_to(bits, axis, BLOCK)
    count = padded.shape[axis] // BLOCK
    blocks = padded.reshape(*bits.shape[:axis], count, BLOCK, *bits.shape[axis + 1 :])
    a = jnp.max(_bits.magnitude(blocks), axis=axis + 1, keepdims=True, initial=0)
    e = _block_exponent(a, largest)
    # 2^(127 - e) built from bits. 2^-127 is no normal number, so a block with an
    # infinity takes 2^-63 and then 2^-64.
    infinite = e >= _INF_SCALE
    first = _bits.as_float(jnp.where(infinite, 64, 254 - e) << 23)
    second = jnp.where(infinite, jnp.float32(2.0**-64), jnp.float32(1))
    scaled = _bits.as_bits(_bits.as_float(blocks) * first * second)
    scaled = jnp.where(e == _NAN_SCALE, _bits.QUIET_NAN, scaled)
    scaled = scaled.reshape(padded.shape)[: bits.shape[0], : bits.shape[1]]
    return scaled, jnp.squeeze(e, axis + 1).astype(jnp.uint8)


def _quantize_blocks(bits: Array, axis: int, format: str) -> tuple[Array, Array]:
    """Codes and e8m0 bytes of a flushed matrix with its blocks along axis."""
    scaled, scales = scaled_blocks(bits, axis, FP8_MAX[format])
    return _bits.encode(scaled, format), scales


def _swizzle(scales: Array) -> Array:
    """[R, C] -> [R/128, C/128 of the data, 32, 4, 4], the tiles that cuBLASLt reads."""
    padded = _bits.pad_to(_bits.pad_to(scales, 0, 128), 1, 4)
    rows, cols = padded.shape
    return padded.reshape(rows // 128, 4, 32, cols // 4, 4).transpose(0, 3, 2, 1, 4)


def _quantize_mxfp8(
    x: Array,
    *,
    k_ndim: int,
    row_format: str | None = None,
    col_format: str | None = None,
    swizzled: bool,
) -> tuple[Array, ...]:
    m_dims = x.shape[: x.ndim - k_ndim]
    k_dims = x.shape[x.ndim - k_ndim :]
    m, k = math.prod(m_dims), math.prod(k_dims)
    bits = _bits.flush(_bits.widen(x)).reshape(m, k)
    results = []
    if row_format is not None:
        codes, scales = _quantize_blocks(bits, 1, row_format)
        scales = (
            _swizzle(scales) if swizzled else scales.reshape(*m_dims, -(-k // BLOCK))
        )
        results += [codes.reshape(x.shape), scales]
    if col_format is not None:
        codes, scales = _quantize_blocks(bits, 0, col_format)
        scales = (
            _swizzle(scales.T) if swizzled else scales.reshape(-(-m // BLOCK), *k_dims)
        )
        results += [codes.reshape(x.shape), scales]
    return (*results, _bits.amax(bits))


_DIMS = {
    "row": {"row": "M.. K..", "row_scale": "M.. K../32"},
    "col": {"col": "M.. K..", "col_scale": "M../32 K.."},
}
_SWIZZLED = {
    "row_scale": "M../128 K../128 32 4 4",
    "col_scale": "K../128 M../128 32 4 4",
}


def _mxfp8_op(*copies: str, swizzled: bool = False, noop: bool = False) -> KernelOp:
    results = {name: dims for copy in copies for name, dims in _DIMS[copy].items()}
    if swizzled:
        results |= {name: dims for name, dims in _SWIZZLED.items() if name in results}
    suffix = ("_swizzled" if swizzled else "") + ("_noop" if noop else "")
    return declare(
        f"quantize_mxfp8_{''.join(copies)}{suffix}",
        functools.partial(_quantize_mxfp8, swizzled=swizzled),
        {"x": "M.. K.."},
        results | {"amax": "2"},
        noop=noop,
        dtypes={"x": FLOATS},
        handler="quantize_mxfp8",
        handler_attrs={"swizzled": swizzled},
    )


QUANTIZE_MXFP8_ROW = _mxfp8_op("row")
QUANTIZE_MXFP8_COL = _mxfp8_op("col")
QUANTIZE_MXFP8_ROWCOL = _mxfp8_op("row", "col")
QUANTIZE_MXFP8_ROW_NOOP = _mxfp8_op("row", noop=True)
QUANTIZE_MXFP8_COL_NOOP = _mxfp8_op("col", noop=True)
QUANTIZE_MXFP8_ROWCOL_NOOP = _mxfp8_op("row", "col", noop=True)
QUANTIZE_MXFP8_ROW_SWIZZLED = _mxfp8_op("row", swizzled=True)
QUANTIZE_MXFP8_COL_SWIZZLED = _mxfp8_op("col", swizzled=True)
QUANTIZE_MXFP8_ROWCOL_SWIZZLED = _mxfp8_op("row", "col", swizzled=True)
QUANTIZE_MXFP8_ROW_SWIZZLED_NOOP = _mxfp8_op("row", swizzled=True, noop=True)
QUANTIZE_MXFP8_COL_SWIZZLED_NOOP = _mxfp8_op("col", swizzled=True, noop=True)
QUANTIZE_MXFP8_ROWCOL_SWIZZLED_NOOP = _mxfp8_op("row", "col", swizzled=True, noop=True)
