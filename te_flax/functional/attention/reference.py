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
    p, lse, none = softmax(options, problem, _scores.modify(options, problem, products))
    p = _scores.drop(options, _scores.kept(options, problem), p)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v)
    # Keeps a cotangent of NaN out of the products.
    o = jnp.where(none[..., None], jnp.zeros((), dtype), o)
    return o.astype(problem.q.dtype), lse


def softmax(
    options: Options, problem: Problem, scores: Array
) -> tuple[Array, Array, Array]:
    """Probabilities, log-sum-exp, and which queries see nothing.

    Args:
        options: the static part of the call.
        problem: the arrays.
        scores: before any is hidden.
    """
    dtype = scores.dtype
    found = _scores.seen(options, problem)
    scores = _scores.hide(problem, found, scores)
    top = jnp.max(scores, axis=-1, initial=_scores.lowest(dtype))
    sink = None
    if problem.sink is not None:
        sink = problem.sink.astype(dtype)[:, :, None]
        top = jnp.maximum(top, sink)
    top = lax.stop_gradient(top)
    p = _scores.shown(found, jnp.exp(scores - top[..., None]))
    total = jnp.sum(p, axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    none, safe, lse = log_sum(total, top)
    # 0 / NaN of a query that saw one.
    return _scores.shown(found, p / safe[..., None]), lse, none


def log_sum(total: Array, top: Array) -> tuple[Array, Array, Array]:
    """From sums of ``exp(score - top)``: which are empty, a divisor, the logarithm."""
    none = total == 0
    safe = jnp.where(none, jnp.ones((), total.dtype), total)
    return none, safe, jnp.where(none, -jnp.inf, top + jnp.log(safe))
