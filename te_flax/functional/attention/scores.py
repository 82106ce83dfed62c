"""The scores of a block of queries and keys, and what is dropped from it."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem
from te_flax.functional.attention.structure import allowed, distance
from te_flax.typing import Array


def wide_dtype(problem: Problem):
    """The dtype of scores and sums: float64 of float64 operands, else float32."""
    wide = problem.q.dtype == jnp.float64
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def lowest(dtype) -> Array:
    """Finite, so that no difference of two of them is NaN."""
    return jnp.asarray(-0.7 * float(jnp.finfo(dtype).max), dtype)


def seen(options: Options, block: Problem) -> Array | None:
    """Which keys each query sees, broadcastable to ``[B, K, G, T, S]``."""
    found = allowed(options, block.rows, block.cols)
    found = None if found is None else found[:, None, None]
    for mask in block.masks:
        found = mask if found is None else found & mask
    return found


def modify(options: Options, block: Problem, products: Array) -> Array:
    """From q . k ``[B, K, G, T, S]`` to the scores before any is hidden."""
    dtype = products.dtype
    scores = products * jnp.asarray(options.scale, dtype)
    if options.score_mod is not None:
        scores = _modified(options, block, scores)
    if block.slopes is not None:
        far = jnp.abs(distance(block.rows, block.cols)).astype(dtype)
        slopes = block.slopes.astype(dtype)[:, :, None, None]
        scores = scores - slopes * far[:, None, None]
    for addend in block.addends:
        scores = scores + addend.astype(dtype)
    return scores


def hide(block: Problem, found: Array | None, scores: Array) -> Array:
    """The scores of hidden keys become the lowest number."""
    if found is None:
        return scores
    if block.row_poison is not None:
        scores = scores + block.row_poison[..., None].astype(scores.dtype)
    if block.col_poison is not None:
        poison = block.col_poison[:, :, None, None, :]
        scores = scores + poison.astype(scores.dtype)
    return jnp.where(found, scores, lowest(scores.dtype))


def _modified(options: Options, block: Problem, scores: Array) -> Array:
    """Calls score_mod on ``[B, N, T, S]``."""
    b, k, g, t, s = scores.shape
    numbers = (
        block.batch.reshape(b, 1, 1, 1),
        block.heads.reshape(1, k * g, 1, 1),
        block.rows.index.reshape(1, 1, t, 1),
        block.cols.index.reshape(1, 1, 1, s),
    )
    flat = scores.reshape(b, k * g, t, s)
    mod = options.score_mod
    made = mod(flat, *numbers, *block.score_mod_args)  # pyright: ignore[reportOptionalCall]
    return jnp.broadcast_to(made, flat.shape).astype(scores.dtype).reshape(scores.shape)


def kept(options: Options, block: Problem) -> Array | None:
    """Which probabilities dropout keeps: bool ``[B, K, G, T, S]``.

    Each depends on the key and on the numbers of example, head, query and key alone:
    the same in both passes, in blocks of any size and on any shard.
    """
    if options.dropout_rate == 0:
        return None
    bound = np.uint32(math.floor(options.dropout_rate * 2**32))
    words = jnp.asarray(block.dropout_key)
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    heads = block.heads.reshape(-1)
    for numbers in (block.batch, heads, block.rows.index, block.cols.index):
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        for _ in range(jnp.ndim(keys)):
            fold = jax.vmap(fold, (0, None))
        keys = fold(keys, numbers)
    words = jax.random.key_data(keys)[..., 0]
    shape = (words.shape[0], *block.heads.shape, *words.shape[2:])
    return words.reshape(shape) >= bound


def drop(options: Options, keep: Array | None, p: Array) -> Array:
    """Zeros what is not kept and scales the rest, so that the mean stays."""
    if keep is None:
        return p
    share = jnp.asarray(1 / (1 - options.dropout_rate), p.dtype)
    return jnp.where(keep, p * share, jnp.zeros((), p.dtype))
