"""MXFP8 quantization: every implementation equals the numpy oracle."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import (
    BF16,
    CODES,
    F32,
    FORMATS,
    HANDLERS,
    IMPLEMENTATIONS,
    INPUTS,
    MAX,
    NATIVE,
    REFERENCE,
    bit_patterns,
    examples,
    moderate,
    once,
    picks,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import mxfp8 as ops
from te_flax.ops._choice import kernels
from te_flax.ops.dequantize import DEQUANTIZE_MXFP8_ROW
from te_flax.testing import oracle
from te_flax.testing.patterns import amax_edges, patterns, same_bits, special_blocks

each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_native = pytest.mark.parametrize("run", HANDLERS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", INPUTS, ids=str)
BOTH = {
    False: ops.QUANTIZE_MXFP8_ROWCOL,
    True: ops.QUANTIZE_MXFP8_ROWCOL_SWIZZLED,
}
MIXED = ({"row_format": "e4m3", "col_format": "e5m2"},)
MIXED += ({"row_format": "e5m2", "col_format": "e4m3"},)


def agree(results, expected) -> None:
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)


@once
def pattern_case(dtype: np.dtype, order: str, formats: int):
    """All patterns: by their bits, mixed, and mixed with zeros for NaN and Inf."""
    x = patterns(dtype)
    if order != "natural":
        x = np.random.default_rng(0).permutation(x)
    if order == "finite":
        x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    x = x[: len(x) // 128 * 128].reshape(-1, 128)
    attrs = {"k_ndim": 1, **MIXED[formats]}
    return x, attrs, oracle.quantize_mxfp8(x, **attrs)


@each
@each_dtype
@pytest.mark.parametrize("order", ["natural", "mixed", "finite"])
def test_every_pattern_matches_the_oracle(run, dtype, order):
    x, attrs, expected = pattern_case(dtype, order, INPUTS.index(dtype) % 2)
    agree(run(BOTH[False], x, **attrs), expected)


@once
def special_case(dtype: np.dtype, formats: int):
    blocks = special_blocks(dtype)
    x = np.concatenate([blocks, blocks[::-1]], axis=1)  # [n, 64]
    x = np.concatenate(
        [x, x.reshape(-1, 32, 2).transpose(1, 0, 2).reshape(32, -1)[:, :64]]
    )
    attrs = {"k_ndim": 1, **MIXED[formats]}
    return x, attrs, oracle.quantize_mxfp8(x, **attrs)


@each
@each_dtype
def test_zero_nan_inf_and_subnormal_blocks(run, dtype):
    x, attrs, expected = special_case(dtype, INPUTS.index(dtype) % 2)
    agree(run(BOTH[False], x, **attrs), expected)


@once
def edge_case(format: str):
    a = amax_edges(format)
    x = np.zeros((len(a), 32), np.float32)
    x[:, 3], x[:, 30], x[:, 31] = -a, a / 2, a / 300
    attrs = {"k_ndim": 1, "row_format": format, "col_format": format}
    return x, attrs, oracle.quantize_mxfp8(x, **attrs)


@each
@pytest.mark.parametrize("format", FORMATS)
def test_amax_around_powers_of_two(run, format):
    x, attrs, expected = edge_case(format)
    agree(run(BOTH[False], x, **attrs), expected)


def test_the_oracle_on_blocks_worked_by_hand():
    block = np.zeros((7, 32), np.float32)
    block[0, 0] = 448  # 448 * f32(1/448) = 1 = 2^0
    block[1, 0] = 449  # rounds up: 2^1
    block[2, :2] = [np.inf, 1]
    block[3, :2] = [np.inf, -np.nan]
    block[4, 0] = 2.0**-126  # a / 448 < 2^-127: the smallest scale
    block[5, 0] = -(2.0**-130)  # counts as -0
    block[6, 0] = 3
    row, scale, amax = oracle.quantize_mxfp8(block, k_ndim=1, row_format="e4m3")
    assert scale[:, 0].tolist() == [127, 128, 254, 255, 0, 0, 120]
    codes = row.view(np.uint8)
    assert codes[:, 0].tolist() == [0x7E, 0x76, 0x7E, 0x7F, 0x40, 0x80, 0x7C]
    assert codes[3].tolist() == [0x7F] * 32
    assert codes[2, 1:].tolist() == [0] * 31
    assert amax.tolist() == [449, 1]


SHAPES = [
    *[((1,), 1), ((19,), 1), ((111,), 0), ((), 0), ((33, 65), 1)],
    *[((3, 5, 7), 1), ((3, 5, 7), 2), ((129, 2, 66), 2)],
    *[((3, 43, 132), 1), ((0,), 1), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)],
]


@once
def shape_case(shape: tuple[int, ...], k_ndim: int, dtype: np.dtype, swizzled: bool):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(dtype)
    attrs = {"k_ndim": k_ndim, **MIXED[k_ndim % 2]}
    return x, attrs, oracle.quantize_mxfp8(x, swizzled=swizzled, **attrs)


@each
@each_dtype
@pytest.mark.parametrize("swizzled", [False, True], ids=["logical", "swizzled"])
def test_ragged_and_empty_shapes(run, dtype, swizzled):
    for i, (shape, k_ndim) in enumerate(SHAPES):
        if not picks(run, i, 2 * INPUTS.index(dtype) + swizzled, 6):
            continue
        x, attrs, expected = shape_case(shape, k_ndim, dtype, swizzled)
        agree(run(BOTH[swizzled], x, **attrs), expected)


@once
def large_case(dtype: np.dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((519, 2085)) * 2.0 ** rng.integers(-9, 9, (519, 1))
    x = x.astype(dtype)
    attrs = {"k_ndim": 1, **MIXED[0]}
    return x, attrs, [REFERENCE(BOTH[s], x, **attrs) for s in (False, True)]


@each_native
@each_dtype
def test_many_tiles_equal_the_reference(run, dtype):
    x, attrs, expected = large_case(dtype)
    agree(run(BOTH[False], x, **attrs), expected[0])
    agree(run(BOTH[True], x, **attrs), expected[1])


VARIANTS = {
    (copies, swizzled): (
        getattr(ops, f"QUANTIZE_MXFP8_{copies}{'_SWIZZLED' * swizzled}"),
        getattr(ops, f"QUANTIZE_MXFP8_{copies}{'_SWIZZLED' * swizzled}_NOOP"),
    )
    for copies, swizzled in itertools.product(("ROW", "COL", "ROWCOL"), (False, True))
}


@each
@pytest.mark.parametrize(
    ("row_format", "col_format", "swizzled"),
    [
        ("e4m3", "e4m3", False),
        ("e4m3", "e5m2", True),
        ("e5m2", "e4m3", False),
        ("e5m2", "e5m2", True),
    ],
)
def test_one_copy_equals_its_half_of_both(run, row_format, col_format, swizzled):
    if not picks(run, FORMATS.index(row_format), FORMATS.index(col_format), 2):
        return
    x = patterns(BF16)[: 200 * 250].reshape(200, 250)
    row_attr, col_attr = {"row_format": row_format}, {"col_format": col_format}
    row = run(VARIANTS["ROW", swizzled][0], x, k_ndim=1, **row_attr)
    col = run(VARIANTS["COL", swizzled][0], x, k_ndim=1, **col_attr)
    both = run(BOTH[swizzled], x, k_ndim=1, **row_attr, **col_attr)
    assert (row[0].dtype, col[0].dtype) == (CODES[row_format], CODES[col_format])
    agree((*row[:2], *col), both)
    same_bits(row[2], both[4])


@each
def test_col_is_row_of_the_transpose(run):
    x = patterns(BF16)[: 200 * 250].reshape(200, 250)
    col, col_scale, _ = run(VARIANTS["COL", False][0], x, k_ndim=1, col_format="e4m3")
    row, row_scale, _ = run(
        VARIANTS["ROW", False][0], x.T.copy(), k_ndim=1, row_format="e4m3"
    )
    agree((col, col_scale), (row.T, row_scale.T))
    col_tiles = run(VARIANTS["COL", True][0], x, k_ndim=1, col_format="e4m3")[1]
    row_tiles = run(VARIANTS["ROW", True][0], x.T.copy(), k_ndim=1, row_format="e4m3")[
        1
    ]
    same_bits(col_tiles, row_tiles)


FLAGS = [(0.0, False), (-0.0, False), (1e-40, False), (1.0, True), (np.nan, True)]


@each
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_noop_keeps_the_previous_results(run, variant):
    if not picks(run, tuple(VARIANTS).index(variant), 0, 2) and variant[0] != "ROWCOL":
        return
    plain, noop = VARIANTS[variant]
    attrs = {k: v for k, v in {"k_ndim": 1, **MIXED[0]}.items() if k in plain.attrs}
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 70)).astype(np.float32) for _ in range(2))
    old_results = run(plain, old, **attrs)
    new_results = run(plain, 9 * x, **attrs)
    for flag, keeps in FLAGS:
        noop_flag = np.array([flag], np.float32)
        got = run(noop, noop_flag, 9 * x, *old_results, **attrs)
        expected = oracle.noop(noop_flag, old_results, new_results)
        assert (expected is old_results) == keeps
        agree(got, expected)


@pytest.mark.skipif(not NATIVE, reason="aliases are buffers of the handler")
@pytest.mark.parametrize("swizzled", [False, True], ids=["logical", "swizzled"])
def test_noop_writes_into_the_donated_buffers(swizzled):
    plain, noop = VARIANTS["ROWCOL", swizzled]
    attrs = {"k_ndim": 1, **MIXED[0]}
    with kernels("*=native"):
        old = plain(jnp.ones((64, 96)), **attrs)
        where = [r.unsafe_buffer_pointer() for r in old]
        step = jax.jit(lambda *a: noop(*a, **attrs), donate_argnums=range(2, 7))
        lowered = step.lower(jnp.zeros(1), jnp.ones((64, 96)), *old).as_text()
        assert lowered.count("#stablehlo.output_operand_alias<") == 5
        new = step(jnp.zeros(1), jnp.full((64, 96), 2.0), *old)
        assert [r.unsafe_buffer_pointer() for r in new] == where
        kept = step(jnp.ones(1), jnp.full((64, 96), 3.0), *new)
        assert [r.unsafe_buffer_pointer() for r in kept] == where
    assert kept[4].tolist() == [2, 0]


def test_vmap_gives_each_example_its_own_blocks():
    x = patterns(BF16)[: 3 * 20 * 50].reshape(3, 20, 50)
    attrs = {"k_ndim": 1, **MIXED[0]}
    mapped = jax.vmap(lambda x: BOTH[True](x, **attrs))(x)
    for i in range(3):
        agree(
            [r[i] for r in mapped], [np.asarray(r) for r in BOTH[True](x[i], **attrs)]
        )


any_run = st.sampled_from(IMPLEMENTATIONS)


@examples
@given(any_run, bit_patterns((5, 70)), st.sampled_from(MIXED), st.booleans())
def test_any_bits_match_the_oracle(run, x, formats, swizzled):
    attrs = {"k_ndim": 1, **formats}
    expected = oracle.quantize_mxfp8(x, swizzled=swizzled, **attrs)
    agree(run(BOTH[swizzled], x, **attrs), expected)


def quantized_rows(run, x, format):
    row, scale, _ = run(VARIANTS["ROW", False][0], x, k_ndim=1, row_format=format)
    return row, scale, np.repeat(scale, 32, axis=1)[:, : x.shape[1]].astype(int)


@examples
@given(any_run, moderate((5, 70)), st.sampled_from(FORMATS))
def test_the_scale_is_the_smallest_that_fits(run, x, format):
    row, scale, e = quantized_rows(run, x, format)
    scaled = np.ldexp(x.astype(np.float64), 127 - e)
    clipped = np.clip(scaled, -MAX[format], MAX[format])
    same_bits(row, clipped.astype(np.float32).astype(CODES[format]))
    padded = np.pad(np.abs(scaled), ((0, 0), (0, 26))).reshape(5, 3, 32)
    top, used = padded.max(2), scale > 0
    # amax * f32(1/max) is within 2 roundings of amax / max.
    assert np.all(top <= MAX[format] * (1 + 2.0**-22))
    assert np.all(top[used] >= MAX[format] / 2 * (1 - 2.0**-22))
    assert np.all(top[~used] == 0)


@examples
@given(any_run, moderate((5, 70)), st.sampled_from(FORMATS))
def test_round_trip_stays_within_half_a_step_and_is_stable(run, x, format):
    row, scale, e = quantized_rows(run, x, format)
    attrs = {"k_ndim": 1, "out_dtype": "float32"}
    (back,) = run(DEQUANTIZE_MXFP8_ROW, row, scale, **attrs)
    half_ulp, half_step = {"e4m3": (2.0**-4, -10), "e5m2": (2.0**-3, -17)}[format]
    bound = np.maximum(half_ulp * np.abs(x), np.ldexp(1.0, half_step + e - 127))
    assert np.all(np.abs(back.astype(np.float64) - x) <= bound)
    row, scale, _ = quantized_rows(run, back, format)
    same_bits(run(DEQUANTIZE_MXFP8_ROW, row, scale, **attrs)[0], back)


@examples
@given(any_run, moderate((5, 70)), st.integers(-60, 60), st.sampled_from(FORMATS))
def test_powers_of_two_and_signs_move_only_scales_and_signs(run, x, n, format):
    row, scale, _ = quantized_rows(run, x, format)
    moved, moved_scale, _ = quantized_rows(run, np.ldexp(-x, n), format)
    same_bits(moved, (row.view(np.uint8) ^ 0x80).view(CODES[format]))
    shifted = np.where(scale > 0, scale.astype(int) + n, 0)
    same_bits(moved_scale, shifted.astype(np.uint8))


def test_bad_arguments_are_named():
    say = "quantize_mxfp8_row: row_format must be e4m3 or e5m2, got 'fp8'"
    with pytest.raises(ValueError, match=re.escape(say)):
        ops.QUANTIZE_MXFP8_ROW(jnp.ones((4, 8)), k_ndim=1, row_format="fp8")
    with pytest.raises(TypeError, match="quantize_mxfp8_row: x must be float32 or"):
        ops.QUANTIZE_MXFP8_ROW(jnp.ones((4, 8), int), k_ndim=1, row_format="e4m3")
    with pytest.raises(ValueError, match=r"prev_row_scale must have K\.\./32 = 1"):
        ops.QUANTIZE_MXFP8_ROW_NOOP(
            jnp.zeros(1),
            jnp.ones((4, 8)),
            jnp.zeros((4, 8), jnp.float8_e4m3fn),
            jnp.zeros((4, 8), jnp.uint8),
            jnp.zeros(2),
            k_ndim=1,
            row_format="e4m3",
        )


def test_x64_changes_nothing():
    x, attrs, expected = pattern_case(F32, "natural", 0)
    with jax.enable_x64(True):
        agree(REFERENCE(BOTH[False], x, **attrs), expected)
