"""Float32 block scaling: every implementation equals the numpy oracle."""

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
    IMPLEMENTATIONS,
    INPUTS,
    MAX,
    REFERENCE,
    bit_patterns,
    examples,
    moderate,
    once,
    picks,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import block as ops
from te_flax.ops.dequantize import DEQUANTIZE_BLOCK, DEQUANTIZE_BLOCK2D
from te_flax.testing import oracle, oracle_block
from te_flax.testing.patterns import amax_edges, patterns, same_bits, special_blocks

each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", INPUTS, ids=str)
SCALES = ({"power_of_2": True, "epsilon": 0.0}, {"power_of_2": False, "epsilon": 0.0})
each_scale = pytest.mark.parametrize("scales", SCALES, ids=["power_of_2", "float32"])
BOTH = {"row_format": "e4m3", "col_format": "e5m2"}
MIXED = (BOTH, {"row_format": "e5m2", "col_format": "e4m3"})


def agree(results, expected) -> None:
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)


def check(run, x, k_ndim: int, formats: dict, scales: dict) -> None:
    """1-D and 2-D blocks of one array against the oracle."""
    attrs = {"k_ndim": k_ndim, **scales}
    got = run(ops.QUANTIZE_BLOCK_ROWCOL, x, **attrs, **formats)
    agree(got, oracle_block.quantize_block(x, **attrs, **formats))
    attrs["format"] = formats["row_format"]
    got = run(ops.QUANTIZE_BLOCK2D_ROWCOL, x, **attrs)
    agree(got, oracle_block.quantize_block2d(x, **attrs))


@once
def pattern_case(dtype: np.dtype, order: str):
    """All patterns: by their bits, mixed, and mixed with zeros for NaN and Inf."""
    x = patterns(dtype)
    if order != "natural":
        x = np.random.default_rng(0).permutation(x)
    if order == "finite":
        x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    return x[: len(x) // 250 * 250].reshape(-1, 250)


@each
@each_dtype
@each_scale
@pytest.mark.parametrize("order", ["natural", "mixed", "finite"])
def test_every_pattern_matches_the_oracle(run, dtype, scales, order):
    check(run, pattern_case(dtype, order), 1, MIXED[INPUTS.index(dtype) % 2], scales)


@each
@each_dtype
@each_scale
def test_zero_nan_inf_and_subnormal_blocks(run, dtype, scales):
    blocks = special_blocks(dtype)
    x = np.zeros((len(blocks), 150), dtype)
    x[:, 7:39], x[:, 118:] = blocks, blocks[::-1]
    check(run, x, 1, MIXED[INPUTS.index(dtype) % 2], scales)
    check(run, x.T.copy(), 1, MIXED[INPUTS.index(dtype) % 2], scales)


@each
@each_scale
@pytest.mark.parametrize("format", FORMATS)
def test_amax_around_powers_of_two(run, scales, format):
    a = amax_edges(format)
    x = np.zeros((len(a), 128), np.float32)
    x[:, 3], x[:, 30], x[:, 31] = -a, a / 2, a / 300
    formats = {"row_format": format, "col_format": format}
    check(run, x, 1, formats, scales)


def test_the_oracle_on_blocks_worked_by_hand():
    x = np.zeros((6, 128), np.float32)
    x[0, 0] = 448
    x[1, 0] = 449  # 448 / 449 < 1: down to 1/2
    x[2, :3] = [np.inf, 1, -np.nan]  # 448 / 1 down to 256
    x[3, 0] = np.inf
    x[4, 0] = 2.0**-126  # held to 2^126
    x[5, 0] = -(2.0**-130)  # counts as -0
    attrs = {"k_ndim": 1, "power_of_2": True, "epsilon": 0.0}
    row, scale_inv, amax = oracle_block.quantize_block(x, **attrs, row_format="e4m3")
    assert scale_inv[:, 0].tolist() == [1, 2, 2.0**-8, 1, 2.0**-126, 1]
    codes = row.view(np.uint8)
    assert codes[:, 0].tolist() == [0x7E, 0x76, 0x7E, 0x7E, 0x38, 0x80]
    assert codes[2, 1:4].tolist() == [0x78, 0x7F, 0]
    assert amax.tolist() == [449, 1]
    attrs |= {"power_of_2": False, "epsilon": 896.0}
    scale_inv = oracle_block.quantize_block(x, **attrs, row_format="e4m3")[1]
    assert scale_inv[:, 0].tolist() == [2.0] * 6


SHAPES = [
    *[((1,), 1), ((19,), 1), ((111,), 0), ((), 0), ((33, 265), 1)],
    *[((3, 5, 7), 1), ((3, 5, 7), 2), ((129, 2, 66), 2)],
    *[((3, 43, 132), 1), ((0,), 1), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)],
]


@each
@each_dtype
def test_ragged_and_empty_shapes(run, dtype):
    rng = np.random.default_rng(0)
    for i, (shape, k_ndim) in enumerate(SHAPES):
        if not picks(run, i, INPUTS.index(dtype), 3):
            continue
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
        check(run, x.astype(dtype), k_ndim, MIXED[k_ndim % 2], SCALES[i % 2])


