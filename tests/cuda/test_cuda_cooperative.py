"""CUDA: grids that the GPU does not hold at once end, after some that it does.

Grids of few rounds are launched cooperatively and have a barrier. A larger grid that
waited there would never end.
"""

import jax
import numpy as np
import pytest
from _gpu import GPU, agree, formats_of

from te_flax.ops._choice import kernels
from te_flax.ops.amax import AMAX
from te_flax.ops.block import QUANTIZE_BLOCK_ROWCOL
from te_flax.ops.mxfp6 import QUANTIZE_MXFP6_ROWCOL
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.ops.mxfp8_values import QUANTIZE_MXFP8_VALUES
from te_flax.ops.quantize import QUANTIZE_ROW, QUANTIZE_ROWCOL

pytestmark = [*GPU, pytest.mark.timeout(120)]
BOTH = ("row", "col")
OPS = (
    AMAX,
    QUANTIZE_ROW,
    QUANTIZE_ROWCOL,
    QUANTIZE_BLOCK_ROWCOL,
    QUANTIZE_MXFP6_ROWCOL,
    QUANTIZE_MXFP8_ROWCOL,
    QUANTIZE_MXFP8_VALUES[BOTH, BOTH],
)


def calls(op, n):
    """The operands of one call on [n, n], and its attributes."""
    x = jax.random.normal(jax.random.key(n), (n, n), jax.numpy.bfloat16)
    scale = (np.float32(60),) if op in (QUANTIZE_ROW, QUANTIZE_ROWCOL) else ()
    format = "e2m3" if op is QUANTIZE_MXFP6_ROWCOL else "e4m3"
    attrs = formats_of(op, row_format=format, col_format=format)
    if "k_ndim" in op.attrs:
        attrs["k_ndim"] = 1
    if op is QUANTIZE_BLOCK_ROWCOL:
        attrs |= {"power_of_2": True, "epsilon": 0.0}
    return (x, *scale), attrs


def test_grids_end():
    device = jax.devices("cuda")[0]
    for n in (1024, 8192, 1024, 4096, 16384):
        for op in OPS:
            arrays, attrs = calls(op, n)
            arrays = jax.device_put(arrays, device)
            with kernels("*=native"):
                found = jax.jit(lambda *a, op=op, attrs=attrs: op(*a, **attrs))(*arrays)
            largest = np.asarray(abs(arrays[0]).max(), np.float32)
            agree((np.asarray(found[-1]),), (np.array([largest, 0], np.float32),))
