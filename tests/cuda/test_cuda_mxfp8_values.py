"""CUDA MXFP8 quantization with copies of values equals the numpy oracle bit for bit."""

import numpy as np
import pytest
from _gpu import BF16, F32, FORMATS, GPU, agree, each_dtype, finite, native, shuffled

from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD, QUANTIZE_DBIAS
from te_flax.ops.mxfp8_values import QUANTIZE_MXFP8_VALUES
from te_flax.testing import oracle
from te_flax.testing.patterns import amax_edges, patterns, special_blocks

pytestmark = GPU
BOTH = ("row", "col")
AXIS = {"row": 1, "col": 0}
each_variant = pytest.mark.parametrize(
    ("copies", "values"), QUANTIZE_MXFP8_VALUES, ids=lambda words: "".join(words)
)
SHAPES = [
    *[((128, 256), 1), ((130, 200), 1), ((33, 103), 1), ((72, 72), 1), ((1, 1000), 1)],
    *[((1000, 1), 1), ((3, 5, 7), 2), ((2, 40, 4, 16), 2), ((19,), 0), ((0, 5), 1)],
]


def expected(x, copies, values, k_ndim=1, **formats):
    results = list(oracle.quantize_mxfp8(x, k_ndim=k_ndim, **formats))
    for copy in values:
        at = 2 * copies.index(copy)
        how = {"k_ndim": k_ndim, "axis": AXIS[copy], "out_dtype": "bfloat16"}
        (results[at],) = oracle.dequantize_mxfp8(*results[at : at + 2], **how)
    return tuple(results)


def check(x, copies, values, k_ndim=1, row="e4m3", col="e5m2"):
    formats = {"row_format": row, "col_format": col}
    formats = {f"{copy}_format": formats[f"{copy}_format"] for copy in copies}
    op = QUANTIZE_MXFP8_VALUES[copies, values]
    got = native(op, x, k_ndim=k_ndim, **formats)
    agree(got, expected(x, copies, values, k_ndim, **formats))


@each_variant
@each_dtype
def test_every_pattern(copies, values, dtype):
    for x in (patterns(dtype), shuffled(dtype), finite(dtype)):
        x = np.resize(x, (x.size // 64, 64))
        check(x, copies, values)
        check(x, copies, values, row="e5m2", col="e4m3")


@each_dtype
def test_special_blocks(dtype):
    for x in (special_blocks(dtype), special_blocks(dtype).T):
        for format in FORMATS:
            check(np.ascontiguousarray(x), BOTH, BOTH, row=format, col=format)


@pytest.mark.parametrize("format", FORMATS)
def test_scales_around_every_power_of_two(format):
    amax = amax_edges(format)
    x = np.zeros((amax.size, 32), np.float32)
    x[np.arange(amax.size), np.arange(amax.size) % 32] = amax
    x[:, 31] = -amax / 3
    check(x, BOTH, BOTH, row=format, col=format)
    check(np.ascontiguousarray(x.T), BOTH, BOTH, row=format, col=format)


@each_variant
@each_dtype
def test_ragged_and_empty_shapes(copies, values, dtype):
    for shape, k_ndim in SHAPES:
        check(np.resize(finite(dtype), shape), copies, values, k_ndim)


@each_dtype
def test_many_tiles(dtype):
    x = np.random.default_rng(1).standard_normal((515, 1000)) * 30
    for copies, values in QUANTIZE_MXFP8_VALUES:
        check(x.astype(dtype), copies, values)


FUSED = {
    "act_fwd": (ACT_FWD, BOTH, ("row",)),
    "act_fwd_row": (ACT_FWD, ("row",), ("row",)),
    "act_bwd": (ACT_BWD, BOTH, BOTH),
    "quantize_dbias": (QUANTIZE_DBIAS, BOTH, BOTH),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
def test_fused_variants_return_the_values_of_their_codes(name, dtype, activation):
    family, copies, values = FUSED[name]
    m, k, slices = 130, 96, len(activation.split(","))
    rng = np.random.default_rng(3)
    shapes = {"M.. K..": (m, k), "M.. A K..": (m, slices, k)}
    arrays = [
        rng.standard_normal(shapes[dims]).astype(dtype)
        for dims in family.operands.values()
    ]
    attrs = {"k_ndim": 1, "out_dtype": dtype.name}
    if family is not QUANTIZE_DBIAS:
        own = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
        attrs |= {"activation": activation, **own}
    attrs |= {f"{copy}_format": "e4m3" for copy in copies}
    with_h = family is not QUANTIZE_DBIAS
    v = Variant("mxfp8", copies, with_h, dbias=family is not ACT_FWD)
    op = family.ops[v._replace(values=values)]
    plain = native(family.ops[v], *arrays, **attrs)
    found = dict(
        zip((a.name for a in op.dims.outs), native(op, *arrays, **attrs), strict=True)
    )
    want = dict(zip(found, plain, strict=True))
    for copy in values:
        how = {"k_ndim": 1, "axis": AXIS[copy], "out_dtype": "bfloat16"}
        codes, scale = want[copy], want[f"{copy}_scale"]
        rows = m if copy == "row" else -(-m // 32)
        flat = codes.reshape(m, -1), scale.reshape(rows, -1)
        (made,) = oracle.dequantize_mxfp8(*flat, **how)
        want[copy] = made.reshape(codes.shape)
    agree(tuple(found.values()), tuple(want.values()))
