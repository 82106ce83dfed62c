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
from te_flax.ops import attention_fp8

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
    if case in ("causal", "full"):
        both["te_flax FP8"] = functools.partial(_fp8, **ours)
    found = {
        name: functools.partial(passes(f, backward=backward), *arrays)
        for name, f in both.items()
    }
    if case in ("causal", "full") and not backward:
        codes = [a.astype(jnp.float8_e4m3fn) for a in arrays[:3]]
        kernel = jax.jit(functools.partial(_kernel, causal=case == "causal"))
        found["te_flax FP8, codes to codes"] = functools.partial(kernel, *codes)
    return found


def _fp8(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """With the scales of amaxes that normal operands have."""
    pairs = []
    for amaxes in ((6, 6, 6, 1, 6), (6, 8, 8, 32, 32)):
        scale = 448.0 / jnp.asarray(amaxes, jnp.float32)
        pairs.append(te.Scale(scale, 1 / scale))
    fp8 = (te.AttentionConfig(), te.AttentionState(*pairs))
    return te.dot_product_attention(
        q, k, v, fp8=fp8, implementation="cudnn", **options
    )[0]


def _kernel(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """The forward kernel alone."""
    q = q.reshape(*q.shape[:3], 1, DIM)
    scalars = [jnp.float32(1)] * 6
    attrs = {"scale": DIM**-0.5, "causal": causal, "layout": "BTNH"}
    return attention_fp8.forward()(q, k, v, *scalars, **attrs)[0]


def cases() -> Iterator[tuple[str, bool, float]]:
    """Name, whether the backward pass is run too, and TFLOP of every case."""
    one = 4e-12 * BATCH * SEQUENCE**2 * HEADS * DIM
    for case, (_, _, share) in CASES.items():
        for backward in (False, True):
            yield case, backward, share * one * (3.5 if backward else 1)
