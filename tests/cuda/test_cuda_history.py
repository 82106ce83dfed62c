"""The CUDA histories equal their references, in place and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu import GPU, agree, native

from te_flax.ops import history as ops
from te_flax.quantize.mailbox import encode
from te_flax.testing.patterns import amax_edges, patterns

pytestmark = GPU
LENGTHS = (1, 2, 255, 256, 257, 1024, 3000)
FORMATS = {"x_format": "e4m3", "kernel_format": "e5m2", "dy_format": "e4m3"}


def reference(op, *arrays, **attrs):
    """The op's reference on the CPU."""
    arrays = jax.device_put(arrays, jax.devices("cpu")[0])
    return tuple(
        np.asarray(r)
        for r in jax.jit(functools.partial(op.reference, **attrs))(*arrays)
    )


def histories(length: int, seed: int) -> np.ndarray:
    """Rows that end in zeros, hold one entry, are full, or hold the extremes."""
    full = np.random.default_rng(seed).lognormal(0, 9, (5, length)).astype(np.float32)
    full[1] = 0
    full[2, length // 2 :] = 0
    full[3] = np.resize(np.float32([2.0**-126, 3.4e38, 1.0]), length)
    return full


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("margin", [0, 3])
def test_scales(length, margin):
    x, kernel, dy = (histories(length, seed) for seed in range(3))
    for window in {1, max(1, length // 2), length}:
        attrs = {"window": window, "margin": margin, **FORMATS}
        arrays = (x, kernel, dy)
        expected = reference(ops.HISTORY_TO_SCALE, *arrays, **attrs)
        agree(native(ops.HISTORY_TO_SCALE, *arrays, **attrs), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_push_amaxes(length):
    pairs = [[0, 0], [3, 0], [0, 1], [2.0**-126, 1], [3e38, 0]]
    amaxes = np.array(pairs, np.float32)
    nonfinite = np.arange(5, dtype=np.int32)
    arrays = (
        histories(length, 0),
        histories(length, 1),
        nonfinite,
        amaxes,
        amaxes[::-1],
    )
    expected = reference(ops.PUSH_AMAXES, *arrays)
    agree(native(ops.PUSH_AMAXES, *arrays), expected)


def test_push_in_place():
    """Donated histories are shifted where they lie."""

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def push(x, kernel, nonfinite, amax):
        return ops.PUSH_AMAXES(x, kernel, nonfinite, amax, amax)

    gpu = jax.devices("cuda")[0]
    start = histories(3000, 2)[0]
    state = jax.device_put((start, start.copy(), np.int32(0)), gpu)
    pushed = []
    for step in range(20):
        amax = jnp.asarray([step % 3, step % 2], jnp.float32, device=gpu)
        state = push(*state, amax)
        pushed += [float(step % 3)] if step % 3 else []
    expected = np.concatenate([pushed[::-1], start])[:3000].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(state[0]), expected)
    np.testing.assert_array_equal(np.asarray(state[1]), expected)
    assert int(state[2]) == 20  # both flags of every second step


@pytest.mark.parametrize("length", [1, 1024])
def test_push_letter(length):
    edges = np.abs(patterns(np.dtype(np.float32)))
    values = edges[np.isfinite(edges)]
    letters = np.asarray(encode(jnp.stack([values, 0 * values], -1)))
    pick = np.random.default_rng(5)
    summed = letters[pick.integers(0, len(letters), (400, 3))].sum(1)
    means = letters[pick.integers(0, len(letters), (400, 1))].repeat(4, 1).mean(1)
    scaled = letters[:300] * np.float32(0.37)
    flagged = np.asarray(encode(jnp.asarray([[0, 1], [5, 1]], jnp.float32)))
    none = np.zeros((2, ops.LETTER_SIZE), np.float32)
    letters = np.concatenate([letters, summed, means, scaled, flagged, none])
    letters = letters.astype(np.float32)
    history = np.resize(histories(length, 3), (len(letters), length))
    arrays = (letters, history, np.zeros(len(letters), np.int32))
    agree(native(ops.PUSH_LETTER, *arrays), reference(ops.PUSH_LETTER, *arrays))


def test_amax_edges_scale():
    edges = amax_edges("e4m3")[:, None]
    attrs = {"window": 1, "margin": 0, **FORMATS}
    arrays = (edges,) * 3
    expected = reference(ops.HISTORY_TO_SCALE, *arrays, **attrs)
    agree(native(ops.HISTORY_TO_SCALE, *arrays, **attrs), expected)
