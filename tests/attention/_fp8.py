"""FP8 attention with scales that fit, and how close two implementations must come."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _cases import FAST

import te_flax as te
from te_flax.ops.history import decode
from te_flax.quantize.mailbox import MAILBOX_SIZE
from te_flax.quantize.statistics import RECORD_SIZE, decode_statistics

AMAXES = (6.0, 6.0, 6.0, 1.0, 6.0)


def state(
    amaxes=AMAXES,
    backward=(6.0, 8.0, 8.0, 32.0, 32.0),
    *,
    record=False,
):
    """Scales from amaxes, of the forward and of the backward arrays."""
    pairs = []
    for values, limit in ((amaxes, 448.0), (backward, 448.0)):
        scale = jnp.asarray([limit / a for a in values], jnp.float32)
        pairs.append(te.Scale(scale, 1 / scale))
    mailbox = jnp.zeros((5, MAILBOX_SIZE), jnp.float32)
    letters = jnp.zeros((5, RECORD_SIZE), jnp.float32) if record else None
    return te.AttentionState(pairs[0], pairs[1], mailbox, letters)


def both(q, k, v, do, *, fast=True, record=False, amaxes=AMAXES, **options):
    """(o and gradients, amaxes of both passes, with `record` their statistics)."""
    attend = functools.partial(te.dot_product_attention, **options)
    config = te.AttentionConfig(report=True)

    @functools.partial(jax.jit, compiler_options=FAST if fast else None)
    def run(q, k, v, do):
        def call(q, k, v, state):
            o, *measured = attend(q, k, v, fp8=(config, state))
            return o, measured

        vjp: Any = jax.vjp
        held = state(amaxes, record=record)
        o, pull, measured = vjp(call, q, k, v, held, has_aux=True)
        dq, dk, dv, back = pull(do)
        letters = [decode(back.mailbox)]
        if record:
            letters.append(decode_statistics(back.record).row())
        found = [jnp.concatenate(p) for p in zip(measured, letters, strict=True)]
        return (o, dq, dk, dv), *found

    return run(q, k, v, do)


def close_fp8(got, want):
    """Sums that lie between two codes may round to either; nearly all do not.

    One such step of e4m3 is 2^-3 of the element. Where a hundredth of the elements take
    one, the norm of the difference is 2^-3 / 10 of the whole.
    """
    for a, b in zip(got[0], want[0], strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= np.linalg.norm(b) / 80
    amaxes = [np.asarray(a) for a in (got[1], want[1])]
    np.testing.assert_allclose(*amaxes, rtol=0.02)
