"""The definition: every option, the whole matrix of scores, JAX's own derivative."""

import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention import scores as _scores
from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem
from te_flax.typing import Array


def attend(options: Options, problem: Problem) -> tuple[Array, Array]:
    """Computes ``o = dropout(softmax(scores)) . v`` in float32 or float64.

    Returns:
        o ``[B, K, G, T, Hv]`` in q's dtype, and log-sum-exp ``[B, K, G, T]``, -inf
        where a query sees nothing.
    """
    dtype = _scores.wide_dtype(problem)
    q, k, v = (a.astype(dtype) for a in problem[:3])
    products = jnp.einsum("bkgth,bksh->bkgts", q, k)
    found = _scores.seen(options, problem)
    scores = _scores.modify(options, problem, products)
    scores = _scores.hide(problem, found, scores)
    top = jnp.max(scores, axis=-1, initial=_scores.lowest(dtype))
    sink = None
    if problem.sink is not None:
        sink = problem.sink.astype(dtype)[:, :, None]
        top = jnp.maximum(top, sink)
    top = lax.stop_gradient(top)
    p = jnp.exp(scores - top[..., None])
    if found is not None:
        p = jnp.where(found, p, jnp.zeros((), dtype))
    total = jnp.sum(p, axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    p = _scores.drop(options, _scores.kept(options, problem), p)
    return finish(jnp.einsum("bkgts,bksh->bkgth", p, v), total, top, problem)


def finish(
    acc: Array, total: Array, top: Array, problem: Problem
) -> tuple[Array, Array]:
    """The result from sums of ``exp(score - top)``."""
    none = total == 0
    safe = jnp.where(none, jnp.ones((), total.dtype), total)
    o = (acc / safe[..., None]).astype(problem.q.dtype)
    lse = jnp.where(none, -jnp.inf, top + jnp.log(safe))
    return o, lse
