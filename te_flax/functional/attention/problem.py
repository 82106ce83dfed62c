"""The call in the one form that the implementations compute on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_flax.functional.attention.options import (
    Operands,
    Options,
    Sizes,
    sizes_of,
)
from te_flax.functional.attention.structure import Side, sides
from te_flax.typing import Array


class Problem(NamedTuple):
    """Arrays with the heads split into K groups of G queries' heads.

    Attributes:
        q: ``[B, K, G, T, H]``.
        k: ``[B, K, S, H]``.
        v: ``[B, K, S, Hv]``.
        addends: floats ``[B|1, K|1, G|1, T|1, S|1]`` added to the scores.
        masks: bools likewise, True where a query sees a key.
        rows: the queries' tokens.
        cols: the keys' tokens.
        row_poison: ``[B, K, G, T]``, 0 or, of a query that is not finite, NaN; None
            where every query sees every key.
        col_poison: ``[B, K, S]``, likewise of keys and values.
        slopes: float32 ``[K, G]`` of ALiBi.
        sink: float32 ``[K, G]``, one more score that every query sees.
        dropout_key: uint32 ``[2]``, the words of a random key.
        batch: int32 ``[B]``, the examples' numbers.
        heads: int32 ``[K, G]``, the heads' numbers.
        score_mod_args: of the function of the scores.
    """

    q: Array
    k: Array
    v: Array
    addends: tuple[Array, ...]
    masks: tuple[Array, ...]
    rows: Side
    cols: Side
    row_poison: Array | None
    col_poison: Array | None
    slopes: Array | None
    sink: Array | None
    dropout_key: Array | None
    batch: Array
    heads: Array
    score_mod_args: tuple[Any, ...]


def pose(options: Options, operands: Operands, batch: Array, heads: Array) -> Problem:
    """Brings a call into the common form.

    Args:
        options: the static part.
        operands: the arrays.
        batch: int32 ``[B]``, the examples' numbers in the whole call.
        heads: int32 ``[N]``, likewise of the heads.
    """
    sizes = sizes_of(options.layout, operands)
    q, k, v = _heads_first(options.layout, operands)
    split = (sizes.kv_heads, sizes.heads // sizes.kv_heads)
    q = q.reshape(sizes.batch, *split, *q.shape[2:])
    addends, masks = _matrices(operands, split)
    rows, cols = sides(options, operands, sizes)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        addends=addends,
        masks=masks,
        rows=rows,
        cols=cols,
        row_poison=None,
        col_poison=None,
        slopes=_per_head(operands.alibi_slopes, split),
        sink=_sink(options, operands, sizes, split),
        dropout_key=operands.dropout_key,
        batch=batch,
        heads=heads.reshape(split),
        score_mod_args=operands.score_mod_args,
    )
    hidden = masks or rows.segments is not None
    if not hidden and options.left is None and options.right is None:
        return problem
    return _isolated(problem)


def lay(options: Options, o: Array) -> Array:
    """From ``[B, K, G, T, Hv]`` to the user's layout."""
    o = o.reshape(o.shape[0], o.shape[1] * o.shape[2], *o.shape[3:])
    return jnp.transpose(o, ["BNT".index(d) for d in options.layout[:3]] + [3])


def _heads_first(layout: str, operands: Operands) -> list[Array]:
    """[B, heads, tokens, dim], pages put together."""
    order = [layout.index(d) for d in "BNT"] + [3]
    q, k, v = (jnp.transpose(a, order) for a in operands[:3])
    if operands.page_table is not None:
        k, v = map(_gathered, (k, v), operands.page_table)
    return [q, k, v]


def _gathered(pages: Array, table: Array) -> Array:
    """Pages ``[P, K, size, H]`` to ``[B, K, S, H]``; a page that is none is NaN."""
    outside = jnp.int32(pages.shape[0])  # a negative number would count from the end
    found = jnp.where(table < 0, outside, table)
    taken = jnp.take(pages, found, axis=0, mode="fill", fill_value=jnp.nan)
    taken = jnp.swapaxes(taken, 1, 2)
    b, heads, count, size, dim = taken.shape
    return taken.reshape(b, heads, count * size, dim)


def _matrices(operands: Operands, split: tuple[int, int]):
    """What is added to the scores, and what hides them."""
    addends, masks = [], []
    if operands.bias is not None:
        addends.append(_five(operands.bias, split))
    if operands.mask is not None:
        mask = _five(operands.mask, split)
        if mask.dtype == jnp.bool_:
            masks.append(mask)
        else:
            # What nobody can see is hidden, not only improbable: a row of it gives 0.
            seen = mask > -0.5 * float(jnp.finfo(mask.dtype).max)
            masks.append(seen)
            addends.append(jnp.where(seen, mask, jnp.zeros((), mask.dtype)))
    return tuple(addends), tuple(masks)


def _five(a: Array, split: tuple[int, int]) -> Array:
    """[.., N|1, T|1, S|1] to [B|1, K|1, G|1, T|1, S|1]."""
    a = a.reshape((1,) * (4 - a.ndim) + a.shape)
    heads = split if a.shape[1] > 1 else (1, 1)
    return a.reshape(a.shape[0], *heads, *a.shape[2:])


def _per_head(a: Array | None, split: tuple[int, int]) -> Array | None:
    return None if a is None else a.astype(jnp.float32).reshape(split)


def _sink(options: Options, operands: Operands, sizes: Sizes, split):
    if options.softmax_type == "off_by_one":
        return jnp.zeros(split, jnp.float32)
    sink = _per_head(operands.sink, split)
    # inf - inf would be NaN.
    return None if sink is None else jnp.minimum(sink, jnp.finfo(jnp.float32).max)


def _isolated(problem: Problem) -> Problem:
    """Keeps what is not finite from those who do not see it.

    A product with a probability of 0 would still be NaN, so such tokens become 0 and
    their scores NaN; hiding a score then hides it.
    """
    q, k, v = problem.q, problem.k, problem.v
    bad_q = ~jnp.all(jnp.isfinite(q), axis=-1)
    bad_k = ~(jnp.all(jnp.isfinite(k), axis=-1) & jnp.all(jnp.isfinite(v), axis=-1))

    def clean(a: Array, bad: Array) -> Array:
        return jnp.where(bad[..., None], jnp.zeros((), a.dtype), a)

    def poison(bad: Array) -> Array:
        return jnp.where(bad, jnp.float32(jnp.nan), jnp.float32(0))

    return problem._replace(
        q=clean(q, bad_q),
        k=clean(k, bad_k),
        v=clean(v, bad_k),
        row_poison=poison(bad_q),
        col_poison=poison(bad_k),
    )


def varying(problem: Problem) -> tuple[str, ...]:
    """The manual mesh axes over which any of the arrays differs."""
    leaves = jax.tree.leaves(problem)
    axes = frozenset().union(*(jax.typeof(a).mat.varying for a in leaves))
    return tuple(sorted(axes))