def _op(family: str, copies: str, noop: bool = False):
    return getattr(ops, f"QUANTIZE_{family}_{copies}{'_NOOP' * noop}")


def _attrs(op, formats=BOTH, **scales):
    every = {"k_ndim": 1, "format": "e4m3", **formats, **SCALES[0], **scales}
    return {name: every[name] for name in op.attrs}


@each
@pytest.mark.parametrize("family", ["BLOCK", "BLOCK2D"])
def test_one_copy_equals_its_half_of_both(run, family):
    x = patterns(BF16)[: 200 * 250].reshape(200, 250)
    halves = []
    for copies in ("ROW", "COL", "ROWCOL"):
        op = _op(family, copies)
        halves.append(run(op, x, **_attrs(op)))
    row, col, both = halves
    assert both[0].shape == (200, 250)
    assert both[1 if family == "BLOCK2D" else 2].shape == (250, 200)
    if family == "BLOCK":
        agree((*row[:2], *col), both)
    else:
        agree((row[0], *col), both)
        same_bits(row[1], both[2])


@each
def test_col_is_row_of_the_transpose(run):
    x = patterns(BF16)[: 200 * 250].reshape(200, 250)
    col = run(ops.QUANTIZE_BLOCK_COL, x, k_ndim=1, col_format="e4m3", **SCALES[1])
    row = run(
        *(ops.QUANTIZE_BLOCK_ROW, x.T.copy()), k_ndim=1, row_format="e4m3", **SCALES[1]
    )
    agree(col, row)


@each
def test_a_tile_of_2d_blocks_is_one_block_of_its_elements(run):
    """128 x 128 elements in a row are, as a 1-D block of 128, scaled alike."""
    x = patterns(BF16)[: 2**14 * 3]
    x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    x = x.reshape(3 * 128, 128)
    _, _, scale_inv, _ = run(
        ops.QUANTIZE_BLOCK2D_ROWCOL, x, **_attrs(ops.QUANTIZE_BLOCK2D_ROWCOL)
    )
    largest = np.abs(x.astype(np.float32)).reshape(3, -1).max(1)
    expected = oracle.amax_to_scale(
        largest, format="e4m3", margin=0, power_of_2=True, epsilon=0.0
    )[1]
    same_bits(scale_inv[:, 0], expected)


FLAGS = [(0.0, False), (-0.0, False), (1e-40, False), (1.0, True), (np.nan, True)]
VARIANTS = list(itertools.product(("BLOCK", "BLOCK2D"), ("ROW", "COL", "ROWCOL")))


@each
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_noop_keeps_the_previous_results(run, variant):
    if not picks(run, VARIANTS.index(variant), 0, 2) and variant[1] != "ROWCOL":
        return
    plain, noop = _op(*variant), _op(*variant, noop=True)
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 170)).astype(np.float32) for _ in range(2))
    old_results = run(plain, old, **_attrs(plain))
    new_results = run(plain, 9 * x, **_attrs(plain))
    for flag, keeps in FLAGS:
        noop_flag = np.array([flag], np.float32)
        got = run(noop, noop_flag, 9 * x, *old_results, **_attrs(plain))
        expected = oracle.noop(noop_flag, old_results, new_results)
        assert (expected is old_results) == keeps
        agree(got, expected)


@pytest.mark.parametrize("family", ["BLOCK", "BLOCK2D"])
def test_vmap_gives_each_example_its_own_blocks(family):
    x = patterns(BF16)[: 3 * 20 * 50].reshape(3, 20, 50)
    op = _op(family, "ROWCOL")
    mapped = jax.vmap(lambda x: op(x, **_attrs(op)))(x)
    for i in range(3):
        agree([r[i] for r in mapped], [np.asarray(r) for r in op(x[i], **_attrs(op))])


EPSILONS = (0.0, 2.0**-20, 1e-40, 3.0)
any_run = st.sampled_from(IMPLEMENTATIONS)
any_scale = st.fixed_dictionaries(
    {"power_of_2": st.booleans(), "epsilon": st.sampled_from(EPSILONS)}
)


@examples
@given(any_run, bit_patterns((5, 170)), st.sampled_from(MIXED), any_scale)
def test_any_bits_match_the_oracle(run, x, formats, scales):
    check(run, x, 1, formats, scales)


