"""Blocks of queries and keys out of a Problem."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention.problem import Problem
from te_flax.functional.attention.structure import Side
from te_flax.typing import Array

BLOCK = 512  # scores of one example and head: 1 MiB
Change = Callable[[Array, int], Array]  # (array, axis of its tokens)


def block_size(count: int) -> int:
    """At most BLOCK tokens, so that few are missing in the last block."""
    blocks = max(1, -(-count // BLOCK))
    return max(1, -(-count // blocks))


def rows(problem: Problem, change: Change) -> Problem:
    """Changes every array along the queries."""
    return problem._replace(
        q=change(problem.q, 3),
        addends=_matrices(problem.addends, change, 3),
        masks=_matrices(problem.masks, change, 3),
        rows=_side(problem.rows, change),
        row_poison=_some(problem.row_poison, change, 3),
    )


def cols(problem: Problem, change: Change) -> Problem:
    """Changes every array along the keys."""
    return problem._replace(
        k=change(problem.k, 2),
        v=change(problem.v, 2),
        addends=_matrices(problem.addends, change, 4),
        masks=_matrices(problem.masks, change, 4),
        cols=_side(problem.cols, change),
        col_poison=_some(problem.col_poison, change, 2),
    )


def cut(start: Array, size: int) -> Change:
    """Takes ``size`` tokens from ``start`` on."""

    def change(a: Array, axis: int) -> Array:
        if a.shape[axis] == size:
            return a
        return lax.dynamic_slice_in_dim(a, start, size, axis)

    return change


def padded(size: int) -> Change:
    """Repeats the last token up to ``size``.

    A function of the scores so meets none that the call does not have.
    """

    def change(a: Array, axis: int) -> Array:
        widths = [(0, size - n if i == axis else 0) for i, n in enumerate(a.shape)]
        return jnp.pad(a, widths, mode="edge")

    return change


def _matrices(arrays: tuple[Array, ...], change: Change, axis: int):
    return tuple(change(a, axis) if a.shape[axis] > 1 else a for a in arrays)


def _side(side: Side, change: Change) -> Side:
    return Side(
        change(side.index, 0),
        _some(side.positions, change, 1),
        _some(side.segments, change, 1),
    )


def _some(a: Array | None, change: Change, axis: int) -> Array | None:
    return None if a is None else change(a, axis)
