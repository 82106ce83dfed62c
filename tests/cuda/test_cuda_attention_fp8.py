"""CUDA: FP8 attention on cuDNN against the emulation, within bounds of the formats."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import held_to_format, mha, program, step
from _cudnn import Sizes, arrays
from _dense import data
from _fp8 import AMAXES, both, state
from _gpu import GPU

import te_flax as te

pytestmark = GPU
BF16 = jnp.dtype(jnp.bfloat16)
AT = Sizes(b=2, t=256, s=384, n=4, k=2, h=128, v=128)
ROUNDING = 2.0**-4  # relative error of one rounding to e4m3
SMALLEST = 2.0**-10  # of codes near 0: half the step
NAMES = ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")


def exact(q, k, v, do, causal):
    """Everything in float64, heads first, of operands rounded to FP8."""
    given = state()
    scale = np.asarray(given.forward.scale, np.float64)

    def coded(a, factor):  # no element is beyond the largest code
        a = np.swapaxes(np.asarray(a, np.float64), 1, 2)
        codes = (a * factor).astype(np.float32).astype(jnp.float8_e4m3fn)
        return np.asarray(codes, float) / factor

    q, k, v = (coded(a, f) for a, f in zip((q, k, v), scale, strict=False))
    do = coded(do, float(given.backward.scale[0]))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(a, group, 1) for a in (k, v))
    scores = np.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(AT.h)
    if causal:
        keep = np.arange(AT.s) <= np.arange(AT.t)[:, None]
        scores = np.where(keep, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bnts,bnsh->bnth", p, v)
    dp = np.einsum("bnth,bnsh->bnts", do, v)
    delta = (do * o).sum(-1, keepdims=True)
    return q, k, v, do, p, o, dp, delta


def bounds(q, k, v, do, p, o, dp, delta):
    """Values and what FP8 roundings may change: of s, o, dp and of the results.

    A sum in float32 of rounded codes errs by far less than one rounding of a code, so
    a bound counts roundings to FP8 and doubles none; s is rounded before or after the
    division by the sum, which leaves its relative error as it is.
    """
    group = AT.n // AT.k
    factor = 1 / np.sqrt(AT.h)
    scale = np.concatenate([np.asarray(a.scale) for a in state()[:2]])
    tiny = {n: SMALLEST / f for n, f in zip(NAMES, scale, strict=True)}
    seen = p > 0
    s_error = ROUNDING * p + tiny["s"] * seen
    o_sum = np.einsum("bnts,bnsh->bnth", s_error, np.abs(v))
    o_error = o_sum + ROUNDING * (np.abs(o) + o_sum) + tiny["o"]
    ds = p * (dp - delta)
    ds_error = p * (np.abs(do) * o_error).sum(-1, keepdims=True)
    ds_error += ROUNDING * (np.abs(ds) + ds_error) + tiny["dp"] * seen
    sums = {
        "dq": ("bnts,bnsh->bnth", ds, ds_error, k, factor),
        "dk": ("bnts,bnth->bnsh", ds, ds_error, q, factor),
        "dv": ("bnts,bnth->bnsh", p, s_error, do, 1.0),
    }
    found = {"o": (o, o_error)}
    for name, (axes, a, error, b, times) in sums.items():
        value = times * np.einsum(axes, a, b)
        size = times * np.einsum(axes, error, np.abs(b))
        if name != "dq":
            shape = (AT.b, AT.k, group, AT.s, AT.h)
            value, size = (x.reshape(shape).sum(2) for x in (value, size))
        found[name] = (value, size + ROUNDING * (np.abs(value) + size) + tiny[name])
    return found


# The kernel rounds exponentials up to 1 also where all probabilities are below 0.5.
@pytest.mark.parametrize(("causal", "s"), [(False, 1.0), (True, 1.0), (False, 0.5)])
def test_against_float64_and_the_emulation(causal, s):
    given = arrays(AT, BF16)[:4]
    mask_type = "causal" if causal else "no_mask"
    amaxes = (*AMAXES[:3], s, *AMAXES[4:])
    got, emulated = (
        both(*given, fast=False, implementation=i, amaxes=amaxes, mask_type=mask_type)
        for i in ("cudnn", "reference")
    )
    assert emulated[1][3, 0] <= s
    q, k, v, do = given
    parts: Any = exact(q, k, v, do, causal)
    want = bounds(*parts)
    for a, b, (name, (value, bound)) in zip(
        got[0], emulated[0], want.items(), strict=True
    ):
        a, b = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in (a, b))
        bound = bound + 2.0**-8 * np.abs(value)  # results are given in bfloat16
        for label, x in (("cudnn", a), ("emulation", b)):
            worst = (np.abs(x - value) / bound).max()
            assert worst <= 1, f"{name} of {label}: {worst} of the bound"
    assert not np.asarray(got[1][:, 1]).any()
    for name, a, b in zip(NAMES, got[1][:, 0], emulated[1][:, 0], strict=True):
        if name in ("q", "k", "v", "do"):
            assert a == b
        elif name == "s":  # a quotient of sums in float32
            assert abs(a - b) <= 0.02 * b
        else:
            # Single elements of a result that FP8 roundings made: their bound is
            # relative to sums of magnitudes, so the largest ones agree to an eighth.
            assert abs(a - b) <= 0.125 * b, name


def test_other_scales():
    """A power of two on the scales of o and the gradients changes tiny codes only."""
    q, k, v, do, _ = arrays(AT, BF16)
    config = te.AttentionConfig()

    def gradients(held):
        def call(q, k, v):
            attend = functools.partial(
                te.dot_product_attention, fp8=(config, held), implementation="cudnn"
            )
            return attend(q, k, v)[0]

        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    plain = state()
    forward, backward = (
        te.Scale(a.scale * f, a.scale_inv / f)
        for a, f in (
            (plain.forward, jnp.asarray([1, 1, 1, 1, 0.5], jnp.float32)),
            (plain.backward, jnp.asarray([1, 0.5, 0.5, 0.5, 0.5], jnp.float32)),
        )
    )
    f = jax.jit(gradients)
    got = f(te.AttentionState(forward, backward, plain.mailbox))
    for a, b in zip(got, f(plain), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)


def test_default():
    q, k, v, _, _ = arrays(AT, BF16)

    def call(q, k, v):
        return te.dot_product_attention(q, k, v, fp8=(te.AttentionConfig(), state()))

    assert "te_cudnn_attention_fp8_fwd" in str(jax.make_jaxpr(call)(q, k, v))


def trained(mask_type, implementation, *, fp8_attention=True):
    """A layer after three steps, with its result and the input's gradient."""
    layer = mha(
        *(2, 256),
        dtype=BF16,
        attn_mask_type=mask_type,
        implementation=implementation,
        recipe=te.DelayedScaling(amax_history_len=4, fp8_attention=fp8_attention),
    )
    x, dy = (data((2, 128, 256), seed, BF16) for seed in (0, 1))
    for _ in range(3):
        y, (dx,), _ = step(layer, (x,), dy)
    return layer, [np.asarray(a, np.float32) for a in (y, dx)]


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_through_a_layer(mask_type):
    """Its histories and results are the emulation's, within what FP8 rounds."""
    layer, got = trained(mask_type, None)
    emulated, want = trained(mask_type, "reference")
    _, plain = trained(mask_type, None, fp8_attention=False)
    held_to_format("delayed_scaling", zip(got, want, strict=True))
    held_to_format("delayed_scaling", zip(got, plain, strict=True))

    text = program(layer, data((2, 128, 256), 0, BF16))
    for direction in ("fwd", "bwd"):
        assert f"te_cudnn_attention_fp8_{direction}" in text
    states = [m.core_attention.fp8 for m in (layer, emulated)]
    rows = zip(NAMES, *(np.concatenate([s.forward, s.dy]) for s in states), strict=True)
    for name, a, b in rows:
        assert ((a > 0) == [True, True, True, False]).all(), name
        if name in ("q", "k", "v", "do"):  # made by the same products before attention
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:  # as above
            limit = 0.02 if name == "s" else 0.125
            assert (np.abs(a - b) <= limit * b).all(), name
