"""MXFP6 quantization: blocks of 32 along the contraction, packed codes of six bits.

The scales are those of MXFP8 with the largest magnitude of the FP6 format. In both
copies the codes of a row follow each other along the flattened ``K..``, four in three
bytes: an op returns ``[M.., ceil(K / 4), 3]``, in memory ``[M.., 3 ceil(K / 4)]``.
"""

import functools
import math

import jax.numpy as jnp

from te_flax.ops import _bits, fp6
from te_flax.ops._op import KernelOp
from te_flax.ops.mxfp8 import scaled_blocks
from te_flax.ops.quantize import declare
from te_flax.typing import FLOATS, Array

_DIMS = {
    "row": {"row": "M.. K../4 3", "row_scale": "M.. K../32"},
    "col": {"col": "M.. K../4 3", "col_scale": "M../32 K.."},
}


def _quantize_mxfp6(
    x: Array, *, name: str, k_ndim: int, **formats: str
) -> tuple[Array, ...]:
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    m, k = math.prod(m_dims), math.prod(k_dims)
    bits = _bits.flush(_bits.widen(x)).reshape(m, k)
    results = []
    for axis, copy in ((1, "row"), (0, "col")):
        attr = f"{copy}_format"
        if attr not in formats:
            continue
        fp6.check_format(name, attr, formats[attr])
        scaled, scales = scaled_blocks(bits, axis, fp6.MAX[formats[attr]])
        data = fp6.pack(fp6.encode(_bits.as_float(scaled), formats[attr]))
        scale_dims = (*m_dims, -(-k // 32)) if axis else (-(-m // 32), *k_dims)
        results += [data.reshape(*m_dims, -(-k // 4), 3), scales.reshape(scale_dims)]
    return (*results, _bits.amax(bits))


def _mxfp6_op(*copies: str, noop: bool = False) -> KernelOp:
    name = f"quantize_mxfp6_{''.join(copies)}{'_noop' if noop else ''}"
    results = {name: dims for copy in copies for name, dims in _DIMS[copy].items()}
    return declare(
        name,
        functools.partial(_quantize_mxfp6, name=name),
        {"x": "M.. K.."},
        results | {"amax": "2"},
        noop=noop,
        formats=(),
        attrs={f"{copy}_format": "e2m3" for copy in copies},
        codes=(jnp.uint8,),
        dtypes={"x": FLOATS},
        handler="quantize_mxfp6",
        handler_attrs={},
    )


QUANTIZE_MXFP6_ROW = _mxfp6_op("row")
QUANTIZE_MXFP6_COL = _mxfp6_op("col")
QUANTIZE_MXFP6_ROWCOL = _mxfp6_op("row", "col")
QUANTIZE_MXFP6_ROW_NOOP = _mxfp6_op("row", noop=True)
QUANTIZE_MXFP6_COL_NOOP = _mxfp6_op("col", noop=True)
QUANTIZE_MXFP6_ROWCOL_NOOP = _mxfp6_op("row", "col", noop=True)
