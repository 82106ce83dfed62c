"""amax and the scale that follows from it, against the numpy oracle."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import (
    BF16,
    F32,
    FORMATS,
    IMPLEMENTATIONS,
    INPUTS,
    LEVELS,
    MAX,
    REFERENCE,
    bit_patterns,
    examples,
    once,
)
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops import _extension
from te_flax.ops.amax import AMAX, AMAX_TO_SCALE
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.ops.quantize import QUANTIZE_ROWCOL
from te_flax.testing import oracle
from te_flax.testing.patterns import amax_edges, patterns, same_bits

each = pytest.mark.parametrize("run", IMPLEMENTATIONS, ids=str)


@each
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_every_pattern_alone_and_together(run, dtype):
    x = patterns(dtype)
    same_bits(run(AMAX, x)[0], oracle.amax(x)[0])
    finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    same_bits(run(AMAX, finite)[0], oracle.amax(finite)[0])
    for at in range(0, len(x), 1999):
        same_bits(run(AMAX, x[at : at + 3])[0], oracle.amax(x[at : at + 3])[0])


@each
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_element_anywhere_is_seen(run, bad):
    # XLA's float maximum drops NaN from 4096 elements on.
    for size in (1, 33, 4095, 4096, 70001):
        for at in {0, size // 2, size - 1}:
            x = np.ones(size, np.float32)
            x[at] = bad
            expected = [1.0 if size > 1 else 0.0, 1.0]
            assert run(AMAX, x)[0].tolist() == expected


@each
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (19,), (111, 5), (2, 3, 4, 5)])
def test_shapes(run, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(BF16)
    same_bits(run(AMAX, x)[0], oracle.amax(x)[0])


@examples
@given(st.sampled_from(IMPLEMENTATIONS), bit_patterns((9, 77)))
def test_quantizers_return_the_same_amax(run, x):
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    (expected,) = oracle.amax(x)
    same_bits(run(AMAX, x)[0], expected)
    same_bits(run(QUANTIZE_ROWCOL, x, np.float32(3), **attrs)[-1], expected)
    same_bits(run(QUANTIZE_MXFP8_ROWCOL, x, **attrs)[-1], expected)
    same_bits(run(AMAX, np.random.default_rng(0).permutation(x.ravel()))[0], expected)


@once
def scale_case(format: str, margin: int, power_of_2: bool, epsilon: float):
    attrs = {"format": format, "margin": margin}
    attrs |= {"power_of_2": power_of_2, "epsilon": epsilon}
    amax = np.concatenate([amax_edges(format), patterns(F32)[::3]])
    return amax, attrs, oracle.amax_to_scale(amax, **attrs)


@each
@pytest.mark.parametrize("format", FORMATS)
def test_scale_of_every_amax(run, format):
    for case in ((0, False, 0.0), (0, True, 0.0), (7, False, 1e-3), (126, True, 1e-40)):
        amax, attrs, expected = scale_case(format, *case)
        for got, want in zip(run(AMAX_TO_SCALE, amax, **attrs), expected, strict=True):
            same_bits(got, want)


@examples
@given(
    st.sampled_from(IMPLEMENTATIONS),
    bit_patterns((64,)),
    st.sampled_from(FORMATS),
    st.integers(0, 126),
    st.booleans(),
    st.one_of(st.just(0.0), st.floats(0, 2.0**100, width=32)),
)
def test_any_amax_margin_and_epsilon(run, amax, format, margin, power_of_2, epsilon):
    # One attribute set is one compilation; the reference takes few of them.
    margin, epsilon = margin // 42 * 42, 0.0 if epsilon < 1 else 1.5
    attrs = {"format": format, "margin": margin}
    attrs |= {"power_of_2": power_of_2, "epsilon": epsilon}
    expected = oracle.amax_to_scale(amax, **attrs)
    for got, want in zip(run(AMAX_TO_SCALE, amax, **attrs), expected, strict=True):
        same_bits(got, want)


@each
def test_epsilon_is_rounded_before_it_is_flushed(run):
    """Just below 2^-126 as a double is 2^-126 as the float32 that a handler gets."""
    attrs = {"format": "e4m3", "margin": 0, "power_of_2": False}
    for factor, expected in ((1 - 2.0**-30, 2.0**126), (1 - 2.0**-20, 1.0)):
        epsilon = 2.0**-126 * factor
        (scale, _) = run(AMAX_TO_SCALE, np.float32(0), **attrs, epsilon=epsilon)
        assert scale == expected
        scale, _ = oracle.amax_to_scale(np.float32(0), **attrs, epsilon=epsilon)
        assert scale == expected


def test_scales_worked_by_hand():
    amax = np.array([448, 1, 0, 1e-44, np.nan, np.inf, 2.0**-126, 3e38], np.float32)
    attrs = {"format": "e4m3", "margin": 0, "power_of_2": False, "epsilon": 0.0}
    scale, scale_inv = oracle.amax_to_scale(amax, **attrs)
    tiny = float(np.float32(448) / np.float32(3e38))
    assert scale.tolist() == [1, 448, 1, 1, 1, 1, 2.0**126, tiny]
    assert scale_inv[1] == np.float32(1 / 448)
    attrs |= {"margin": 2, "power_of_2": True, "epsilon": 0.5}
    scale, _ = oracle.amax_to_scale(amax, **attrs)
    assert scale.tolist() == [0.25, 64, 128, 128, 1, 1, 128, 2.0**-122]


@examples
@given(st.sampled_from(IMPLEMENTATIONS), st.floats(2.0**-90, 2.0**90, width=32))
def test_the_largest_element_fills_the_format(run, largest):
    attrs = {"format": "e4m3", "margin": 0, "power_of_2": False, "epsilon": 0.0}
    scale, scale_inv = run(AMAX_TO_SCALE, np.float32(largest), **attrs)
    assert abs(float(scale) * largest / MAX["e4m3"] - 1) < 2.0**-23
    assert scale_inv == np.float32(1) / scale
    attrs |= {"power_of_2": True}
    power, inverse = run(AMAX_TO_SCALE, np.float32(largest), **attrs)
    assert power <= scale < 2 * power
    assert power * inverse == 1


def test_bad_attributes_are_named():
    attrs = {"format": "e4m3", "margin": 0, "power_of_2": False, "epsilon": 0.0}
    for name, value, rule in (
        ("format", "e3m4", "be e4m3 or e5m2, got 'e3m4'"),
        ("margin", -1, "be in 0..126, got -1"),
        ("margin", 127, "be in 0..126, got 127"),
        ("epsilon", -1.0, "be a finite float32 >= 0, got -1.0"),
        ("epsilon", float("nan"), "be a finite float32 >= 0, got nan"),
        ("epsilon", 3.5e38, "be a finite float32 >= 0, got 3.5e+38"),
    ):
        say = re.escape(f"amax_to_scale: {name} must {rule}")
        with pytest.raises(ValueError, match=say):
            AMAX_TO_SCALE(jnp.ones(()), **attrs | {name: value})
    with pytest.raises(TypeError, match="amax: x must be float32 or bfloat16 or"):
        AMAX(jnp.ones(3, jnp.int32))


_PROGRAM = """
import hashlib, sys
import numpy as np
import te_flax as te
from te_flax.ops import _extension
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.ops.quantize import QUANTIZE_ROWCOL
assert _extension.simd_level() == sys.argv[1], _extension.simd_level()
x = np.arange(1 << 16, dtype=np.uint32) * np.uint32(65551)
x = x.view(np.float32).reshape(64, 1024)
attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
with te.kernels("*=native"):
    results = QUANTIZE_ROWCOL(x, np.float32(3), **attrs)
    results += QUANTIZE_MXFP8_ROWCOL(x, **attrs)
print(hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_the_environment_chooses_the_instruction_set(level):
    import hashlib

    x = np.arange(1 << 16, dtype=np.uint32) * np.uint32(65551)
    x = x.view(np.float32).reshape(64, 1024)
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    expected = REFERENCE(QUANTIZE_ROWCOL, x, np.float32(3), **attrs)
    expected += REFERENCE(QUANTIZE_MXFP8_ROWCOL, x, **attrs)
    digest = hashlib.sha256(b"".join(r.tobytes() for r in expected)).hexdigest()
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, level],
        env=os.environ | {"TE_FLAX_SIMD": level},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digest


def test_the_extension_reports_a_level():
    if LEVELS:
        assert _extension.simd_level() in LEVELS
