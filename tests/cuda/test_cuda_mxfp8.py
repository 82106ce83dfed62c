"""CUDA MXFP8 quantization equals the numpy oracle bit for bit."""

import numpy as np
import pytest
from _gpu import (
    BF16,
    F32,
    FLAGS,
    FORMATS,
    GPU,
    agree,
    each_dtype,
    finite,
    formats_of,
    native,
    shuffled,
)

from te_flax.ops import mxfp8 as ops
from te_flax.testing import oracle
from te_flax.testing.patterns import amax_edges, patterns, special_blocks

pytestmark = GPU
VARIANTS = {
    "row": (ops.QUANTIZE_MXFP8_ROW, ops.QUANTIZE_MXFP8_ROW_NOOP),
    "col": (ops.QUANTIZE_MXFP8_COL, ops.QUANTIZE_MXFP8_COL_NOOP),
    "rowcol": (ops.QUANTIZE_MXFP8_ROWCOL, ops.QUANTIZE_MXFP8_ROWCOL_NOOP),
}
SWIZZLED = {
    "row": (ops.QUANTIZE_MXFP8_ROW_SWIZZLED, ops.QUANTIZE_MXFP8_ROW_SWIZZLED_NOOP),
    "col": (ops.QUANTIZE_MXFP8_COL_SWIZZLED, ops.QUANTIZE_MXFP8_COL_SWIZZLED_NOOP),
    "rowcol": (
        ops.QUANTIZE_MXFP8_ROWCOL_SWIZZLED,
        ops.QUANTIZE_MXFP8_ROWCOL_SWIZZLED_NOOP,
    ),
}
SHAPES = [
    *[((128, 256), 1), ((130, 200), 1), ((33, 103), 1), ((72, 72), 1), ((1, 1000), 1)],
    *[((1000, 1), 1), ((3, 5, 7), 2), ((2, 40, 4, 16), 2), ((19,), 1), ((19,), 0)],
    *[((), 0), ((0, 5), 1), ((5, 0), 1)],
]


def check(op, x, row, col, k_ndim=1, swizzled=False):
    attrs = formats_of(op, row_format=row, col_format=col) | {"k_ndim": k_ndim}
    expected = oracle.quantize_mxfp8(x, **attrs, swizzled=swizzled)
    agree(native(op, x, **attrs), expected)


@each_dtype
@pytest.mark.parametrize("format", FORMATS)
def test_every_pattern_in_blocks_of_like_and_mixed_magnitudes(format, dtype):
    op = VARIANTS["rowcol"][0]
    other = FORMATS[format == "e4m3"]
    for x in (patterns(dtype), shuffled(dtype), finite(dtype)):
        check(op, np.resize(x, (x.size // 64, 64)), format, other)


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_special_blocks(variant, dtype):
    for x in (special_blocks(dtype), special_blocks(dtype).T):
        for format in FORMATS:
            check(VARIANTS[variant][0], np.ascontiguousarray(x), format, format)


@pytest.mark.parametrize("format", FORMATS)
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
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    results = native(VARIANTS["rowcol"][0], tiny, **attrs)
    for codes in results[0::2][:2]:
        assert not np.any(codes.view(np.uint8) & 0x7F)
    for scales in results[1::2]:
        assert not np.any(scales)
    assert results[-1].tolist() == [0, 0]


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("swizzled", [False, True])
def test_ragged_and_empty_shapes(variant, swizzled, dtype):
    op = (SWIZZLED if swizzled else VARIANTS)[variant][0]
    for shape, k_ndim in SHAPES:
        x = np.resize(finite(dtype), shape)
        check(op, x, "e4m3", "e5m2", k_ndim, swizzled)


@each_dtype
def test_many_tiles(dtype):
    x = np.random.default_rng(1).standard_normal((515, 1000)) * 30
    check(VARIANTS["rowcol"][0], x.astype(dtype), "e4m3", "e4m3")
    check(SWIZZLED["rowcol"][0], x.astype(dtype), "e4m3", "e4m3", swizzled=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("swizzled", [False, True])
def test_noop_keeps_the_previous_results(variant, swizzled):
    plain, noop = (SWIZZLED if swizzled else VARIANTS)[variant]
    attrs = formats_of(plain, row_format="e4m3", col_format="e5m2") | {"k_ndim": 1}
    rng = np.random.default_rng(2)
    # 45 rows leave padding in the swizzled scales, which noop must not clear either.
    old, x = (rng.standard_normal((45, 200)).astype(BF16) for _ in range(2))
    old_results = native(plain, old, **attrs)
    old_results = tuple(np.where(r == 0, np.ones_like(r), r) for r in old_results)
    new_results = native(plain, x, **attrs)
    for flag in FLAGS:
        flag = np.array([flag], np.float32)
        got = native(noop, flag, x, *old_results, **attrs)
        agree(got, oracle.noop(flag, old_results, new_results))
