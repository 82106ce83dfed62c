"""Rows of attention for ``python -m benchmarks.gpu --only attention``.

The ratio is to jax.nn's cuDNN implementation of the same case; where it cannot express
one, to that without a mask. FLOP count the products of the scores that are seen.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import te_flax as te

BATCH, SEQUENCE, HEADS, DIM = 8, 2048, 32, 128
LENGTHS = jnp.full(BATCH, SEQUENCE * 7 // 8, jnp.int32)
HALVES = jnp.full((BATCH, 2), SEQUENCE // 2, jnp.int32)
# Case -> our options, jax.nn's or None, the share of the scores that is seen.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, float]] = {
    "causal": ({"mask_type": "causal"}, {"is_causal": True}, 0.5),
    "full": ({}, {}, 1.0),
    "lengths": (
        {"q_seqlen": LENGTHS, "kv_seqlen": LENGTHS},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
        (7 / 8) ** 2,
    ),
    "window 512": (
        {"mask_type": "causal", "window": (511, 0)},
        {"is_causal": True, "local_window_size": (511, 0)},
        0.25 * (1 - 0.125),
    ),
    "two segments": ({"q_seqlen": HALVES, "kv_seqlen": HALVES}, None, 0.5),
}


def operands() -> list[jax.Array]:
    """q, k, v and dy."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (BATCH, SEQUENCE, HEADS, DIM)
    return [jax.random.normal(k, shape, jnp.bfloat16) for k in keys]


def passes(attend: Callable, *, backward: bool) -> Callable:
    """One or both passes of an attention, jitted."""
    if not backward:
        return jax.jit(lambda q, k, v, dy: attend(q, k, v))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> jax.Array:
        return jnp.sum(attend(q, k, v).astype(jnp.float32) * dy)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def runs(case: str, *, backward: bool) -> dict[str, Callable]:
    """The functions to time, without arguments."""
    ours, theirs, _ = CASES[case]
    arrays = operands()
    peer = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", **(theirs or {})
    )
    mine = functools.partial(te.dot_product_attention, implementation="cudnn", **ours)
    label = "jax.nn cudnn" if theirs is not None else "jax.nn cudnn, full"
    both = {label: peer, "te_flax": mine}
    return {
        name: functools.partial(passes(f, backward=backward), *arrays)
        for name, f in both.items()
    }


def cases() -> Iterator[tuple[str, bool, float]]:
    """Name, whether the backward pass is run too, and TFLOP of every case."""
    one = 4e-12 * BATCH * SEQUENCE**2 * HEADS * DIM
    for case, (_, _, share) in CASES.items():
        for backward in (False, True):
            yield case, backward, share * one * (3.5 if backward else 1)
