"""MXFP8 quantization with copies that hold values: for products that take no codes.

A copy of values is, by definition, ``dequantize_mxfp8`` of the copy of codes, in
bfloat16: every code times its power of two is a bfloat16 number, except that below
2^-126 it is the zero of its sign and from 2^128 on an infinity.
"""

import functools

from te_flax.ops._op import KernelOp
from te_flax.ops.dequantize import _dequantize_mxfp8
from te_flax.ops.mxfp8 import _DIMS, _quantize_mxfp8
from te_flax.ops.quantize import declare
from te_flax.typing import FLOATS, Array

_AXIS = {"row": 1, "col": 0}


def quantize_values(
    x: Array, *, k_ndim: int, values: tuple[str, ...], **formats: str
) -> tuple[Array, ...]:
    """Returns what quantize_mxfp8 returns, values in place of some copies' codes.

    Args:
        x: ``[M.., K..]``.
        k_ndim: number of dims in ``K..``.
        values: "row" and "col", the copies that hold values.
        **formats: ``row_format`` and ``col_format`` of the copies wanted.
    """
    results = list(_quantize_mxfp8(x, k_ndim=k_ndim, swizzled=False, **formats))
    copies = [copy for copy in _AXIS if f"{copy}_format" in formats]
    for copy in values:
        at = 2 * copies.index(copy)
        codes, scale = results[at : at + 2]
        (results[at],) = _dequantize_mxfp8(
            codes, scale, k_ndim=k_ndim, out_dtype="bfloat16", axis=_AXIS[copy]
        )
    return tuple(results)


def _values_op(copies: tuple[str, ...], values: tuple[str, ...]) -> KernelOp:
    results = {name: dims for copy in copies for name, dims in _DIMS[copy].items()}
    return declare(
        f"quantize_mxfp8_{''.join(copies)}_{''.join(values)}values",
        functools.partial(quantize_values, values=values),
        {"x": "M.. K.."},
        results | {"amax": "2"},
        noop=False,
        dtypes={"x": FLOATS},
        handler="quantize_mxfp8_values",
        handler_attrs={},
    )


_BOTH = ("row", "col")
# (copies, those of values) -> op: what the passes of a GEMM read.
QUANTIZE_MXFP8_VALUES = {
    (copies, values): _values_op(copies, values)
    for copies, values in (
        (("row",), ("row",)),
        (("col",), ("col",)),
        (_BOTH, ("row",)),
        (_BOTH, ("col",)),
        (_BOTH, _BOTH),
    )
}
