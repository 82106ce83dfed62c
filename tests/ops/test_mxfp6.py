"""MXFP6 quantization: every implementation equals the numpy oracle."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import (
    BF16,
    F32,
    HANDLERS,
    IMPLEMENTATIONS,
    INPUTS,
    REFERENCE,
    bit_patterns,
    examples,
    moderate,
    once,
    picks,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import dequantize, fp6
from te_flax.ops import mxfp6 as ops
from te_flax.testing import oracle_mxfp6 as oracle
from te_flax.testing.oracle import noop as kept
from te_flax.testing.patterns import amax_edges, patterns, same_bits, special_blocks

FORMATS = tuple(fp6.MAX)
MIXED = ({"row_format": "e2m3", "col_format": "e3m2"},)
MIXED += ({"row_format": "e3m2", "col_format": "e2m3"},)
VARIANTS = {
    copies: (
        getattr(ops, f"QUANTIZE_MXFP6_{copies}"),
        getattr(ops, f"QUANTIZE_MXFP6_{copies}_NOOP"),
    )
    for copies in ("ROW", "COL", "ROWCOL")
}
ROW, COL, BOTH = (plain for plain, _ in VARIANTS.values())
each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", INPUTS, ids=str)
any_run = st.sampled_from(IMPLEMENTATIONS)


def agree(results, expected) -> None:
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)


@once
def pattern_case(dtype: np.dtype, mixed: bool):
    """Every pattern by its bits, or in an order that mixes magnitudes, finite ones."""
    x = patterns(dtype)
    if mixed:
        x = np.random.default_rng(0).permutation(x)
        x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    x = x[: len(x) // 128 * 128].reshape(-1, 128)
    attrs = {"k_ndim": 1, **MIXED[INPUTS.index(dtype) % 2]}
    return x, attrs, oracle.quantize(x, **attrs)


@each
@each_dtype
@pytest.mark.parametrize("mixed", [False, True], ids=["natural", "mixed"])
def test_every_pattern_matches_the_oracle(run, dtype, mixed):
    x, attrs, expected = pattern_case(dtype, mixed)
    agree(run(BOTH, x, **attrs), expected)


@once
def special_case(dtype: np.dtype):
    blocks = special_blocks(dtype)
    x = np.concatenate([blocks, blocks.T[:, :32]])
    attrs = {"k_ndim": 1, **MIXED[INPUTS.index(dtype) % 2]}
    return x, attrs, oracle.quantize(x, **attrs)


@each
@each_dtype
def test_zero_nan_inf_and_subnormal_blocks(run, dtype):
    x, attrs, expected = special_case(dtype)
    agree(run(BOTH, x, **attrs), expected)


@once
def edge_case(format: str):
    a = amax_edges(format)
    x = np.zeros((len(a), 32), np.float32)
    x[:, 3], x[:, 30], x[:, 31] = -a, a / 2, a / 30
    attrs = {"k_ndim": 1, "row_format": format, "col_format": format}
    return x, attrs, oracle.quantize(x, **attrs)


@each
@pytest.mark.parametrize("format", FORMATS)
def test_amax_around_powers_of_two(run, format):
    x, attrs, expected = edge_case(format)
    agree(run(BOTH, x, **attrs), expected)


def test_the_oracle_on_blocks_worked_by_hand():
    block = np.zeros((6, 32), np.float32)
    block[0, :2] = [7.5, -1]  # 7.5 * f32(1 / 7.5) = 1 = 2^0
    block[1, 0] = 7.625  # rounds up: 2^1
    block[2, :2] = [np.inf, 1]
    block[3, :2] = [np.inf, np.nan]
    block[4, 0] = 2.0**-126  # a / 7.5 is below 2^-127: the smallest scale
    block[5, 0] = -(2.0**-130)  # counts as -0
    row, scale, amax = oracle.quantize(block, k_ndim=1, row_format="e2m3")
    assert scale[:, 0].tolist() == [127, 128, 254, 255, 0, 0]
    codes = oracle.unpack(row.reshape(6, 24))
    assert codes[:, 0].tolist() == [31, 23, 31, 0, 16, 32]
    assert codes[:, 1].tolist() == [40, 0, 0, 0, 0, 0]
    assert amax.tolist() == [7.625, 1]


SHAPES = [
    *[((1,), 1), ((19,), 1), ((111,), 0), ((), 0), ((33, 65), 1), ((34, 66), 1)],
    *[((3, 5, 7), 1), ((3, 5, 7), 2), ((129, 2, 66), 2), ((40, 35), 1), ((64, 96), 1)],
    *[((3, 43, 132), 1), ((0,), 1), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)],
]


@once
def shape_case(shape: tuple[int, ...], k_ndim: int, dtype: np.dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(dtype)
    attrs = {"k_ndim": k_ndim, **MIXED[k_ndim % 2]}
    return x, attrs, oracle.quantize(x, **attrs)


@each
@each_dtype
def test_ragged_and_empty_shapes(run, dtype):
    for i, (shape, k_ndim) in enumerate(SHAPES):
        if picks(run, i, INPUTS.index(dtype), 3):
            x, attrs, expected = shape_case(shape, k_ndim, dtype)
            agree(run(BOTH, x, **attrs), expected)


@once
def large_case(dtype: np.dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((519, 1085)) * 2.0 ** rng.integers(-9, 9, (519, 1))
    attrs = {"k_ndim": 1, **MIXED[0]}
    return x.astype(dtype), attrs, REFERENCE(BOTH, x.astype(dtype), **attrs)


@pytest.mark.parametrize("run", HANDLERS, ids=str)
@each_dtype
def test_many_tiles_equal_the_reference(run, dtype):
    x, attrs, expected = large_case(dtype)
    agree(run(BOTH, x, **attrs), expected)


@each
def test_one_copy_equals_its_half_of_both(run):
    x = patterns(BF16)[: 200 * 250].reshape(200, 250)
    row = run(ROW, x, k_ndim=1, row_format="e2m3")
    col = run(COL, x, k_ndim=1, col_format="e3m2")
    agree((*row[:2], *col), run(BOTH, x, k_ndim=1, **MIXED[0]))
    same_bits(row[2], col[2])


@each
@pytest.mark.parametrize("copies", VARIANTS)
def test_noop_keeps_the_previous_results(run, copies):
    plain, noop = VARIANTS[copies]
    attrs = {k: v for k, v in {"k_ndim": 1, **MIXED[0]}.items() if k in plain.attrs}
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 70)).astype(np.float32) for _ in range(2))
    old_results = run(plain, old, **attrs)
    new_results = run(plain, 9 * x, **attrs)
    for flag in (0.0, 1e-40, np.nan):
        noop_flag = np.array([flag], np.float32)
        got = run(noop, noop_flag, 9 * x, *old_results, **attrs)
        agree(got, kept(noop_flag, old_results, new_results))


@examples
@given(any_run, bit_patterns((5, 70)), st.sampled_from(MIXED))
def test_any_bits_match_the_oracle(run, x, formats):
    attrs = {"k_ndim": 1, **formats}
    agree(run(BOTH, x, **attrs), oracle.quantize(x, **attrs))


@examples
@given(any_run, moderate((5, 70)), st.sampled_from(FORMATS))
def test_round_trip_stays_within_half_a_step_and_is_stable(run, x, format):
    def once_more(x):
        row, scale, _ = run(ROW, x, k_ndim=1, row_format=format)
        attrs = {"k_ndim": 1, "format": format, "out_dtype": "float32"}
        (back,) = run(dequantize.DEQUANTIZE_MXFP6_ROW, row, scale, **attrs)
        return back.reshape(5, 72)[:, :70], np.repeat(scale, 32, 1)[:, :70].astype(int)

    back, e = once_more(x)
    half_ulp, half_step = {"e2m3": (2.0**-4, -4), "e3m2": (2.0**-3, -5)}[format]
    bound = np.maximum(half_ulp * np.abs(x), np.ldexp(1.0, half_step + e - 127))
    assert np.all(np.abs(back.astype(np.float64) - x) <= bound)
    same_bits(once_more(back)[0], back)


@once
def code_case(format: str, axis: int, out_dtype: str):
    """Every code under every exponent, in groups [.., 3] with blocks along axis."""
    codes = np.tile(np.arange(64, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2, axis=1)
    if axis == 0:
        codes = np.repeat(codes, 32, 0)
        scale = np.repeat(scale, 32, 1).reshape(256, 16, 4)
    data = oracle.pack(codes).reshape(-1, 16, 3)
    attrs = {"k_ndim": 1, "format": format, "out_dtype": out_dtype}
    return data, scale, attrs, oracle.dequantize(data, scale, axis=axis, **attrs)


@each
@pytest.mark.parametrize("axis", [0, 1])
def test_every_code_with_every_scale(run, axis):
    op = (dequantize.DEQUANTIZE_MXFP6_COL, dequantize.DEQUANTIZE_MXFP6_ROW)[axis]
    for i, dtype in enumerate(("float32", "bfloat16", "float16")):
        for format in FORMATS:
            if picks(run, i + (format == "e2m3"), axis, 2):
                data, scale, attrs, expected = code_case(format, axis, dtype)
                agree(run(op, data, scale, **attrs), expected)


@each
@pytest.mark.parametrize("axis", [0, 1])
def test_ragged_codes(run, axis):
    op = (dequantize.DEQUANTIZE_MXFP6_COL, dequantize.DEQUANTIZE_MXFP6_ROW)[axis]
    rng = np.random.default_rng(3)
    attrs = {"k_ndim": 1, "format": "e3m2", "out_dtype": "bfloat16"}
    for m, groups in ((1, 1), (33, 17), (70, 9), (0, 3), (3, 0)):
        data = rng.integers(0, 256, (m, groups, 3), np.uint8)
        shape = (m, -(-groups // 8)) if axis else (-(-m // 32), groups, 4)
        scale = rng.integers(0, 256, shape, np.uint8)
        expected = oracle.dequantize(data, scale, axis=axis, **attrs)
        agree(run(op, data, scale, **attrs), expected)


def test_vmap_gives_each_example_its_own_blocks():
    x = patterns(BF16)[: 3 * 20 * 50].reshape(3, 20, 50)
    attrs = {"k_ndim": 1, **MIXED[0]}
    mapped = jax.vmap(lambda x: BOTH(x, **attrs))(x)
    for i in range(3):
        agree([r[i] for r in mapped], [np.asarray(r) for r in BOTH(x[i], **attrs)])


def test_bad_arguments_are_named():
    x = jnp.ones((4, 8))
    say = "quantize_mxfp6_row: row_format must be e2m3 or e3m2, got 'e4m3'; "
    with pytest.raises(ValueError, match=re.escape(say)):
        ROW(x, k_ndim=1, row_format="e4m3")
    say = "quantize_mxfp6_rowcol: col_format must be e2m3 or e3m2, got 'fp6'; "
    with pytest.raises(ValueError, match=re.escape(say)):
        BOTH(x, k_ndim=1, row_format="e2m3", col_format="fp6")
    with pytest.raises(TypeError, match="quantize_mxfp6_row: x must be float32 or"):
        ROW(jnp.ones((4, 8), int), k_ndim=1, row_format="e2m3")
    data, scale = jnp.ones((4, 2, 3), jnp.uint8), jnp.ones((4, 1), jnp.uint8)
    attrs = {"k_ndim": 1, "out_dtype": "float32"}
    say = "dequantize_mxfp6_row: format must be e2m3 or e3m2, got 'e4m3'; "
    with pytest.raises(ValueError, match=re.escape(say)):
        dequantize.DEQUANTIZE_MXFP6_ROW(data, scale, format="e4m3", **attrs)
    with pytest.raises(ValueError, match=r"scale must have K\.\./8 = 1"):
        dequantize.DEQUANTIZE_MXFP6_ROW(
            data, jnp.ones((4, 2), jnp.uint8), format="e2m3", **attrs
        )


def test_x64_changes_nothing():
    x, attrs, expected = pattern_case(F32, False)
    with jax.enable_x64(True):
        agree(REFERENCE(BOTH, x, **attrs), expected)
