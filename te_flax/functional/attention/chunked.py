"""Attention in blocks: memory linear in the sequence, in both passes.

The forward pass keeps a running maximum and sum for every query; the backward pass
computes the probabilities of a block again from both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.functional._core import add
from te_flax.functional.attention import blocks, reference
from te_flax.functional.attention import scores as _scores
from te_flax.functional.attention.gradients import (
    Sums,
    cotangent,
    floats,
    modified,
    sink_gradient,
)
from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem, varying
from te_flax.functional.attention.reference import Denominator
from te_flax.typing import Array


class _Static(NamedTuple):
    """The static argument of both passes.

    Attributes:
        options: of the call.
        rows: queries in a block.
        cols: keys in a block.
        queries: T without padding.
        keys: S without padding.
        axes: manual mesh axes over which the arrays differ.
    """

    options: Options
    rows: int
    cols: int
    queries: int
    keys: int
    axes: tuple[str, ...]


def attend(options: Options, problem: Problem) -> tuple[Array, Array]:
    """As :func:`te_flax.functional.attention.reference.attend`, in blocks.

    Products take operands of q's dtype and add up in float32.
    """
    queries, keys = problem.q.shape[3], problem.k.shape[2]
    if 0 in (*problem.q.shape, keys):  # there is nothing to cut
        return reference.attend(options, problem)
    sizes = blocks.block_size(queries), blocks.block_size(keys)
    wide = [
        -(-n // size) * size for n, size in zip((queries, keys), sizes, strict=True)
    ]
    if wide[0] > queries:
        problem = blocks.rows(problem, blocks.padded(wide[0]))
    if wide[1] > keys:
        problem = blocks.cols(problem, blocks.padded(wide[1]))
    axes = varying(problem)
    static = _Static(options, *sizes, queries, keys, axes)
    made: Any = _attend(static, problem)
    o, lse = made
    return o[..., :queries, :], lse[..., :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, problem: Problem) -> tuple[Array, Array]:
    return _attend_fwd(static, problem)[0]


def _attend_fwd(static: _Static, problem: Problem):
    """One block of queries after the other."""

    def one(i: Array) -> tuple[Array, Denominator]:
        return _rows_forward(static, i, _row_block(static, problem, i))

    o, below = _stacked(static, problem, one)
    return (o, below.lse), (problem, o, below)


def _row_block(static: _Static, problem: Problem, i: Array) -> Problem:
    return blocks.rows(problem, blocks.cut(i * static.rows, static.rows))


def _col_block(static: _Static, problem: Problem, j: Array) -> Problem:
    return blocks.cols(problem, blocks.cut(j * static.cols, static.cols))


def _count(problem: Problem, static: _Static) -> tuple[int, int]:
    return problem.q.shape[3] // static.rows, problem.k.shape[2] // static.cols


def _stacked(static: _Static, problem: Problem, one: Callable[[Array], Any]) -> Any:
    """Runs a block of queries after the other; joins the results along T."""
    count = _count(problem, static)[0]
    if count == 1:
        return one(jnp.int32(0))
    made = lax.map(one, jnp.arange(count, dtype=jnp.int32))
    return jax.tree.map(_joined, made)


def _joined(a: Array) -> Array:
    """``[blocks, B, K, G, t, ..]`` to ``[B, K, G, T, ..]``."""
    a = jnp.moveaxis(a, 0, 3)
    return a.reshape(*a.shape[:3], -1, *a.shape[5:])


def _each_key_block(
    static: _Static, problem: Problem, i: Array, body: Callable, carry: Any
) -> Any:
    """Loops over the blocks of keys that block ``i`` of queries may see."""
    count = _count(problem, static)[1]
    if count == 1:
        return body(jnp.int32(0), carry)
    low, high = static.options.band
    first, last = jnp.int32(0), jnp.int32(count)
    if low is not None:
        first = jnp.maximum(first, (i * static.rows + low) // static.cols)
    if high is not None:
        end = (i + 1) * static.rows - 1 + high
        last = jnp.minimum(last, end // static.cols + 1)
    return lax.fori_loop(first, last, body, carry)


def _vary(static: _Static, tree: Any) -> Any:
    """Loops want carries of one type: they vary wherever an operand does."""

    def vary(a: Array) -> Array:
        axes = tuple(x for x in static.axes if x not in jax.typeof(a).mat.varying)
        return lax.pcast(a, axes, to="varying") if axes else a

    return jax.tree.map(vary, tree)


def _products(a: str, x: Array, y: Array, dtype: Any) -> Array:
    return jnp.einsum(a, x, y, preferred_element_type=dtype)


def _seen(static: _Static, block: Problem, i: Array, j: Array) -> Array | None:
    """Which keys each query of a block sees; padding neither sees nor is seen."""
    found = _scores.seen(static.options, block)
    rows = (i, static.rows, static.queries, (-1, 1))
    cols = (j, static.cols, static.keys, (1, -1))
    for number, size, count, shape in (rows, cols):
        if count % size:
            token = number * size + jnp.arange(size, dtype=jnp.int32)
            real = (token < count).reshape(shape)
            found = real if found is None else found & real
    return found


def _rows_forward(
    static: _Static, i: Array, part: Problem
) -> tuple[Array, Denominator]:
    """The result of one block of queries, and what its softmax divides by."""
    options, dtype = static.options, _scores.wide_dtype(part)
    shape = part.q.shape[:4]
    top, total = jnp.full(shape, _scores.lowest(dtype)), jnp.zeros(shape, dtype)
    if part.sink is not None:
        sink = part.sink.astype(dtype)[:, :, None]
        top = jnp.maximum(top, sink)
        total = jnp.exp(sink - top)
    acc = jnp.zeros((*shape, part.v.shape[-1]), dtype)

    def body(j: Array, carry: tuple[Array, Array, Array]):
        top, total, acc = carry
        block = _col_block(static, part, j)
        found = _seen(static, block, i, j)
        products = _products("bkgth,bksh->bkgts", block.q, block.k, dtype)
        scores = _scores.hide(block, found, _scores.modify(options, block, products))
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        p = _scores.shown(found, jnp.exp(scores - higher[..., None]))
        shrink = jnp.exp(top - higher)
        total = total * shrink + jnp.sum(p, axis=-1)
        p = _scores.drop(options, _scores.kept(options, block), p)
        more = _products("bkgts,bksh->bkgth", p.astype(block.v.dtype), block.v, dtype)
        return higher, total, acc * shrink[..., None] + more

    carry = _vary(static, (top, total, acc))
    top, total, acc = _each_key_block(static, part, i, body, carry)
    below = Denominator(top, total)
    return (acc / below.divisor[..., None]).astype(part.q.dtype), below


def _attend_bwd(static: _Static, res: tuple, cotangents: tuple[Array, Array]):
    given, o, below = res
    dtype = _scores.wide_dtype(given)
    do, dlse = cotangents
    axes = tuple(sorted({*static.axes, *jax.typeof(do).mat.varying}))
    static = static._replace(axes=axes)
    # What varied less would be summed over the devices in every block.
    problem = _vary(static, given)
    none = below.none
    do = jnp.where(none[..., None], jnp.zeros((), do.dtype), do)
    zero = jnp.zeros((), dtype)
    delta = jnp.sum(do.astype(dtype) * o.astype(dtype), axis=-1) - dlse
    rows = (do, below, jnp.where(none, zero, delta))
    args, _ = floats(problem.score_mod_args)
    like = (problem.k, problem.v, problem.addends, problem.slopes, args)
    wide = jax.tree.map(lambda a: jnp.zeros(a.shape, dtype), like)
    sums = _vary(static, Sums(*wide))

    def one(sums: Sums, i: Array) -> tuple[Sums, Array]:
        change = blocks.cut(i * static.rows, static.rows)
        part = jax.tree.map(lambda a: change(a, 3), rows)
        return _rows_backward(static, i, _row_block(static, problem, i), part, sums)

    count = _count(problem, static)[0]
    if count == 1:
        sums, dq = one(sums, jnp.int32(0))
    else:
        sums, dq = lax.scan(one, sums, jnp.arange(count, dtype=jnp.int32))
        dq = _joined(dq)
    dsink = sink_gradient(problem, below, rows[2])
    return (cotangent(given, sums, dq, dsink),)


def _rows_backward(static: _Static, i: Array, part: Problem, rows: tuple, sums: Sums):
    """Adds what one block of queries gives to the sums; returns its dq too."""
    dtype = _scores.wide_dtype(part)

    def body(j: Array, carry: tuple[Array, Sums]) -> tuple[Array, Sums]:
        dq, sums = carry
        block = _col_block(static, part, j)
        found = _seen(static, block, i, j)
        ds, dv, pulled = _block_backward(static.options, block, found, rows)
        ds = ds.astype(block.q.dtype)
        dk = _products("bkgts,bkgth->bksh", ds, block.q, dtype)
        dq = dq + _products("bkgts,bksh->bkgth", ds, block.k, dtype)
        starts = {2: j * static.cols, 3: i * static.rows, 4: j * static.cols}
        addends, slopes, args = pulled
        pairs = zip(sums.addends, addends, strict=True)
        return dq, Sums(
            _add_at(sums.k, dk, starts, (2,)),
            _add_at(sums.v, dv, starts, (2,)),
            tuple(_add_at(a, g, starts, (3, 4)) for a, g in pairs),
            jax.tree.map(add, sums.slopes, slopes),
            jax.tree.map(add, sums.args, args),
        )

    dq = _vary(static, jnp.zeros(part.q.shape, dtype))
    dq, sums = _each_key_block(static, part, i, body, (dq, sums))
    return sums, dq.astype(part.q.dtype)


def _block_backward(options: Options, block: Problem, found: Array | None, rows: tuple):
    """Gradients of the products q . k, of v, and of what changes the scores."""
    dtype = _scores.wide_dtype(block)
    do, below, delta = rows
    products = _products("bkgth,bksh->bkgts", block.q, block.k, dtype)
    scores, pull = modified(options, block, products)
    keep = _scores.kept(options, block)
    p = below.weights(_scores.hide(block, found, scores))
    p = _scores.shown(found, p)
    dropped = _scores.drop(options, keep, p).astype(do.dtype)
    dv = _products("bkgts,bkgth->bksh", dropped, do, dtype)
    dp = _products("bkgth,bksh->bkgts", do, block.v, dtype)
    ds = p * (_scores.drop(options, keep, dp) - delta[..., None])
    ds = _scores.shown(found, ds)  # 0 * NaN of a query that saw one
    dproducts, *others = pull(ds)
    return dproducts, dv, others


def _add_at(total: Array, part: Array, starts: dict[int, Array], axes: tuple) -> Array:
    """Adds a block to its place; dims that it shares start at 0."""
    begin = [
        starts[d] if d in axes and total.shape[d] > 1 else jnp.int32(0)
        for d in range(total.ndim)
    ]
    old = lax.dynamic_slice(total, begin, part.shape)
    return lax.dynamic_update_slice(total, old + part.astype(total.dtype), begin)


_attend.defvjp(_attend_fwd, _attend_bwd)
