"""NVFP4 quantization: e2m1 codes, an e4m3 scale for 16 of them, one for the tensor."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from te_flax.ops import _bits, fp4
from te_flax.ops._op import Case, KernelOp
from te_flax.ops.quantize import declare
from te_flax.typing import FLOATS, FP8_MAX, Array

BLOCK = 16
SCALE = jnp.float8_e4m3fn
_TOP = FP8_MAX["e4m3"] * fp4.MAX  # 2688, what the largest magnitude becomes
_LARGEST = 0x7E  # 448
# f32(1 / scale) of every e4m3 byte: no division whose last bit a platform decides. A
# block of scale 0 or NaN has codes 0.
_SCALES = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
_RECIPROCALS = np.array(
    [1 / s if s > 0 else 0 for s in _SCALES.astype(np.float64)], np.float32
)


def _nvfp4_scale(amax: Array) -> tuple[Array, Array]:
    bits = _bits.flush(_bits.as_bits(amax))
    usable = (bits > 0) & (bits < _bits.INF)
    scale = _bits.divide(jnp.float32(_TOP), jnp.where(usable, _bits.as_float(bits), 1))
    scale = jnp.minimum(scale, jnp.float32(2.0**126))  # at least 2^-117 as it is
    scale = jnp.where(usable, scale, 1)
    return scale, _bits.divide(jnp.float32(1), scale)


def _block_scales(a: Array, finite: Array, scale: Array) -> Array:
    """The e4m3 bytes, as int32, of blocks whose largest magnitude has the pattern a."""
    # The factors first: XLA would multiply two constants out of a chain of products.
    u = _bits.as_float(finite) * (scale * np.float32(1 / fp4.MAX))
    codes = lax.bitcast_convert_type(_bits.encode(_bits.as_bits(u), "e4m3"), jnp.uint8)
    codes = jnp.where(a == _bits.INF, _LARGEST, codes.astype(jnp.int32))
    return jnp.where(a > _bits.INF, _bits.CODE_NAN, codes)


def _quantize_blocks(
    bits: Array, scale: Array, block: tuple[int, int], random: Array | None = None
) -> tuple[Array, Array]:
    """e2m1 codes and e4m3 scales of a flushed matrix cut into blocks of one shape."""
    padded = _bits.pad_to(_bits.pad_to(bits, 0, block[0]), 1, block[1])
    rows, cols = (n // b for n, b in zip(padded.shape, block, strict=True))
    blocks = padded.reshape(rows, block[0], cols, block[1])
    a = _bits.magnitude(blocks)
    find = functools.partial(jnp.max, axis=(1, 3), keepdims=True, initial=0)
    scales = _block_scales(find(a), find(jnp.where(a < _bits.INF, a, 0)), scale)
    factor = jnp.array(_RECIPROCALS).at[scales].get(mode="promise_in_bounds")
    values = (_bits.as_float(blocks) * scale * factor).reshape(padded.shape)
    values = values[: bits.shape[0], : bits.shape[1]]
    if random is None:
        codes = fp4.encode(values)
    else:
        codes = fp4.encode_stochastic(values, random.reshape(bits.shape))
    nan = jnp.broadcast_to(scales == _bits.CODE_NAN, blocks.shape)
    nan = nan.reshape(padded.shape)[: bits.shape[0], : bits.shape[1]]
    scales = lax.bitcast_convert_type(scales.astype(jnp.uint8), SCALE)
    return jnp.where(nan, jnp.uint8(0), codes), scales.reshape(rows, cols)


def _quantize_row(
    x: Array, scale: Array, random: Array | None = None, *, k_ndim: int
) -> tuple[Array, ...]:
    """1 x 16 blocks along K."""
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    bits = _bits.flush(_bits.widen(x)).reshape(math.prod(m_dims), math.prod(k_dims))
    scale = _bits.as_float(_bits.flush(_bits.as_bits(scale)))
    codes, scales = _quantize_blocks(bits, scale, (1, BLOCK), random)
    data = fp4.pack(codes)
    return (
        data.reshape(*m_dims, data.shape[1]),
        scales.reshape(*m_dims, scales.shape[1]),
        _bits.amax(bits),
    )


def _quantize_2d(
    x: Array, scale: Array, *, k_ndim: int, copies: tuple[str, ...]
) -> tuple[Array, ...]:
    """16 x 16 blocks: both copies hold the same codes and share their scales."""
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    bits = _bits.flush(_bits.widen(x)).reshape(math.prod(m_dims), math.prod(k_dims))
    scale = _bits.as_float(_bits.flush(_bits.as_bits(scale)))
    codes, scales = _quantize_blocks(bits, scale, (BLOCK, BLOCK))
    results = []
    for copy in copies:
        dims = m_dims if copy == "row" else k_dims
        data = fp4.pack(codes if copy == "row" else codes.T)
        results.append(data.reshape(*dims, data.shape[1]))
    return (*results, scales, _bits.amax(bits))


def _op(
    name: str, reference: Any, results: dict[str, str], *, random: bool, noop: bool
):
    operands = {"x": "M.. K..", "scale": ""} | ({"random": "M.. K.."} if random else {})
    return declare(
        f"quantize_nvfp4_{name}{'_noop' if noop else ''}",
        reference,
        operands,
        results | {"amax": "2"},
        noop=noop,
        formats=(),
        codes=(jnp.uint8,),
        scale_dtype=SCALE,
        dtypes={"x": FLOATS, "scale": (jnp.float32,), "random": (jnp.uint32,)},
        handler=None,
        handler_attrs={},
    )


def _row_op(*, random: bool = False, noop: bool = False) -> KernelOp:
    results = {"row": "M.. K../2", "row_scale": f"M.. K../{BLOCK}"}
    name = "row_stochastic" if random else "row"
    return _op(name, _quantize_row, results, random=random, noop=noop)


def _2d_op(*copies: str, noop: bool = False) -> KernelOp:
    dims = {"row": "M.. K../2", "col": "K.. M../2"}
    results = {copy: dims[copy] for copy in copies}
    results |= {"scale_inv": f"M../{BLOCK} K../{BLOCK}"}
    reference = functools.partial(_quantize_2d, copies=copies)
    return _op(f"2d_{''.join(copies)}", reference, results, random=False, noop=noop)


NVFP4_SCALE = KernelOp(
    name="nvfp4_scale",
    signature="amax: B.. -> scale: B.., scale_inv: B..",
    reference=_nvfp4_scale,
    dtypes={"amax": (jnp.float32,)},
    batch_group="B",
    cases=(Case("float32", ((64,),), (jnp.float32,)),),
)
QUANTIZE_NVFP4_ROW = _row_op()
QUANTIZE_NVFP4_ROW_NOOP = _row_op(noop=True)
QUANTIZE_NVFP4_ROW_STOCHASTIC = _row_op(random=True)
QUANTIZE_NVFP4_ROW_STOCHASTIC_NOOP = _row_op(random=True, noop=True)
QUANTIZE_NVFP4_2D_ROW = _2d_op("row")
QUANTIZE_NVFP4_2D_COL = _2d_op("col")
QUANTIZE_NVFP4_2D_ROWCOL = _2d_op("row", "col")
QUANTIZE_NVFP4_2D_ROW_NOOP = _2d_op("row", noop=True)
QUANTIZE_NVFP4_2D_COL_NOOP = _2d_op("col", noop=True)
QUANTIZE_NVFP4_2D_ROWCOL_NOOP = _2d_op("row", "col", noop=True)
