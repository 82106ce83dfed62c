"""Which query sees which key, from positions and segments instead of a matrix.

Every kind of mask that has a structure (causal, window, lengths, packed segments)
comes down to two numbers a token: a position and a segment. A query sees a key of its
own segment whose position lies in its window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention.options import Band, Operands, Options, Sizes
from te_flax.typing import Array


class Side(NamedTuple):
    """The tokens of the queries, or those of the keys.

    Attributes:
        index: int32 ``[T]``, where the tokens lie in their array.
        positions: int32 ``[B|1, T]``; None where nothing depends on them.
        segments: int32 ``[B|1, T]``, 0 for padding; None where all are one.
    """

    index: Array
    positions: Array | None = None
    segments: Array | None = None


def sides(options: Options, operands: Operands, sizes: Sizes) -> tuple[Side, Side]:
    """The tokens of the queries and of the keys."""
    counts = (sizes.queries, sizes.keys)
    index: Any = tuple(jnp.arange(n, dtype=jnp.int32) for n in counts)
    given: Any = operands.positions or (None, None)
    segments: Any = (None, None)
    shift: Any = sizes.keys - sizes.queries
    if operands.segment_ids is not None:
        segments = operands.segment_ids
        if operands.positions is None:
            given = tuple(map(_local, segments))
        shift = _count_difference(
            segments[0], segments[1], options.max_segments or max(counts)
        )
    elif operands.q_seqlen is not None or operands.kv_seqlen is not None:
        segments, local, shift = _from_lengths(operands, index)
        given = given if operands.positions is not None else local
    pairs = zip(index, given, strict=True)
    rows, cols = (i[None] if p is None else p for i, p in pairs)
    if options.bottom_right:
        rows = rows + shift
    banded = options.left is not None or options.right is not None
    if not banded and operands.alibi_slopes is None:
        rows = cols = None
    return Side(index[0], rows, segments[0]), Side(index[1], cols, segments[1])


def band(options: Options, operands: Operands, sizes: Sizes) -> Band:
    """Between which numbers "key less query" must lie, where shapes alone say it."""
    lengths = (operands.q_seqlen, operands.kv_seqlen)
    given = [n for n in lengths if n is not None]
    moved = operands.segment_ids is not None or operands.positions is not None
    if moved or any(n.ndim == 2 for n in given) or (given and options.bottom_right):
        return None, None
    shift = sizes.keys - sizes.queries if options.bottom_right else 0
    low = None if options.left is None else shift - options.left
    return low, None if options.right is None else shift + options.right


def allowed(options: Options, rows: Side, cols: Side) -> Array | None:
    """Which keys each query sees: bool ``[B|1, T, S]``, None where all see all."""
    seen = None
    if rows.segments is not None and cols.segments is not None:
        own, other = rows.segments[:, :, None], cols.segments[:, None, :]
        seen = (own == other) & (own > 0)
    if options.left is None and options.right is None:
        return seen
    ahead = distance(rows, cols)
    if options.right is not None:
        near = ahead <= options.right
        seen = near if seen is None else seen & near
    if options.left is not None:
        near = ahead >= -options.left
        seen = near if seen is None else seen & near
    return seen


def distance(rows: Side, cols: Side) -> Array:
    """How far a key lies ahead of a query: int32 ``[B|1, T, S]``."""
    row, col = jnp.asarray(rows.positions), jnp.asarray(cols.positions)
    return col[:, None, :] - row[:, :, None]


def _local(segments: Array) -> Array:
    """Positions from the start of each run of one segment id."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start = jnp.where(segments != before, index, jnp.int32(0))
    return index - lax.cummax(start, axis=1)


def _count_difference(q: Array, kv: Array, count: int) -> Array:
    """Keys less queries of the segment of every query: ``[B, T]``."""

    def tokens(segments: Array) -> Array:
        zeros = jnp.zeros(count + 1, jnp.int32)
        return zeros.at[segments].add(jnp.int32(1), mode="drop")

    more = jax.vmap(tokens)(kv) - jax.vmap(tokens)(q)
    return jnp.take_along_axis(more, jnp.minimum(q, jnp.int32(count)), axis=1)


def _from_lengths(operands: Operands, index: tuple[Array, ...]):
    """Segments and local positions of both sides, and keys less queries a token."""
    given = (operands.q_seqlen, operands.kv_seqlen)
    pairs = list(zip(given, index, strict=True))
    lengths = [jnp.full(1, i.shape[0]) if n is None else n for n, i in pairs]
    lengths = [n.astype(jnp.int32) for n in lengths]
    if lengths[0].ndim == lengths[1].ndim == 1:
        segments = tuple(map(_prefix, lengths, index))
        return segments, (None, None), (lengths[1] - lengths[0])[:, None]
    offsets = operands.offsets or (None, None)
    packed = [_packed(*side) for side in zip(lengths, offsets, index, strict=True)]
    (q, q_local), (kv, kv_local) = packed
    more = jnp.maximum(lengths[1], 0) - jnp.maximum(lengths[0], 0)
    more = jnp.pad(more, ((0, 0), (1, 0)))
    return (q, kv), (q_local, kv_local), jnp.take_along_axis(more, q, axis=1)


def _prefix(length: Array, index: Array) -> Array:
    """Segment 1 up to the length, then padding."""
    return (index < length[:, None]).astype(jnp.int32)


def _packed(lengths: Array, offsets: Array | None, index: Array) -> tuple[Array, Array]:
    """Segments from lengths ``[B, M]``, -1 where there is none, and their starts."""
    count = jnp.maximum(lengths, 0)
    if offsets is None:
        start = jnp.cumsum(count, axis=1, dtype=jnp.int32) - count
    else:
        start = offsets[:, :-1]
    local = index[None, None, :] - start[:, :, None]
    inside = (local >= 0) & (local < count[:, :, None]) & (start >= 0)[:, :, None]
    number = jnp.arange(1, lengths.shape[1] + 1, dtype=jnp.int32)
    segments = jnp.max(jnp.where(inside, number[:, None], 0), axis=1, initial=0)
    positions = jnp.max(jnp.where(inside, local, 0), axis=1, initial=0)
    return segments, positions
