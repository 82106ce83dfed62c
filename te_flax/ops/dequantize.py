"""Codes and their scales back to float32, bfloat16 or float16."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits, fp4, fp6
from te_flax.ops._op import Case, KernelOp
from te_flax.ops.block import BLOCK as FLOAT32_BLOCK
from te_flax.ops.mxfp8 import BLOCK
from te_flax.ops.nvfp4 import BLOCK as NVFP4_BLOCK
from te_flax.ops.quantize import signature
from te_flax.typing import FLOATS, FP8, Array


def _scaled(values: Array, scale: Array, lifted: Array, out_dtype: str) -> Array:
    """Values * scale / (2^64 where lifted), tiny results as the zero of their sign."""
    u = values * scale
    # 2^-62 in the lifted range is 2^-126 after the second factor: smaller results
    # would be subnormal.
    tiny = lifted & (jnp.abs(u) < jnp.float32(2.0**-62))
    u = _bits.as_float(jnp.where(tiny, _bits.as_bits(u) & _bits.SIGN, _bits.as_bits(u)))
    u = u * jnp.where(lifted, jnp.float32(2.0**-64), jnp.float32(1))
    return _bits.narrow(_bits.as_bits(u), out_dtype)


def _values(data: Array) -> Array:
    return _bits.as_float(_bits.widen(data))


def _dequantize(data: Array, scale_inv: Array, *, out_dtype: str) -> tuple[Array]:
    scale = _bits.as_float(_bits.flush(_bits.as_bits(scale_inv)))
    lifted = jnp.abs(scale) < jnp.float32(2.0**-60)
    scale = scale * jnp.where(lifted, jnp.float32(2.0**64), jnp.float32(1))
    return (_scaled(_values(data), scale, lifted, out_dtype),)


def repeat_blocks(
    scale: Array, shape: tuple[int, int], block: tuple[int, int]
) -> Array:
    """The scale of every element of a matrix from those of its (partial) blocks."""
    rows, cols = shape
    grid = scale.reshape(-(-rows // block[0]), -(-cols // block[1]))
    for axis, size in enumerate(block):
        if size > 1:
            grid = jnp.repeat(grid, size, axis=axis)
    return grid[:rows, :cols]


def _dequantize_block(
    data: Array, scale_inv: Array, *, k_ndim: int, out_dtype: str, rows: int
) -> tuple[Array]:
    """Blocks of rows x 128 of the matrix [M, K]."""
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    scale = repeat_blocks(scale_inv, (m, k), (rows, FLOAT32_BLOCK))
    x = _dequantize(data.reshape(m, k), scale, out_dtype=out_dtype)[0]
    return (x.reshape(data.shape),)


def _nvfp4_values(data: Array, scale: Array, *, k_ndim: int, rows: int) -> Array:
    """Codes times block scales, exact: [M, bytes, 2] of packed [M.., K..]."""
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    scale = repeat_blocks(scale.astype(jnp.float32), (m, k), (rows, NVFP4_BLOCK // 2))
    return fp4.decode(fp4.unpack(data.reshape(m, k, 1))) * scale[..., None]


def _dequantize_nvfp4(
    data: Array,
    scale: Array,
    global_scale: Array,
    *,
    k_ndim: int,
    out_dtype: str,
    rows: int,
) -> tuple[Array]:
    values = _nvfp4_values(data, scale, k_ndim=k_ndim, rows=rows)
    x = _dequantize(values, global_scale, out_dtype=out_dtype)[0]
    return (x.reshape(*data.shape, 2),)


def _block_factor(scale: Array) -> tuple[Array, Array]:
    """2^(e - 127), times 2^64 where that lifts it out of the small numbers."""
    e = scale.astype(jnp.int32)
    lifted = e < 64
    factor = jnp.where(e == 255, _bits.QUIET_NAN, jnp.where(lifted, e + 64, e) << 23)
    return _bits.as_float(factor), lifted


def _times_e8m0(values: Array, scale: Array, axis: int, out_dtype: str) -> Array:
    """A matrix times the powers of two of its blocks of 32 along axis."""
    blocks = list(values.shape)
    blocks[axis] = -(-blocks[axis] // BLOCK)
    repeated = jnp.repeat(scale.reshape(blocks), BLOCK, axis=axis)
    factor, lifted = _block_factor(repeated[: values.shape[0], : values.shape[1]])
    return _scaled(values, factor, lifted, out_dtype)


def _dequantize_mxfp8(
    data: Array, scale: Array, *, k_ndim: int, out_dtype: str, axis: int
) -> tuple[Array]:
    m = math.prod(data.shape[: data.ndim - k_ndim])
    k = math.prod(data.shape[data.ndim - k_ndim :])
    x = _times_e8m0(_values(data.reshape(m, k)), scale, axis, out_dtype)
    return (x.reshape(data.shape),)


def _dequantize_mxfp6(
    data: Array, scale: Array, *, k_ndim: int, format: str, out_dtype: str, axis: int
) -> tuple[Array]:
    """Of groups [M.., K.., 3]: the four codes of one are a dim of the result."""
    fp6.check_format(f"dequantize_mxfp6_{'row' if axis else 'col'}", "format", format)
    m = math.prod(data.shape[: data.ndim - k_ndim - 1])
    groups = math.prod(data.shape[data.ndim - k_ndim - 1 : -1])
    codes = fp6.unpack(data.reshape(m, 3 * groups))
    x = _times_e8m0(fp6.decode(codes, format), scale, axis, out_dtype)
    return (x.reshape(*data.shape[:-1], 4),)


_OUT_DTYPES = tuple(np.dtype(t).name for t in FLOATS)
_CODES = tuple(FP8.values())


def _checked(reference: Any, where: str, *arrays: Array, **attrs: Any) -> tuple[Array]:
    if attrs["out_dtype"] not in _OUT_DTYPES:
        rule, got = f"be {' or '.join(_OUT_DTYPES)}", repr(attrs["out_dtype"])
        raise ValueError(message(where, "out_dtype", rule, got, "cast the result"))
    return reference(*arrays, **attrs)


def _cases(attrs: dict[str, Any], scale_shape: tuple[int, ...], scale_dtype: Any):
    for format, dtype in FP8.items():
        for name in _OUT_DTYPES:
            yield Case(
                f"{format}_{name}",
                ((250, 328), scale_shape),
                (dtype, scale_dtype),
                {**attrs, "out_dtype": name},
            )


def _declare(
    name: str,
    reference: Any,
    scales: dict[str, str],
    dtypes: dict[str, tuple],
    cases: Any,
    *,
    data: str = "M.. K..",
    x: str = "M.. K..",
    attrs: dict[str, type] | None = None,
    **handler: Any,
) -> KernelOp:
    """One op over codes and their block scales; ``handler`` as KernelOp's."""
    return KernelOp(
        name=name,
        signature=signature({"data": data} | scales, {"x": x}),
        reference=functools.partial(_checked, reference, name),
        attrs={"out_dtype": str, "k_ndim": int, **(attrs or {})},
        groups={"K": "k_ndim"},
        dtypes=dtypes,
        batch_group="M",
        cases=tuple(cases),
        **handler,
    )


