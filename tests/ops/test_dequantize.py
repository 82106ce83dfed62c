"""Dequantization: every implementation equals the numpy oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import (
    CODES,
    FORMATS,
    HANDLERS,
    IMPLEMENTATIONS,
    REFERENCE,
    bit_patterns,
    examples,
    once,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from te_flax.ops._choice import kernels
from te_flax.ops.dequantize import (
    DEQUANTIZE,
    DEQUANTIZE_MXFP8_COL,
    DEQUANTIZE_MXFP8_ROW,
)
from te_flax.testing import oracle
from te_flax.testing.patterns import same_bits

each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_native = pytest.mark.parametrize("run", HANDLERS, ids=str)
each_format = pytest.mark.parametrize("format", FORMATS)
OUT_DTYPES = ("float32", "bfloat16", "float16")
each_out = pytest.mark.parametrize("out_dtype", OUT_DTYPES)
MXFP8 = {1: DEQUANTIZE_MXFP8_ROW, 0: DEQUANTIZE_MXFP8_COL}


def all_codes(format: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(CODES[format])


@once
def scales() -> np.ndarray:
    """Around every power of two, the flush, the lift at 2^-60, and what is no scale."""
    powers = np.ldexp(np.float32(1), np.arange(-126, 127)).view(np.uint32)
    around = np.concatenate([powers, powers + 1, powers - 1]).view(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 200, np.uint32)
    special = np.array([0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan], np.float32)
    return np.concatenate([around, random.view(np.float32), special])


@once
def tensor_case(format: str, out_dtype: str):
    codes = all_codes(format)
    return [oracle.dequantize(codes, s, out_dtype=out_dtype)[0] for s in scales()]


class AtEveryScale:
    """vmap makes one call of all scales: handlers loop, the reference batches."""

    @functools.partial(jax.jit, static_argnums=0, static_argnames="out_dtype")
    def __call__(self, data, scales, *, out_dtype):
        one = lambda s: DEQUANTIZE(data, s, out_dtype=out_dtype)
        return jax.vmap(one)(scales)

    def reference(self, data, scales, *, out_dtype):
        one = lambda s: DEQUANTIZE.reference(data, s, out_dtype=out_dtype)
        return jax.vmap(one)(scales)


AT_EVERY_SCALE: Any = AtEveryScale()


@each
@each_format
@each_out
def test_every_code_at_every_kind_of_scale(run, format, out_dtype):
    (got,) = run(AT_EVERY_SCALE, all_codes(format), scales(), out_dtype=out_dtype)
    same_bits(got, np.stack(tensor_case(format, out_dtype)))


@once
def block_case(format: str, out_dtype: str, axis: int):
    data = np.broadcast_to(all_codes(format), (256, 256)).copy()
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    if axis == 0:
        data, scale = data.T.copy(), scale.T.copy()
    attrs = {"k_ndim": 1, "out_dtype": out_dtype}
    return data, scale, attrs, oracle.dequantize_mxfp8(data, scale, axis=axis, **attrs)


@each
@each_format
@each_out
@pytest.mark.parametrize("axis", [1, 0], ids=["row", "col"])
def test_every_code_at_every_block_scale(run, format, out_dtype, axis):
    data, scale, attrs, expected = block_case(format, out_dtype, axis)
    same_bits(run(MXFP8[axis], data, scale, **attrs)[0], expected[0])


SHAPES = [
    *[((1,), 1), ((19,), 1), ((111,), 0), ((), 0), ((33, 65), 1), ((3, 5, 7), 2)],
    *[((3, 5, 7), 1), ((129, 2, 66), 2), ((0,), 1), ((0, 5), 1), ((5, 0), 1)],
]


@each
@pytest.mark.parametrize("axis", [1, 0], ids=["row", "col"])
def test_ragged_and_empty_shapes(run, axis):
    rng = np.random.default_rng(0)
    for shape, k_ndim in SHAPES:
        data = rng.integers(0, 256, shape).astype(np.uint8).view(CODES["e4m3"])
        data = data.reshape(shape)
        m_dims, k_dims = shape[: len(shape) - k_ndim], shape[len(shape) - k_ndim :]
        rows = (*m_dims, -(-int(np.prod(k_dims, dtype=int)) // 32))
        cols = (-(-int(np.prod(m_dims, dtype=int)) // 32), *k_dims)
        scale = rng.integers(0, 256, rows if axis else cols).astype(np.uint8)
        attrs = {"k_ndim": k_ndim, "out_dtype": "bfloat16"}
        expected = oracle.dequantize_mxfp8(data, scale, axis=axis, **attrs)
        same_bits(run(MXFP8[axis], data, scale, **attrs)[0], expected[0])
        (expected,) = oracle.dequantize(data, np.float32(0.3), out_dtype="float16")
        got = run(DEQUANTIZE, data, np.float32(0.3), out_dtype="float16")[0]
        same_bits(got, expected)


@each_native
def test_many_tiles_equal_the_reference(run):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (519, 2085), np.uint8).view(CODES["e5m2"])
    attrs = {"k_ndim": 1, "out_dtype": "bfloat16"}
    for axis, shape in ((1, (519, 66)), (0, (17, 2085))):
        scale = rng.integers(0, 256, shape, np.uint8)
        expected = REFERENCE(MXFP8[axis], data, scale, **attrs)[0]
        same_bits(run(MXFP8[axis], data, scale, **attrs)[0], expected)
    expected = REFERENCE(DEQUANTIZE, data, np.float32(3), out_dtype="float32")[0]
    same_bits(run(DEQUANTIZE, data, np.float32(3), out_dtype="float32")[0], expected)


codes_of = hnp.arrays(np.uint8, (6, 40))


@examples
@given(
    st.sampled_from(IMPLEMENTATIONS),
    codes_of,
    bit_patterns((1,)),
    st.sampled_from(FORMATS),
    st.sampled_from(OUT_DTYPES),
)
def test_any_codes_and_scale_match_the_oracle(run, codes, scale, format, out_dtype):
    data = codes.view(CODES[format])
    (expected,) = oracle.dequantize(data, scale[0], out_dtype=out_dtype)
    same_bits(run(DEQUANTIZE, data, scale[0], out_dtype=out_dtype)[0], expected)


def test_values_worked_by_hand():
    codes = np.array([0x7E, 0x01, 0x81, 0x7F, 0xFF], np.uint8).view(CODES["e4m3"])
    (y,) = oracle.dequantize(codes, np.float32(0.5), out_dtype="float32")
    assert (
        y.view(np.uint32).tolist()
        == [0x43600000, 0x3A800000, 0xBA800000] + [0x7FC00000] * 2
    )
    # 2^-9 * 2^-118 is below 2^-126 and becomes the zero of its sign.
    (y,) = oracle.dequantize(codes[1:3], np.float32(2.0**-118), out_dtype="float32")
    assert y.view(np.uint32).tolist() == [0, 0x80000000]
    block = np.array([[0x7C, 0xFC, 0x7E, 0x3C]], np.uint8).view(CODES["e5m2"])
    scale = np.array([[0]], np.uint8)
    attrs = {"k_ndim": 1, "axis": 1, "out_dtype": "float32"}
    (y,) = oracle.dequantize_mxfp8(block, scale, **attrs)
    assert y.view(np.uint32).tolist() == [[0x7F800000, 0xFF800000, 0x7FC00000, 0]]


def test_the_rounding_to_out_dtype_is_not_optimized_away():
    codes = all_codes("e4m3")

    def fused(codes):
        y = DEQUANTIZE(codes, jnp.float32(0.3), out_dtype="bfloat16")[0]
        return y.astype(jnp.float32)

    with kernels("*=reference"):
        got = jax.jit(fused)(codes)
    (expected,) = oracle.dequantize(codes, np.float32(0.3), out_dtype="bfloat16")
    same_bits(got, expected.astype(np.float32))


def test_bad_arguments_are_named():
    data = jnp.zeros((4, 40), jnp.float8_e4m3fn)
    say = "dequantize: out_dtype must be float32 or bfloat16 or float16, got 'int8'"
    with pytest.raises(ValueError, match=say):
        DEQUANTIZE(data, jnp.float32(1), out_dtype="int8")
    with pytest.raises(TypeError, match="dequantize: data must be float8_e4m3fn or"):
        DEQUANTIZE(jnp.zeros(3), jnp.float32(1), out_dtype="float32")
    attrs = {"k_ndim": 1, "out_dtype": "float32"}
    with pytest.raises(ValueError, match=r"scale must have K\.\./32 = 2"):
        DEQUANTIZE_MXFP8_ROW(data, jnp.zeros((4, 3), jnp.uint8), **attrs)
    with pytest.raises(TypeError, match="scale must be uint8, got float32"):
        DEQUANTIZE_MXFP8_ROW(data, jnp.zeros((4, 2)), **attrs)
