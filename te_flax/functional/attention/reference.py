"""The definition: every option, the whole matrix of scores, JAX's own derivative."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention import scores as _scores
from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem
from te_flax.typing import Array


class Denominator(NamedTuple):
    """What the softmax of each query divides by: ``exp(top) total``.

    The backward passes take both numbers: the log-sum-exp is off by a rounding of
    ``top``, which swallows ``log(total)`` where all scores are very low.

    Attributes:
        top: the largest score, ``[B, K, G, T]``.
        total: sum of ``exp(score - top)``.
    """

    top: Array
    total: Array

    @property
    def none(self) -> Array:
        """Which queries see nothing."""
        return self.total == 0

    @property
    def divisor(self) -> Array:
        """The sum, or 1 where it is empty."""
        return jnp.where(self.none, jnp.ones((), self.total.dtype), self.total)

    @property
    def lse(self) -> Array:
        """The log-sum-exp, -inf where a query sees nothing."""
        return jnp.where(self.none, -jnp.inf, self.top + jnp.log(self.divisor))

    def weights(self, scores: Array) -> Array:
        """The probabilities of scores ``[B, K, G, T, S]``."""
        return jnp.exp(scores - self.top[..., None]) / self.divisor[..., None]


def attend(options: Options, problem: Problem) -> tuple[Array, Array]:
    """Computes ``o = dropout(softmax(scores)) . v`` in float32 or float64.

    Returns:
        o ``[B, K, G, T, Hv]`` in q's dtype, and log-sum-exp ``[B, K, G, T]``, -inf
        where a query sees nothing.
    """
    dtype = _scores.wide_dtype(problem)
    q, k, v = (a.astype(dtype) for a in problem[:3])
    products = jnp.einsum("bkgth,bksh->bkgts", q, k)
    p, below = softmax(options, problem, _scores.modify(options, problem, products))
    p = _scores.drop(options, _scores.kept(options, problem), p)
    o = jnp.einsum("bkgts,bksh->bkgth", p, v)
    # Keeps a cotangent of NaN out of the products.
    o = jnp.where(below.none[..., None], jnp.zeros((), dtype), o)
    return o.astype(problem.q.dtype), below.lse


def softmax(
    options: Options, problem: Problem, scores: Array
) -> tuple[Array, Denominator]:
    """Probabilities, and what they were divided by.

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
    below = Denominator(top, total)
    # 0 / NaN of a query that saw one.
    return _scores.shown(found, p / below.divisor[..., None]), below
