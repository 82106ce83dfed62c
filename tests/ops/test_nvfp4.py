"""NVFP4: codes against ml_dtypes, every op against the numpy oracle."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _quantizers import (
    BF16,
    F16,
    F32,
    INPUTS,
    REFERENCE,
    Implementation,
    bit_patterns,
    examples,
    moderate,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import fp4
from te_flax.ops import nvfp4 as ops
from te_flax.ops.dequantize import DEQUANTIZE_NVFP4, DEQUANTIZE_NVFP4_2D
from te_flax.ops.hadamard import HADAMARD, SIGNS, rotate_back
from te_flax.testing import oracle, oracle_nvfp4
from te_flax.testing.numerics import close_to, sum_bound
from te_flax.testing.patterns import patterns, same_bits, special_blocks

RUNS = (REFERENCE, Implementation("reference", ieee=True))
each = pytest.mark.parametrize("run", RUNS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", INPUTS, ids=str)
any_run = st.sampled_from(RUNS)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def agree(results, expected) -> None:
    for got, want in zip(results, expected, strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_value_is_encoded_as_ml_dtypes_does(dtype):
    values = patterns(dtype).astype(np.float32)
    values = values[~np.isnan(values)]
    expected = np.clip(values, -6, 6).astype(E2M1).view(np.uint8) & 15
    same_bits(fp4.encode(jnp.asarray(values)), expected)


def test_float32_values_around_every_tie_are_encoded_as_ml_dtypes_does():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    near = (ties.view(np.int32)[:, None] + np.arange(-3, 4)).astype(np.int32)
    values = np.concatenate([near.view(np.float32).ravel(), patterns(F32)])
    values = values[~np.isnan(values)]
    values = np.concatenate([values, -values])
    expected = np.clip(values, -6, 6).astype(E2M1).view(np.uint8) & 15
    same_bits(fp4.encode(jnp.asarray(values)), expected)


def test_every_code_is_decoded_as_ml_dtypes_does():
    codes = np.arange(16, dtype=np.uint8)
    same_bits(fp4.decode(jnp.asarray(codes)), codes.view(E2M1).astype(np.float32))
    same_bits(fp4.encode(fp4.decode(jnp.asarray(codes))), codes)


def test_every_byte_is_packed_and_unpacked():
    data = np.arange(256, dtype=np.uint8)
    codes = np.asarray(fp4.unpack(jnp.asarray(data)))
    assert codes.tolist() == [n for b in range(256) for n in (b % 16, b // 16)]
    same_bits(fp4.pack(jnp.asarray(codes)), data)
    odd = fp4.pack(jnp.full((2, 3), 15, jnp.uint8))
    assert np.asarray(odd).tolist() == [[255, 15]] * 2
    assert fp4.pack(jnp.zeros((2, 0), jnp.uint8)).shape == (2, 0)


def test_stochastic_codes_are_the_two_around_the_value():
    values = np.linspace(-6.5, 6.5, 521, dtype=np.float32)
    ends = np.array([0, 2**32 - 1], np.uint32)[:, None] + np.zeros_like(values, int)
    up, down = fp4.encode_stochastic(jnp.asarray(values), jnp.asarray(ends, "uint32"))
    low, high = (np.abs(fp4.decode(c)) for c in (down, up))
    a = np.minimum(np.abs(values), 6)
    assert np.all((low <= a) & (a <= high))
    exact = np.isin(a, [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert np.all((low == high) == exact)
    same_bits(np.asarray(up) >> 3, np.signbit(values).astype(np.uint8))
    # No draw rounds up what is far below a step: flushed or not, 1e-40 is a zero.
    tiny = jnp.array([1e-40, 2.0**-30], jnp.float32)
    assert not fp4.encode_stochastic(tiny, jnp.zeros(2, jnp.uint32)).any()


def test_stochastic_rounding_is_unbiased():
    """The mean of n draws lies within 6 standard deviations of the value.

    A draw between codes one step apart has a variance of at most step^2 / 4; 6 of
    them and 240 values leave a chance of 5e-7. The draws have 23 bits, so the
    probability of a step is exact to 2^-24.
    """
    n = 1 << 14
    values = jnp.asarray(np.linspace(-6, 6, 240), jnp.float32)
    bits = jax.random.bits(jax.random.key(0), (n, 240), jnp.uint32)
    codes = jax.jit(lambda b: fp4.encode_stochastic(jnp.tile(values, (n, 1)), b))(bits)
    mean = np.mean(np.asarray(fp4.decode(codes), np.float64), 0)
    a = np.abs(np.asarray(values, np.float64))
    step = np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))
    bound = step * (6 * 0.5 / np.sqrt(n) + 2.0**-24)
    assert np.all(np.abs(mean - np.asarray(values)) <= bound)


@each
def test_tensor_scales_of_every_magnitude(run):
    amax = np.abs(patterns(F32))
    agree(run(ops.NVFP4_SCALE, amax), oracle_nvfp4.scale(amax))


def check(run, x, scale, k_ndim: int = 1) -> None:
    """Every variant of one array against the oracle."""
    attrs = {"k_ndim": k_ndim}
    random = np.random.default_rng(3).integers(0, 2**32, x.shape, np.uint32)
    got = run(ops.QUANTIZE_NVFP4_ROW, x, scale, **attrs)
    agree(got, oracle_nvfp4.quantize_row(x, scale, **attrs))
    got = run(ops.QUANTIZE_NVFP4_ROW_STOCHASTIC, x, scale, random, **attrs)
    agree(got, oracle_nvfp4.quantize_row(x, scale, random, **attrs))
    got = run(ops.QUANTIZE_NVFP4_2D_ROWCOL, x, scale, **attrs)
    agree(got, oracle_nvfp4.quantize_2d(x, scale, **attrs))


@each
@each_dtype
@pytest.mark.parametrize("scale", [1.0, 300.0, 2.0**-100])
def test_every_pattern_matches_the_oracle(run, dtype, scale):
    x = np.random.default_rng(0).permutation(patterns(dtype))
    x = x[: 123 * 120].reshape(120, 123) if dtype == F32 else x[:65436].reshape(-1, 123)
    check(run, x, np.float32(scale))


@each
@each_dtype
def test_zero_nan_inf_and_subnormal_blocks(run, dtype):
    x = special_blocks(dtype)
    finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    for scale in (np.float32(2.0), oracle_nvfp4.scale(np.float32(448))[0]):
        check(run, x, scale)
    check(run, finite.T.copy(), np.float32(1e-3))


def test_the_oracle_on_blocks_worked_by_hand():
    x = np.zeros((5, 16), np.float32)
    x[0, :3] = [6, -3, 0.2]
    x[1, :2] = [np.inf, 1]
    x[2, :2] = [np.nan, 1]
    x[3, 0] = 1e-6  # 1e-6 * 448 / 6 < 2^-10: scale 0
    row, scales, amax = oracle_nvfp4.quantize_row(x, np.float32(448), k_ndim=1)
    assert scales[:, 0].astype(np.float32).tolist()[0] == 448
    assert scales[:, 0].view(np.uint8).tolist() == [0x7E, 0x7E, 0x7F, 0, 0]
    assert row[:, :2].tolist() == [[0xD7, 0], [0x27, 0], [0, 0], [0, 0], [0, 0]]
    assert amax.tolist() == [6, 1]


SHAPES = [((1,), 1), ((19,), 1), ((), 0), ((33, 37), 1), ((3, 5, 7), 2)]
SHAPES += [((3, 5, 16), 1), ((17, 2, 9), 2), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)]


@each
def test_ragged_and_empty_shapes(run):
    rng = np.random.default_rng(0)
    for shape, k_ndim in SHAPES:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
        check(run, x.astype(F32), np.float32(20), k_ndim)


@examples
@given(any_run, bit_patterns((3, 37)))
def test_any_bits_match_the_oracle(run, x):
    check(run, x, oracle_nvfp4.scale(oracle.amax(x)[0][0])[0])


@examples
@given(any_run, moderate((3, 37)))
def test_round_trip_stays_within_half_a_step(run, x):
    scale, inverse = oracle_nvfp4.scale(oracle.amax(x)[0][0])
    row, scales, _ = run(ops.QUANTIZE_NVFP4_ROW, x, scale, k_ndim=1)
    attrs = {"k_ndim": 1, "out_dtype": "float32"}
    (pairs,) = run(DEQUANTIZE_NVFP4, row, scales, inverse, **attrs)
    y = pairs.reshape(3, -1)[:, :37].astype(np.float64)
    unit = np.repeat(scales.astype(np.float64), 16, 1)[:, :37] * float(inverse)
    largest = np.abs(np.pad(x, ((0, 0), (0, 11)))).reshape(3, 3, 16).max(2)
    largest = np.repeat(largest, 16, 1)[:, :37]
    # Half a step is 1 above 4 scales, 1/4 below 2. A scale may be rounded down by 1/16
    # of itself or half of its smallest step: so much of 6 scales saturates.
    lost = np.maximum(largest / 17, 6 * 2.0**-10 * float(inverse))
    a = np.abs(x)
    half = np.where(a < 2 * unit, 0.25, np.where(a < 4 * unit, 0.5, 1.0)) * unit
    assert np.all(np.abs(y - x) <= np.maximum(half, lost) * (1 + 2.0**-20))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@each
def test_dequantize_every_byte_with_every_scale(run, out_dtype):
    every = np.arange(256, dtype=np.uint8).view(E4M3)
    data = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(every[:, None], 32, 1)
    attrs = {"k_ndim": 1, "out_dtype": out_dtype}
    for value in (0.3, 2.0**-126, 2.0**116, 0.0, 1e-40):
        arrays = (data, scales, np.float32(value))
        want = oracle_nvfp4.dequantize(*arrays, rows=1, **attrs)
        agree(run(DEQUANTIZE_NVFP4, *arrays, **attrs), want)
    arrays = (data, scales[::16].copy(), np.float32(0.3))
    want = oracle_nvfp4.dequantize(*arrays, rows=16, **attrs)
    agree(run(DEQUANTIZE_NVFP4_2D, *arrays, **attrs), want)


def test_one_copy_of_2d_blocks_equals_its_half_of_both():
    x = patterns(BF16)[: 100 * 123].reshape(100, 123)
    row, col, both = (
        REFERENCE(op, x, np.float32(7), k_ndim=1)
        for op in (
            ops.QUANTIZE_NVFP4_2D_ROW,
            ops.QUANTIZE_NVFP4_2D_COL,
            ops.QUANTIZE_NVFP4_2D_ROWCOL,
        )
    )
    agree((row[0], *col), both)
    same_bits(row[1], both[2])


@each
@each_dtype
def test_the_transform_is_the_orthogonal_matrix(run, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 37, 5)).astype(dtype)
    (y,) = run(HADAMARD, x, k_ndim=1)
    assert y.shape == (5, 7, 16)
    tokens = np.zeros((112, 5))
    tokens[:111] = x.astype(np.float64).reshape(111, 5)
    h = oracle_nvfp4.hadamard(SIGNS)
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-15)
    exact = np.einsum("ij,bjk->kbi", h, tokens.reshape(7, 16, 5))
    size = np.einsum("ij,bjk->kbi", np.abs(h), np.abs(tokens).reshape(7, 16, 5))
    close_to(y, exact, sum_bound(4, size))  # each value meets four additions
    back = np.asarray(rotate_back(jnp.asarray(y)), np.float64).T
    # Four additions each way, and orthogonal: of at most 16 values of the block.
    largest = np.abs(tokens).reshape(7, 16, 5).sum(1).repeat(16, 0)
    close_to(back, tokens, sum_bound(8, 4 * largest))


@each
def test_the_transform_of_extreme_values(run):
    x = np.zeros((16 * 7, 1), np.float32)
    x[0:16] = 2.0**-127  # zeros
    x[16:32, 0] = [2.0**-101] * 15 + [1]
    x[32:48] = 3e38  # sums that stay finite
    x[48], x[64], x[80:82, 0] = np.nan, -np.inf, [np.inf, -np.inf]
    x[96] = 2.0**-100
    y = run(HADAMARD, x, k_ndim=1)[0][0]
    assert not y[0].any()
    assert np.all(np.abs(y[1]) == 0.25)
    assert np.all(np.isfinite(y[2]))
    assert np.max(np.abs(y[2])) <= 2.0**127
    assert np.all(np.isnan(y[3:6]))
    assert np.all(np.abs(y[6]) == 2.0**-102)


@each
def test_the_transform_of_integers_is_exact(run):
    x = np.random.default_rng(0).integers(-100, 100, (48, 9)).astype(np.float32)
    (y,) = run(HADAMARD, x, k_ndim=1)
    h = oracle_nvfp4.hadamard(SIGNS)
    exact = np.einsum("ij,bjk->kbi", h, x.reshape(3, 16, 9).astype(np.float64))
    same_bits(np.abs(y), np.abs(exact.astype(np.float32)))
    np.testing.assert_array_equal(y, exact)


def test_bad_arguments_are_named():
    x = jnp.ones((4, 8))
    with pytest.raises(TypeError, match="quantize_nvfp4_row: x must be float32 or"):
        ops.QUANTIZE_NVFP4_ROW(jnp.ones((4, 8), int), jnp.float32(1), k_ndim=1)
    say = "quantize_nvfp4_row_stochastic: random must be uint32, got int32"
    with pytest.raises(TypeError, match=say):
        ops.QUANTIZE_NVFP4_ROW_STOCHASTIC(
            x, jnp.float32(1), jnp.ones((4, 8), jnp.int32), k_ndim=1
        )
    say = "dequantize_nvfp4: scale must have K../8 = 1 (one per 8 of K = 4 of data)"
    with pytest.raises(ValueError, match=re.escape(say)):
        DEQUANTIZE_NVFP4(
            *(jnp.ones((4, 4), jnp.uint8), jnp.ones((4, 2), jnp.float8_e4m3fn)),
            *(jnp.float32(1),),
            k_ndim=1,
            out_dtype="float32",
        )
