"""What the backward passes that are written by hand have in common."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_flax.functional.attention import scores as _scores
from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem
from te_flax.functional.attention.reference import Denominator
from te_flax.ops._op import cotangent_like
from te_flax.typing import Array


class Sums(NamedTuple):
    """Gradients of k, v and what changes the scores, in the wide dtype."""

    k: Array
    v: Array
    addends: tuple[Array, ...]
    slopes: Array | None
    args: list[Array]


def modified(
    options: Options, block: Problem, products: Array
) -> tuple[Array, Callable[[Array], tuple]]:
    """The scores, and what pulls their cotangent back.

    Args:
        options: of the call.
        block: queries and keys.
        products: q . k.

    Returns:
        Scores as of :func:`te_flax.functional.attention.scores.modify`; a function to
        cotangents of the products, the addends, the slopes and the floats among
        score_mod_args.
    """
    args, rebuild = floats(block.score_mod_args)

    def modify(products: Array, addends: Any, slopes: Any, args: Any) -> Array:
        given = block._replace(
            addends=addends, slopes=slopes, score_mod_args=rebuild(args)
        )
        return _scores.modify(options, given, products)

    return jax.vjp(modify, products, block.addends, block.slopes, args)


def sink_gradient(problem: Problem, below: Denominator, delta: Array) -> Array | None:
    """The sink's probability times what its score changes: ``-p delta``."""
    if problem.sink is None:
        return None
    sink = problem.sink.astype(delta.dtype)[:, :, None, None]
    p = jnp.where(below.none, jnp.zeros((), delta.dtype), below.weights(sink)[..., 0])
    return -jnp.sum(p * delta, axis=(0, 3))


def floats(tree: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """The differentiable leaves of a tree, and how to put it together again."""
    leaves, structure = jax.tree.flatten(tree)
    real = [jnp.issubdtype(jnp.result_type(a), jnp.floating) for a in leaves]

    def rebuild(floats: list[Array]) -> Any:
        rest = iter(floats)
        pairs = zip(leaves, real, strict=True)
        return jax.tree.unflatten(structure, [next(rest) if f else a for a, f in pairs])

    return [a for a, f in zip(leaves, real, strict=True) if f], rebuild


def cotangent(problem: Problem, sums: Sums, dq: Array, dsink: Array | None) -> Any:
    """Of the whole Problem, each array with the type of its primal."""
    _, rebuild = floats(problem.score_mod_args)
    none: Any = None  # a cotangent of zeros
    made = Problem(*[none] * len(Problem._fields))
    like: Any = cotangent_like
    primals, _ = floats(problem.score_mod_args)
    args = [like(g, a) for g, a in zip(sums.args, primals, strict=True)]
    pairs = zip(sums.addends, problem.addends, strict=True)
    return made._replace(
        q=like(dq, problem.q),
        k=like(sums.k, problem.k),
        v=like(sums.v, problem.v),
        addends=tuple(like(g, a) for g, a in pairs),
        slopes=None if sums.slopes is None else like(sums.slopes, problem.slopes),
        sink=None if dsink is None else like(dsink, problem.sink),
        score_mod_args=_without_integers(rebuild, args, problem.score_mod_args),
    )


def _without_integers(rebuild: Callable, args: list[Array], given: Any) -> Any:
    made = rebuild(args)
    return jax.tree.map(
        lambda g, a: g if jnp.issubdtype(jnp.result_type(a), jnp.floating) else None,
        made,
        given,
    )
