"""Activations, forward and backward, against float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _activations import backward, close_to_limits, forward, values
from _quantizers import BF16, F16, F32, HANDLERS, REFERENCE
from _variants import VALUES, attributes, results

from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD, ACTIVATIONS
from te_flax.testing.patterns import same_bits

H = Variant()
DTYPES = (BF16, F16, F32)
each = pytest.mark.parametrize("activation", ACTIVATIONS)


def runs():
    """The reference and every instruction set; the handlers must agree to the bit."""
    return [REFERENCE, *HANDLERS]


def compare(runs_of, exact, bound):
    first = None
    for run in runs():
        h = runs_of(run)
        if run is REFERENCE:
            close_to_limits(h, exact, bound)
        elif first is None:
            first = h
            close_to_limits(h, exact, bound)
        else:
            same_bits(h, first)


@each
def test_forward_is_within_the_bound(activation):
    """From every dtype, with one of the others as the result's."""
    i = ACTIVATIONS.index(activation)
    for dtype, out in ((BF16, F32), (F32, DTYPES[i % 3]), (F16, DTYPES[(i + 1) % 3])):
        largest = 3e38 if "," not in activation else 1e15  # no square overflows
        x = values(activation, dtype, largest)
        attrs = attributes(ACT_FWD, (64,), out, activation)
        exact, bound = forward(x, attrs)
        compare(lambda run: results(run, ACT_FWD, H, [x], attrs)["h"], exact, bound)  # noqa: B023


@each
def test_backward_is_within_the_bound(activation):
    i = ACTIVATIONS.index(activation)
    rng = np.random.default_rng(1)
    for dtype, out in ((BF16, F32), (F32, DTYPES[i % 3])):
        x = values(activation, dtype, 1e15)
        if "," in activation:
            x = np.where(np.isinf(x.astype(np.float32)), dtype.type(1), x)
        attrs = attributes(ACT_BWD, (64,), out, activation)
        dy = rng.standard_normal((len(x), 64)).astype(DTYPES[(i + 1) % 3])
        exact, bound = backward(dy, x, attrs)
        compare(lambda run: results(run, ACT_BWD, H, [dy, x], attrs)["h"], exact, bound)  # noqa: B023


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact,linear", "silu,linear"])
def test_an_element_depends_on_itself_only(activation):
    """Rows and columns cut anywhere give the same bits."""
    rng = np.random.default_rng(2)
    slices = len(activation.split(","))
    x = (3 * rng.standard_normal((70, slices, 300))).astype(BF16)
    dy = rng.standard_normal((70, 300)).astype(BF16)
    attrs = attributes(ACT_FWD, (1,), BF16, activation)
    for run in HANDLERS[::2]:
        h = results(run, ACT_FWD, H, [x], attrs)["h"]
        dx = results(run, ACT_BWD, H, [dy, x], attrs)["h"]
        for rows, cols in (
            (slice(13, 14), slice(0, 300)),
            (slice(3, 70), slice(7, 90)),
        ):
            part = [dy[rows, cols], x[rows][:, :, cols]]
            same_bits(results(run, ACT_FWD, H, part[1:], attrs)["h"], h[rows, cols])
            cut = results(run, ACT_BWD, H, part, attrs)["h"]
            same_bits(cut, dx[rows][:, :, cols])


@pytest.mark.parametrize("run", [REFERENCE, *HANDLERS[::2]], ids=str)
def test_limits(run):
    """At an infinity the limit, -0 on the left; NaN stays NaN."""
    x = np.array([np.inf, -np.inf, np.nan, 0, -88, -100], np.float32).reshape(1, 1, 6)
    for name in ("gelu", "gelu_exact", "quick_gelu", "silu"):
        attrs = attributes(ACT_FWD, (6,), BF16, name)
        h = results(run, ACT_FWD, H, [x], attrs)["h"][0].astype(np.float32)
        assert h[0] == np.inf
        assert h[1] == 0
        assert np.signbit(h[1])
        assert np.isnan(h[2])
        assert h[3] == 0
        dy = np.ones((1, 6), np.float32)
        dx = results(run, ACT_BWD, H, [dy, x], attrs)["h"][0, 0].astype(np.float32)
        np.testing.assert_array_equal(dx[:4], [1, 0, np.nan, 0.5])
    # exp(-88) is no normal number, silu(-88) is one.
    attrs = attributes(ACT_FWD, (6,), BF16, "silu")
    h = results(run, ACT_FWD, H, [x], attrs)["h"][0].astype(np.float64)
    assert abs(h[4] + 88 * np.exp(-88.0)) < 2**-8 * 88 * np.exp(-88.0)
    assert h[5] == 0


def test_x_is_not_copied_for_its_one_slice():
    """XLA would move the dim of size 1 in the layout, and all of x with it."""
    x = jnp.ones((64, 32), jnp.bfloat16)
    options = {"k_ndim": 1, "out_dtype": "bfloat16", "activation": "gelu", **VALUES}
    calls = (
        lambda x: ACT_FWD(H, x[:, None], **options),
        lambda x: ACT_BWD(H, x, x[:, None], **options),
    )
    for call in calls:
        text = jax.jit(call).lower(x).compile().as_text() or ""
        assert 'custom_call_target="te_flax.act_' in text
        assert " copy(" not in text


def test_bad_arguments_are_named():
    x = jnp.ones((4, 2, 8))
    call = functools.partial(ACT_FWD, H, k_ndim=1, out_dtype="float32", **VALUES)
    with pytest.raises(ValueError, match="act_fwd: activation must be one of gelu"):
        call(x, activation="tanh")
    text = "act_fwd: x must have size 1 at axis 1, one slice per activation, got"
    with pytest.raises(ValueError, match=re.escape(text)):
        call(x, activation="gelu")
    text = "act_fwd: out_dtype must be float32 or bfloat16 or float16, got 'int8'"
    with pytest.raises(ValueError, match=re.escape(text)):
        ACT_FWD(H, x, activation="silu,linear", k_ndim=1, out_dtype="int8", **VALUES)
    text = "act_fwd: variant must be one of its variants, got "
    with pytest.raises(ValueError, match=re.escape(text)):
        call.func(Variant(dbias=True), x)
