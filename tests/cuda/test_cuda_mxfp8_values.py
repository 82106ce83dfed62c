"""CUDA MXFP8 quantization with copies of values equals the numpy oracle bit for bit."""

import numpy as np
import pytest
from _gpu import BF16, F32, FORMATS, GPU, agree, each_dtype, finite, native, shuffled
from _variants import FAMILIES, attributes, draw, results, same_results, with_values

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
    f"{family.name}{v.suffix}": (family, v)
    for family in FAMILIES.values()
    for v in family.variants
    if v.values
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
def test_fused_variants_return_the_values_of_their_codes(name, dtype, activation):
    family, v = FUSED[name]
    m, k = 130, 96
    own = draw(family, (m,), (k,), dtype, activation)
    attrs = attributes(family, (k,), dtype, activation)
    codes = results(native, family, v._replace(values=()), own, attrs)
    same_results(results(native, family, v, own, attrs), with_values(v, codes, m))
