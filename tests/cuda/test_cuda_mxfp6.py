"""CUDA FP6 codes, MXFP6 quantization and dequantization equal the numpy oracle."""

import numpy as np
import pytest
from _gpu import (
    BF16,
    F32,
    FLAGS,
    GPU,
    INPUTS,
    agree,
    each_dtype,
    finite,
    formats_of,
    native,
    shuffled,
)

from te_flax.ops import dequantize, fp6
from te_flax.ops import mxfp6 as ops
from te_flax.testing import oracle_mxfp6 as oracle
from te_flax.testing.oracle import noop as kept
from te_flax.testing.patterns import amax_edges, patterns, special_blocks

pytestmark = GPU
FORMATS = tuple(fp6.MAX)
each_format = pytest.mark.parametrize("format", FORMATS)
VARIANTS = {
    "row": (ops.QUANTIZE_MXFP6_ROW, ops.QUANTIZE_MXFP6_ROW_NOOP),
    "col": (ops.QUANTIZE_MXFP6_COL, ops.QUANTIZE_MXFP6_COL_NOOP),
    "rowcol": (ops.QUANTIZE_MXFP6_ROWCOL, ops.QUANTIZE_MXFP6_ROWCOL_NOOP),
}
# Rows of codes that allow stores of 16, 2 and 1 bytes; whole and partial tiles.
SHAPES = [
    *[((128, 256), 1), ((130, 192), 1), ((130, 200), 1), ((33, 103), 1), ((72, 72), 1)],
    *[((64, 96), 1), ((1, 1000), 1), ((1000, 1), 1), ((34, 66), 1), ((3, 5, 7), 2)],
    *[((2, 40, 4, 16), 2), ((19,), 1), ((19,), 0), ((), 0), ((0, 5), 1), ((5, 0), 1)],
]


def check(op, x, row, col, k_ndim=1):
    attrs = formats_of(op, row_format=row, col_format=col) | {"k_ndim": k_ndim}
    agree(native(op, x, **attrs), oracle.quantize(x, **attrs))


@each_format
def test_every_code_both_ways(format):
    codes = np.arange(64, dtype=np.uint8)
    values = oracle.decode(codes, format).astype(np.float32)
    agree(native(fp6.FP6_DECODE, codes, format=format), (values,))
    for dtype in INPUTS:
        got = native(fp6.FP6_ENCODE, values.astype(dtype), format=format)
        agree(got, (codes,))
    every = np.arange(256, dtype=np.uint8)[:251]  # two bits do not count; a ragged end
    expected = oracle.decode(every & 63, format).astype(np.float32)
    agree(native(fp6.FP6_DECODE, every, format=format), (expected,))


@each_dtype
@each_format
def test_every_pattern_is_encoded(format, dtype):
    for x in (patterns(dtype), patterns(dtype)[3:]):
        got = native(fp6.FP6_ENCODE, x, format=format)
        agree(got, (oracle.encode(x, format),))


def test_packing():
    rng = np.random.default_rng(0)
    for shape in ((512, 4), (64, 128), (7, 13), (3, 5, 8), (1, 1), (0, 5), (5, 0)):
        codes = rng.integers(0, 64, shape, np.uint8)
        (data,) = native(fp6.FP6_PACK, codes, k_ndim=1)
        want = oracle.pack(codes)
        agree((data.reshape(want.shape),), (want,))
        (back,) = native(fp6.FP6_UNPACK, data, k_ndim=1)
        want = oracle.unpack(want)
        agree((back.reshape(want.shape),), (want,))


@each_dtype
@each_format
def test_every_pattern_in_blocks_of_like_and_mixed_magnitudes(format, dtype):
    op = VARIANTS["rowcol"][0]
    other = FORMATS[format == "e2m3"]
    for x in (patterns(dtype), shuffled(dtype), finite(dtype)):
        check(op, np.resize(x, (x.size // 64, 64)), format, other)
        check(op, np.resize(x, (x.size // 66, 66)), format, other)


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_special_blocks(variant, dtype):
    for x in (special_blocks(dtype), special_blocks(dtype).T):
        for format in FORMATS:
            check(VARIANTS[variant][0], np.ascontiguousarray(x), format, format)


@each_format
def test_scales_around_every_power_of_two(format):
    amax = amax_edges(format)
    x = np.zeros((amax.size, 32), np.float32)
    x[np.arange(amax.size), np.arange(amax.size) % 32] = amax
    check(VARIANTS["rowcol"][0], x, format, format)
    check(VARIANTS["rowcol"][0], np.ascontiguousarray(x.T), format, format)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_tensor_of_subnormals_counts_as_zeros(dtype):
    tiny = finite(dtype)
    tiny = tiny[np.abs(tiny.astype(np.float64)) < 2.0**-126]
    check(VARIANTS["rowcol"][0], tiny, "e2m3", "e3m2")


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_and_empty_shapes(variant, dtype):
    for shape, k_ndim in SHAPES:
        x = np.resize(finite(dtype), shape)
        check(VARIANTS[variant][0], x, "e2m3", "e3m2", k_ndim)


@each_dtype
def test_many_tiles(dtype):
    x = np.random.default_rng(1).standard_normal((515, 1088)) * 30
    check(VARIANTS["rowcol"][0], x.astype(dtype), "e2m3", "e2m3")
    check(VARIANTS["rowcol"][0], x[:, :1000].astype(dtype), "e3m2", "e3m2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_noop_keeps_the_previous_results(variant):
    plain, noop = VARIANTS[variant]
    attrs = formats_of(plain, row_format="e2m3", col_format="e3m2") | {"k_ndim": 1}
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 200)).astype(BF16) for _ in range(2))
    old_results, new_results = native(plain, old, **attrs), native(plain, x, **attrs)
    for flag in FLAGS:
        flag = np.array([flag], np.float32)
        got = native(noop, flag, x, *old_results, **attrs)
        agree(got, kept(flag, old_results, new_results))


@pytest.mark.parametrize("out_dtype", [d.name for d in INPUTS])
@pytest.mark.parametrize("axis", [0, 1])
@each_format
def test_dequantize_every_code_and_exponent(format, axis, out_dtype):
    op = (dequantize.DEQUANTIZE_MXFP6_COL, dequantize.DEQUANTIZE_MXFP6_ROW)[axis]
    rng = np.random.default_rng(3)
    attrs = {"k_ndim": 1, "format": format, "out_dtype": out_dtype}
    # Every code under every exponent at the first shape; then half a pack at the end.
    for m, groups in ((8192, 16), (70, 9), (33, 1), (0, 3), (3, 0)):
        codes = np.resize(np.arange(64, dtype=np.uint8), (m, 4 * groups))
        data = oracle.pack(codes).reshape(m, groups, 3)
        shape = (m, -(-groups // 8)) if axis else (-(-m // 32), groups, 4)
        scale = np.sort(rng.integers(0, 256, shape, np.uint8), axis=0)
        if m == 8192:
            steps = np.arange(shape[0]) * 256 // shape[0]
            scale[:] = steps.astype(np.uint8).reshape(-1, *[1] * (len(shape) - 1))
        expected = oracle.dequantize(data, scale, axis=axis, **attrs)
        agree(native(op, data, scale, **attrs), expected)