def _mxfp8_op(copy: str, scale: str, axis: int, scale_shape: tuple) -> KernelOp:
    return _declare(
        f"dequantize_mxfp8_{copy}",
        functools.partial(_dequantize_mxfp8, axis=axis),
        {"scale": scale},
        {"data": _CODES, "scale": (jnp.uint8,)},
        _cases({"k_ndim": 1}, scale_shape, jnp.uint8),
        handler="dequantize_mxfp8",
        handler_attrs={"axis": axis},
    )


def _mxfp6_op(copy: str, scale: str, axis: int, scale_shape: tuple) -> KernelOp:
    """Of whole groups of four codes: a signature cannot tell a part of one."""
    attrs = {"k_ndim": 1, "format": "e2m3"}
    kinds = (jnp.uint8, jnp.uint8)
    return _declare(
        f"dequantize_mxfp6_{copy}",
        functools.partial(_dequantize_mxfp6, axis=axis),
        {"scale": scale},
        {"data": kinds[:1], "scale": kinds[1:]},
        (
            Case(t, ((250, 82, 3), scale_shape), kinds, {**attrs, "out_dtype": t})
            for t in _OUT_DTYPES
        ),
        data="M.. K.. 3",
        x="M.. K.. 4",
        attrs={"format": str},
        handler="dequantize_mxfp6",
        handler_attrs={"axis": axis},
    )


def _block_op(name: str, scale: str, rows: int, scale_shape: tuple) -> KernelOp:
    return _declare(
        name,
        functools.partial(_dequantize_block, rows=rows),
        {"scale_inv": scale},
        {"data": _CODES, "scale_inv": (jnp.float32,)},
        _cases({"k_ndim": 1}, scale_shape, jnp.float32),
        handler="dequantize_block",
        handler_attrs={"rows": rows},
    )


def _nvfp4_op(name: str, scale: str, rows: int, scale_shape: tuple) -> KernelOp:
    """Of bytes, since a signature cannot tell an odd number of codes from their pairs.

    The two codes of a byte are a dim of their own in the result.
    """
    kinds = (jnp.uint8, jnp.float8_e4m3fn, jnp.float32)
    return _declare(
        name,
        functools.partial(_dequantize_nvfp4, rows=rows),
        {"scale": scale, "global_scale": ""},
        {
            n: (t,)
            for n, t in zip(("data", "scale", "global_scale"), kinds, strict=True)
        },
        (
            Case(
                out_dtype,
                ((250, 328), scale_shape, ()),
                kinds,
                {"k_ndim": 1, "out_dtype": out_dtype},
            )
            for out_dtype in _OUT_DTYPES
        ),
        x="M.. K.. 2",
    )


DEQUANTIZE = KernelOp(
    name="dequantize",
    signature="data: D.., scale_inv: -> x: D..",
    reference=functools.partial(_checked, _dequantize, "dequantize"),
    attrs={"out_dtype": str},
    dtypes={"data": _CODES, "scale_inv": (jnp.float32,)},
    batch_group="D",
    handler="dequantize_tensor",
    cases=tuple(_cases({}, (), jnp.float32)),
)
DEQUANTIZE_MXFP8_ROW = _mxfp8_op("row", "M.. K../32", 1, (250, 11))
DEQUANTIZE_MXFP8_COL = _mxfp8_op("col", "M../32 K..", 0, (8, 328))
DEQUANTIZE_MXFP6_ROW = _mxfp6_op("row", "M.. K../8", 1, (250, 11))
DEQUANTIZE_MXFP6_COL = _mxfp6_op("col", "M../32 K.. 4", 0, (8, 82, 4))
DEQUANTIZE_BLOCK = _block_op("dequantize_block", "M.. K../128", 1, (250, 3))
DEQUANTIZE_BLOCK2D = _block_op("dequantize_block2d", "M../128 K../128", 128, (2, 3))
DEQUANTIZE_NVFP4 = _nvfp4_op("dequantize_nvfp4", "M.. K../8", 1, (250, 41))
DEQUANTIZE_NVFP4_2D = _nvfp4_op("dequantize_nvfp4_2d", "M../16 K../8", 16, (16, 41))
