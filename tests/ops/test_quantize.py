"""Tensor-scaled quantization: every implementation equals the numpy oracle."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import (
    BF16,
    CODES,
    F16,
    F32,
    FORMATS,
    HANDLERS,
    IMPLEMENTATIONS,
    INPUTS,
    MAX,
    NATIVE,
    REFERENCE,
    Implementation,
    bit_patterns,
    examples,
    moderate,
    once,
    picks,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import quantize as ops
from te_flax.ops._choice import kernels
from te_flax.testing import oracle
from te_flax.testing.patterns import patterns, same_bits

each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_native = pytest.mark.parametrize("run", HANDLERS, ids=str)
SCALES = (
    *(1.0, 0.37, 3.7, -2.0, 149.0, 2.0**-9, 2.0**-20, 2.0**-126, 2.0**120, 2.0**126),
    *(0.0, 1e-40, np.inf, np.nan),
)


@once
def pattern_case(dtype: np.dtype, scale: float):
    x = patterns(dtype).reshape(-1, 2, 64)
    attrs: Any = {"k_ndim": 2, "row_format": "e4m3", "col_format": "e5m2"}
    return x, attrs, oracle.quantize(x, np.float32(scale), **attrs)


@each
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_every_pattern_matches_the_oracle(run, dtype):
    for scale in SCALES:
        x, attrs, expected = pattern_case(dtype, scale)
        results = run(ops.QUANTIZE_ROWCOL, x, np.float32(scale), **attrs)
        for got, want in zip(results, expected, strict=True):
            same_bits(got, want)


@once
def ties(format: str):
    """Inputs whose scaled value is a code, a tie of two codes, or one ulp beside."""
    codes = np.arange(256, dtype=np.uint8).view(CODES[format]).astype(np.float64)
    codes = np.sort(codes[np.isfinite(codes)])
    exact = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(s * np.inf)) for s in (-1, 1)]
    x = np.concatenate([exact, *beside])
    attrs = {"k_ndim": 0, "row_format": format, "col_format": format}
    return x, attrs, oracle.quantize(x, np.float32(1), **attrs)


@each
@pytest.mark.parametrize("format", FORMATS)
def test_ties_go_to_even(run, format):
    x, attrs, expected = ties(format)
    results = run(ops.QUANTIZE_ROWCOL, x, np.float32(1), **attrs)
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)


def test_the_oracle_on_values_worked_by_hand():
    x = np.array([1.0, 1.0625, 1.1875, 449.0, -1e9, 2.0**-10, 3 * 2.0**-10], np.float32)
    # 1.0625 and 1.1875 are ties: to 1.0 and 1.25. 2^-10 ties with 0, 3 * 2^-10 with
    # 1 and 2 steps of 2^-9.
    row, amax = oracle.quantize(x, np.float32(1), k_ndim=1, row_format="e4m3")
    assert row.view(np.uint8).tolist() == [0x38, 0x38, 0x3A, 0x7E, 0xFE, 0, 2]
    assert amax.tolist() == [1e9, 0]
    bad = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e-39], np.float32)
    row, amax = oracle.quantize(bad, np.float32(1), k_ndim=1, row_format="e5m2")
    assert row.view(np.uint8).tolist() == [0x7F, 0x7F, 0x7B, 0xFB, 0]
    assert amax.tolist() == [0, 1]


SHAPES = [
    *[((1,), 1), ((19,), 1), ((111,), 0), ((), 0), ((1024,), 1), ((19, 111), 1)],
    *[((3, 5, 7), 1), ((3, 5, 7), 2), ((3, 5, 7), 3), ((3, 5, 7), 0), ((130, 1030), 1)],
    *[((0,), 1), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)],
]


@once
def shape_case(shape: tuple[int, ...], k_ndim: int, dtype: np.dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    attrs = {"k_ndim": k_ndim, "row_format": "e5m2", "col_format": "e4m3"}
    return x, attrs, oracle.quantize(x, np.float32(100), **attrs)


@each
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_ragged_and_empty_shapes(run, dtype):
    for i, (shape, k_ndim) in enumerate(SHAPES):
        if not picks(run, i, INPUTS.index(dtype), 3):
            continue
        x, attrs, expected = shape_case(shape, k_ndim, dtype)
        results = run(ops.QUANTIZE_ROWCOL, x, np.float32(100), **attrs)
        for got, want in zip(results, expected, strict=True):
            same_bits(got, want)


@each
@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("col_format", FORMATS)
def test_one_copy_equals_its_half_of_both(run, row_format, col_format):
    x, scale = patterns(BF16).reshape(256, 256), np.float32(3)
    row_attr, col_attr = {"row_format": row_format}, {"col_format": col_format}
    row, row_amax = run(ops.QUANTIZE_ROW, x, scale, k_ndim=1, **row_attr)
    col, col_amax = run(ops.QUANTIZE_COL, x, scale, k_ndim=1, **col_attr)
    both = run(ops.QUANTIZE_ROWCOL, x, scale, k_ndim=1, **row_attr, **col_attr)
    assert row.dtype == CODES[row_format]
    assert col.dtype == CODES[col_format]
    for got, want in zip((row, col, row_amax, col_amax), (*both, both[2]), strict=True):
        same_bits(got, want)
    if row_format == col_format:
        same_bits(col, row.T)


@once
def large_case(dtype: np.dtype):
    rng = np.random.default_rng(1)
    x = (
        rng.standard_normal((777, 2085)) * 2.0 ** rng.integers(-9, 9, (777, 1))
    ).astype(dtype)
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    return x, attrs, REFERENCE(ops.QUANTIZE_ROWCOL, x, np.float32(5), **attrs)


@each_native
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_many_tiles_equal_the_reference(run, dtype):
    x, attrs, expected = large_case(dtype)
    results = run(ops.QUANTIZE_ROWCOL, x, np.float32(5), **attrs)
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)
    (row, amax) = run(ops.QUANTIZE_ROW, x, np.float32(5), k_ndim=1, row_format="e4m3")
    same_bits(row, expected[0])
    same_bits(amax, expected[2])


VARIANTS = {
    (True, False): (ops.QUANTIZE_ROW, ops.QUANTIZE_ROW_NOOP),
    (False, True): (ops.QUANTIZE_COL, ops.QUANTIZE_COL_NOOP),
    (True, True): (ops.QUANTIZE_ROWCOL, ops.QUANTIZE_ROWCOL_NOOP),
}
FLAGS = [(0.0, False), (-0.0, False), (1e-40, False), (1.0, True), (np.nan, True)]


@each
@pytest.mark.parametrize("copies", VARIANTS, ids=["row", "col", "rowcol"])
def test_noop_keeps_the_previous_results(run, copies):
    plain, noop = VARIANTS[copies]
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    attrs = {k: v for k, v in attrs.items() if k in plain.attrs}
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 70)).astype(np.float32) for _ in range(2))
    old_results = run(plain, old, np.float32(7), **attrs)
    new_results = run(plain, x, np.float32(9), **attrs)
    for flag, keeps in FLAGS:
        noop_flag = np.array([flag], np.float32)
        got = run(noop, noop_flag, x, np.float32(9), *old_results, **attrs)
        expected = oracle.noop(noop_flag, old_results, new_results)
        assert (expected is old_results) == keeps
        for a, b in zip(got, expected, strict=True):
            same_bits(a, b)


@pytest.mark.skipif(not NATIVE, reason="aliases are buffers of the handler")
def test_noop_writes_into_the_donated_buffers():
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e4m3"}
    x = jnp.ones((64, 96), jnp.bfloat16)
    with kernels("*=native"):
        old = ops.QUANTIZE_ROWCOL(x, jnp.float32(1), **attrs)
        where = [r.unsafe_buffer_pointer() for r in old]
        step = jax.jit(
            lambda *a: ops.QUANTIZE_ROWCOL_NOOP(*a, **attrs), donate_argnums=(3, 4, 5)
        )
        lowered = step.lower(jnp.zeros(1), x, jnp.float32(1), *old).as_text()
        assert lowered.count("#stablehlo.output_operand_alias<") == 3
        new = step(jnp.zeros(1), 2 * x, jnp.float32(1), *old)
        assert [r.unsafe_buffer_pointer() for r in new] == where
        kept = step(jnp.ones(1), 3 * x, jnp.float32(1), *new)
        assert [r.unsafe_buffer_pointer() for r in kept] == where
    assert float(kept[0][0, 0]) == 2
    assert kept[2].tolist() == [2, 0]


@pytest.mark.parametrize("noop", [False, True])
def test_vmap_with_a_shared_scale_takes_one_amax(noop):
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    x = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(2, 3, 4)

    def one(x, *previous):
        if noop:
            flag = jnp.zeros(1)
            return ops.QUANTIZE_ROWCOL_NOOP(flag, x, jnp.float32(2), *previous, **attrs)
        return ops.QUANTIZE_ROWCOL(x, jnp.float32(2), **attrs)

    previous = (
        jnp.zeros((2, 3, 4), jnp.float8_e4m3fn),
        jnp.zeros((2, 4, 3), jnp.float8_e5m2),
        jnp.zeros(2),
    )
    mapped = jax.vmap(
        one, in_axes=(0, 0, 0, None)[: 4 if noop else 1], out_axes=(0, 0, None)
    )
    row, col, amax = mapped(x, *(previous if noop else ()))
    assert amax.tolist() == [23, 0]
    for i in range(2):
        expected = ops.QUANTIZE_ROWCOL(x[i], jnp.float32(2), **attrs)
        same_bits(row[i], np.asarray(expected[0]))
        same_bits(col[i], np.asarray(expected[1]))
    scales = jnp.array([1.0, 2.0])
    own = jax.vmap(lambda x, s: ops.QUANTIZE_ROWCOL(x, s, **attrs))(x, scales)
    assert own[2].tolist() == [[11, 0], [23, 0]]


def test_x64_and_jit_change_nothing():
    x, attrs, expected = pattern_case(F16, 0.37)
    with jax.enable_x64(True):
        got = REFERENCE(ops.QUANTIZE_ROWCOL, x, np.float32(0.37), **attrs)
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


def test_a_rounding_before_the_op_is_not_optimized_away():
    # XLA may drop float32 -> bfloat16 -> float32; the codes must be those of bfloat16.
    x = np.linspace(1, 1.2, 64, dtype=np.float32).reshape(2, 32)

    def fused(x, dtype):
        attrs = {"k_ndim": 1, "row_format": "e4m3"}
        return ops.QUANTIZE_ROW((x * 1.01).astype(dtype), jnp.float32(7), **attrs)

    for dtype in (BF16, F16):
        rounded = (x * np.float32(1.01)).astype(dtype)
        expected = oracle.quantize(rounded, np.float32(7), k_ndim=1, row_format="e4m3")
        with kernels("*=reference"):
            got = jax.jit(fused, static_argnums=1)(x, dtype)
        for a, b in zip(got, expected, strict=True):
            same_bits(a, b)


any_run = st.sampled_from(IMPLEMENTATIONS)
scale_values = st.floats(2.0**-12, 2.0**12, width=32).map(np.float32)


@examples
@given(any_run, bit_patterns((7, 45)), bit_patterns((1,)), st.sampled_from(FORMATS))
def test_any_bits_match_the_oracle(run: Implementation, x, scale, format):
    attrs = {"k_ndim": 1, "row_format": format, "col_format": format}
    results = run(ops.QUANTIZE_ROWCOL, x, scale[0], **attrs)
    for got, want in zip(results, oracle.quantize(x, scale[0], **attrs), strict=True):
        same_bits(got, want)


@examples
@given(any_run, moderate((7, 45)), scale_values, st.sampled_from(FORMATS))
def test_finite_values_match_ml_dtypes(run, x, scale, format):
    got, amax = run(ops.QUANTIZE_ROW, x, scale, k_ndim=1, row_format=format)
    clipped = np.clip(x * scale, -MAX[format], MAX[format])
    same_bits(got, clipped.astype(CODES[format]))
    assert amax.tolist() == [np.abs(x).max(), 0]
    negated, _ = run(ops.QUANTIZE_ROW, -x, scale, k_ndim=1, row_format=format)
    same_bits(negated, (got.view(np.uint8) ^ 0x80).view(CODES[format]))


@examples
@given(any_run, moderate((7, 45)), scale_values, st.sampled_from(FORMATS))
def test_round_trip_stays_within_half_a_step(run, x, scale, format):
    got, _ = run(ops.QUANTIZE_ROW, x, scale, k_ndim=1, row_format=format)
    exact = x.astype(np.float64) * np.float64(scale)
    error = np.abs(got.astype(np.float64) - np.clip(exact, -MAX[format], MAX[format]))
    finfo = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}
    half_ulp, half_step = finfo[format]
    # The product is rounded to float32 before the cast: 2^-24 of it.
    assert np.all(error <= np.maximum(half_ulp * np.abs(exact), half_step) * (1 + 2e-7))
    again, _ = run(
        ops.QUANTIZE_ROW,
        (got.astype(np.float64) / np.float64(scale)).astype(np.float32),
        scale,
        k_ndim=1,
        row_format=format,
    )
    same_bits(again, got)


def test_bad_arguments_are_named():
    x, scale = jnp.ones((4, 8)), jnp.float32(1)
    say = "quantize_row: row_format must be e4m3 or e5m2, got 'e3m4'"
    with pytest.raises(ValueError, match=re.escape(say)):
        ops.QUANTIZE_ROW(x, scale, k_ndim=1, row_format="e3m4")
    with pytest.raises(TypeError, match="quantize_row: x must be float32 or bfloat16"):
        ops.QUANTIZE_ROW(x.astype(int), scale, k_ndim=1, row_format="e4m3")
    with pytest.raises(TypeError, match="quantize_row: scale must be float32, got"):
        ops.QUANTIZE_ROW(x, jnp.bfloat16(1), k_ndim=1, row_format="e4m3")
    with pytest.raises(ValueError, match="quantize_row: k_ndim must be >= 0, got -1"):
        ops.QUANTIZE_ROW(x, scale, k_ndim=-1, row_format="e4m3")
    with pytest.raises(ValueError, match="quantize_row: x must have at least 3 dims"):
        ops.QUANTIZE_ROW(x, scale, k_ndim=3, row_format="e4m3")
    old = jnp.zeros((4, 8), jnp.float8_e5m2)
    say = "quantize_row_noop: prev_row must be float8_e4m3fn, got float8_e5m2"
    with pytest.raises(TypeError, match=say):
        ops.QUANTIZE_ROW_NOOP(
            jnp.zeros(1), x, scale, old, jnp.zeros(2), k_ndim=1, row_format="e4m3"
        )


def test_float32_edges_are_what_they_say():
    x = patterns(F32)
    assert np.isnan(x).any()
    assert len(np.unique(x.view(np.uint32) >> 23)) == 512