@examples
@given(any_run, moderate((5, 170)), st.sampled_from(FORMATS), any_scale)
def test_the_scale_is_the_largest_that_fits(run, x, format, scales):
    attrs = {"k_ndim": 1, "row_format": format, **scales}
    row, scale_inv, _ = run(ops.QUANTIZE_BLOCK_ROW, x, **attrs)
    a = np.abs(np.pad(x, ((0, 0), (0, 86)))).reshape(5, 2, 128).max(2)
    a = np.maximum(a, scales["epsilon"] * (scales["epsilon"] >= 2.0**-126))
    top, used = a / scale_inv.astype(np.float64), a > 0
    assert np.all(top <= MAX[format] * (1 + 2.0**-23))
    least = 0.5 if scales["power_of_2"] else 1 - 2.0**-23
    assert np.all(top[used] > MAX[format] * least * (1 - 2.0**-24))
    assert np.all(scale_inv[~used] == 1)
    if scales["power_of_2"]:
        assert np.all(np.frexp(scale_inv)[0] == 0.5)
    scaled = x / np.repeat(scale_inv, 128, 1)[:, :170].astype(np.float64)
    if scales["power_of_2"]:  # exact, so the codes are those of one rounding
        clipped = np.clip(scaled, -MAX[format], MAX[format])
        same_bits(row, clipped.astype(np.float32).astype(CODES[format]))


@examples
@given(any_run, moderate((5, 170)), st.sampled_from(FORMATS), any_scale)
def test_round_trip_stays_within_half_a_step(run, x, format, scales):
    attrs = {"k_ndim": 1, "row_format": format, **scales}
    row, scale_inv, _ = run(ops.QUANTIZE_BLOCK_ROW, x, **attrs)
    back = {"k_ndim": 1, "out_dtype": "float32"}
    (y,) = REFERENCE(DEQUANTIZE_BLOCK, row, scale_inv, **back)
    half_ulp, half_step = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[
        format
    ]
    step = half_step * np.repeat(scale_inv, 128, 1)[:, :170].astype(np.float64)
    # A float32 scale adds three roundings: of it, its inverse and the products.
    bound = np.maximum(half_ulp * np.abs(x), step) + 4 * 2.0**-24 * np.abs(x)
    assert np.all(np.abs(y.astype(np.float64) - x) <= bound)
    if scales["power_of_2"]:
        again = run(ops.QUANTIZE_BLOCK_ROW, y, **attrs)
        same_bits(REFERENCE(DEQUANTIZE_BLOCK, *again[:2], **back)[0], y)


@examples
@given(any_run, moderate((5, 170)), st.integers(-60, 60), st.sampled_from(FORMATS))
def test_powers_of_two_and_signs_move_only_scales_and_signs(run, x, n, format):
    attrs = {"k_ndim": 1, "row_format": format, **SCALES[n % 2]}
    row, scale_inv, _ = run(ops.QUANTIZE_BLOCK_ROW, x, **attrs)
    moved, moved_inv, _ = run(ops.QUANTIZE_BLOCK_ROW, np.ldexp(-x, n), **attrs)
    same_bits(moved, (row.view(np.uint8) ^ 0x80).view(CODES[format]))
    zero = np.pad(x, ((0, 0), (0, 86))).reshape(5, 2, 128).any(2)
    same_bits(moved_inv, np.where(zero, np.ldexp(scale_inv, n), scale_inv))


@each
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_dequantize_every_code_with_every_scale(run, out_dtype):
    scales = [2.0**n for n in range(-126, 127, 7)] + [0.0, 1e-39, 0.3, 5e37, -2.0]
    scales = np.array(scales, np.float32)[:, None]
    for format in FORMATS:
        codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
        data, grid = codes.view(CODES[format]), np.repeat(scales, 2, 1)
        attrs = {"k_ndim": 1, "out_dtype": out_dtype}
        want = oracle_block.dequantize_block(data, grid, rows=1, **attrs)
        agree(run(DEQUANTIZE_BLOCK, data, grid, **attrs), want)
        tall = np.repeat(data, 100, 0)
        grid = grid[: -(-len(tall) // 128)]
        want = oracle_block.dequantize_block(tall, grid, rows=128, **attrs)
        agree(run(DEQUANTIZE_BLOCK2D, tall, grid, **attrs), want)


def test_bad_arguments_are_named():
    x, attrs = jnp.ones((4, 8)), {"k_ndim": 1, **SCALES[0]}
    say = "quantize_block_row: row_format must be e4m3 or e5m2, got 'fp8'"
    with pytest.raises(ValueError, match=re.escape(say)):
        ops.QUANTIZE_BLOCK_ROW(x, **attrs, row_format="fp8")
    say = "quantize_block2d_row: format must be e4m3 or e5m2, got 'fp8'"
    with pytest.raises(ValueError, match=re.escape(say)):
        ops.QUANTIZE_BLOCK2D_ROW(x, **attrs, format="fp8")
    for epsilon in (-1.0, float("nan"), float("inf")):
        say = f"epsilon must be a finite float32 >= 0, got {epsilon}"
        with pytest.raises(ValueError, match=re.escape(say)):
            ops.QUANTIZE_BLOCK_ROW(
                x, k_ndim=1, power_of_2=True, epsilon=epsilon, row_format="e4m3"
            )
    with pytest.raises(ValueError, match=r"prev_row_scale must have K\.\./128 = 1"):
        ops.QUANTIZE_BLOCK_ROW_NOOP(
            *(jnp.zeros(1), x, jnp.zeros((4, 8), jnp.float8_e4m3fn)),
            *(jnp.zeros((4, 2), F32), jnp.zeros(2)),
            **attrs,
            row_format="e4m3",
        )
