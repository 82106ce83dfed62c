"""FP6 codes: every code, every 16-bit value and every byte, against ml_dtypes."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import IMPLEMENTATIONS, INPUTS

from te_flax.ops import fp6
from te_flax.testing import oracle_mxfp6 as oracle
from te_flax.testing.patterns import patterns, same_bits

FORMATS = tuple(fp6.MAX)
each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)
each_format = pytest.mark.parametrize("format", FORMATS)
CODES = np.arange(64, dtype=np.uint8)


@each
@each_format
def test_every_code_is_decoded_and_encoded_as_ml_dtypes_does(run, format):
    dtype, largest = oracle.FP6[format]
    (values,) = run(fp6.FP6_DECODE, CODES, format=format)
    same_bits(values, CODES.view(dtype).astype(np.float32))
    assert np.max(values) == largest == fp6.MAX[format]
    for kind in INPUTS:  # each holds the values of all codes exactly
        (codes,) = run(fp6.FP6_ENCODE, values.astype(kind), format=format)
        same_bits(codes, CODES)
    # The two upper bits of a byte do not count.
    (again,) = run(fp6.FP6_DECODE, CODES | 192, format=format)
    same_bits(again, values)


@each
@each_format
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_every_pattern_is_encoded_as_ml_dtypes_does(run, format, dtype):
    x = patterns(dtype)
    (codes,) = run(fp6.FP6_ENCODE, x, format=format)
    same_bits(codes, oracle.encode(x, format))


@each
@each_format
def test_float32_values_around_every_tie(run, format):
    values = np.sort(oracle.decode(CODES[:32], format))
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    centres = np.concatenate([ties, values.astype(np.float32), [np.float32(1e30)]])
    near = (centres.view(np.int32)[:, None] + np.arange(-2, 3)).clip(0)
    x = near.astype(np.int32).view(np.float32).ravel()
    (codes,) = run(fp6.FP6_ENCODE, np.concatenate([x, -x]), format=format)
    same_bits(codes, oracle.encode(np.concatenate([x, -x]), format))
    even = oracle.encode(ties, format)
    assert not np.any(even & 1)


@each
def test_every_code_in_every_place_is_packed_and_unpacked(run):
    places = [np.zeros((64, 4), np.uint8), np.full((64, 4), 63, np.uint8)]
    codes = np.concatenate(places * 4)
    for place in range(4):
        codes[128 * place : 128 * (place + 1), place] = np.tile(CODES, 2)
    (data,) = run(fp6.FP6_PACK, codes, k_ndim=1)
    assert data.shape == (512, 1, 3)
    word = codes.astype(int) @ (1 << 6 * np.arange(4))
    assert data[:, 0].tolist() == [[w & 255, w >> 8 & 255, w >> 16] for w in word]
    same_bits(data[:, 0], oracle.pack(codes))
    (back,) = run(fp6.FP6_UNPACK, data, k_ndim=1)
    same_bits(back[:, 0], codes)


@each
def test_rows_that_do_not_fill_their_last_group(run):
    for shape in ((1,), (3, 5), (2, 3, 7), (0, 5), (5, 0), (3, 130), (2, 16), (1, 64)):
        codes = np.resize(CODES * np.uint8(5) & 63, shape)
        (data,) = run(fp6.FP6_PACK, codes, k_ndim=1)
        want = oracle.pack(codes)
        same_bits(data.reshape(want.shape), want)
        (back,) = run(fp6.FP6_UNPACK, data, k_ndim=1)
        whole = back.reshape(*shape[:-1], -(-shape[-1] // 4) * 4)
        same_bits(whole[..., : shape[-1]], codes)
        assert not np.any(whole[..., shape[-1] :])


def test_functions_join_the_groups():
    codes = jnp.asarray(np.resize(CODES, (3, 10)))
    data = fp6.pack(codes)
    same_bits(data, oracle.pack(np.asarray(codes)))
    same_bits(fp6.unpack(data)[:, :10], np.asarray(codes))
    same_bits(fp6.joined(fp6.split(data)), np.asarray(data))
    half = fp6.decode(codes, "e3m2").astype(jnp.bfloat16)
    same_bits(np.asarray(fp6.encode(half, "e3m2")), np.asarray(codes))
    same_bits(fp6.split(data), np.asarray(data).reshape(3, 3, 3))


def test_bad_arguments_are_named():
    say = "fp6_encode: format must be e2m3 or e3m2, got 'e4m3'; e3m2 has the wider"
    with pytest.raises(ValueError, match=re.escape(say)):
        fp6.FP6_ENCODE(jnp.ones(4), format="e4m3")
    say = "fp6_decode: format must be e2m3 or e3m2, got 'fp6'"
    with pytest.raises(ValueError, match=re.escape(say)):
        fp6.FP6_DECODE(jnp.ones(4, jnp.uint8), format="fp6")
    for function in (fp6.encode, fp6.decode):
        with pytest.raises(ValueError, match="format must be e2m3 or e3m2, got 'e4m3'"):
            function(jnp.ones(4, jnp.uint8), "e4m3")
    with pytest.raises(TypeError, match="fp6_pack: codes must be uint8, got float32"):
        fp6.FP6_PACK(jnp.ones(4), k_ndim=1)
    with pytest.raises(ValueError, match="fp6_unpack: data must have 3 = 3, got 4 in"):
        fp6.FP6_UNPACK(jnp.ones((2, 4), jnp.uint8), k_ndim=1)


@pytest.mark.parametrize(
    ("call", "error", "say"),
    [
        (
            lambda: fp6.encode(jnp.ones(4, jnp.uint8), "e2m3"),
            TypeError,
            "fp6_encode: values must be float32 or bfloat16 or float16, got uint8;",
        ),
        (
            lambda: fp6.encode([0.5], "e2m3"),
            TypeError,
            "fp6_encode: values must be an array, got [0.5] of list; convert it with",
        ),
        (
            lambda: fp6.decode(jnp.ones(4, jnp.int32), "e2m3"),
            TypeError,
            "fp6_decode: codes must be uint8, got int32; cast it first",
        ),
        (
            lambda: fp6.pack(jnp.ones(4)),
            TypeError,
            "fp6_pack: codes must be uint8, got float32; cast it first",
        ),
        (
            lambda: fp6.pack(jnp.uint8(3)),
            ValueError,
            "fp6_pack: codes must have rank 1 or more, got shape (); reshape it",
        ),
        (
            lambda: fp6.unpack(jnp.ones((2, 6), jnp.int8)),
            TypeError,
            "fp6_unpack: data must be uint8, got int8; cast it first",
        ),
        (
            lambda: fp6.unpack(jnp.uint8(3)),
            ValueError,
            "fp6_unpack: data must have rank 1 or more, got shape (); reshape it",
        ),
        (
            lambda: fp6.unpack(jnp.ones((2, 4), jnp.uint8)),
            ValueError,
            "fp6_unpack: data must have three bytes for each four codes, got shape "
            "(2, 4); pass what pack returned",
        ),
    ],
)
def test_functions_name_what_does_not_fit(call, error, say):
    with pytest.raises(error, match=re.escape(say)):
        call()
