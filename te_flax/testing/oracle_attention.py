"""Attention and its gradients in float64 numpy, and the error bounds of both."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from te_flax.testing.numerics import UNIT, output_rounding


class Result(NamedTuple):
    """Values or bounds of one call, heads first.

    Attributes:
        o: ``[B, N, T, Hv]``.
        lse: ``[B, N, T]``.
        dq: ``[B, N, T, H]``.
        dk: ``[B, K, S, H]``.
        dv: ``[B, K, S, Hv]``.
        ds: ``[B, N, T, S]``, of what is added to the scores.
        dsink: ``[N]``.
    """

    o: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    ds: np.ndarray
    dsink: np.ndarray


class Inputs(NamedTuple):
    """Of one call, in float64, heads first.

    Attributes:
        q: ``[B, N, T, H]``.
        k: ``[B, K, S, H]``.
        v: ``[B, K, S, Hv]``.
        do: cotangent of o.
        dlse: cotangent of the log-sum-exp.
        seen: bool ``[B, N, T, S]``.
        added: ``[B, N, T, S]``, bias and the like.
        scale: factor of q . k.
        sink: ``[N]``, -inf for none.
        kept: ``[B, N, T, S]``, 0 or the factor of what dropout keeps.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    dlse: np.ndarray
    seen: np.ndarray
    added: np.ndarray
    scale: float
    sink: np.ndarray
    kept: np.ndarray


class _Parts(NamedTuple):
    """What values and bounds both need, keys and values repeated to N heads."""

    k: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    p: np.ndarray
    p_sink: np.ndarray
    dp: np.ndarray
    delta: np.ndarray


def _per_query_head(a: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(a, heads // a.shape[1], axis=1)


def _per_key_head(a: np.ndarray, kv_heads: int) -> np.ndarray:
    b, n, *rest = a.shape
    return a.reshape(b, kv_heads, n // kv_heads, *rest).sum(2)


def _evaluate(x: Inputs) -> tuple[Result, _Parts]:
    heads, kv_heads = x.q.shape[1], x.k.shape[1]
    k, v = (_per_query_head(a, heads) for a in (x.k, x.v))
    scores = x.scale * np.einsum("bnth,bnsh->bnts", x.q, k) + x.added
    scores = np.where(x.seen, scores, -np.inf)
    sink = x.sink[:, None]
    top = np.maximum(scores.max(-1, initial=-np.inf), sink)
    safe = np.where(np.isinf(top), 0.0, top)
    e = np.exp(scores - safe[..., None])
    total = e.sum(-1) + np.exp(sink - safe)
    none = total == 0
    total = np.where(none, 1.0, total)
    p, p_sink = e / total[..., None], np.exp(sink - safe) / total
    lse = np.where(none, -np.inf, safe + np.log(total))
    o = np.einsum("bnts,bnsh->bnth", p * x.kept, v)
    dp = np.einsum("bnth,bnsh->bnts", x.do, v) * x.kept
    delta = (x.do * o).sum(-1) - np.where(none, 0, x.dlse)
    ds = p * (dp - delta[..., None])
    dq = x.scale * np.einsum("bnts,bnsh->bnth", ds, k)
    dk = x.scale * np.einsum("bnts,bnth->bnsh", ds, x.q)
    dv = np.einsum("bnts,bnth->bnsh", p * x.kept, x.do)
    dk, dv = (_per_key_head(a, kv_heads) for a in (dk, dv))
    dsink = -(p_sink * delta).sum((0, 2))
    parts = _Parts(k, v, scores, p, p_sink, dp, delta)
    return Result(o, lse, dq, dk, dv, ds, dsink), parts


def attention(x: Inputs) -> Result:
    """Computes ``o = (kept p) . v``, ``p = softmax(scale q . k + added)``.

    Args:
        x: operands and cotangents.

    Returns:
        Results and gradients in float64.
    """
    return _evaluate(x)[0]


def attention_bounds(
    x: Inputs,
    dtype: np.dtype,
    *,
    blocks: int = 1,
    operands: np.dtype | None = None,
    fused: bool = False,
) -> Result:
    """Bounds what an implementation with float32 sums may err by, to first order.

    In units of u = 2^-24. A score sums H products, times the scale, and up to three
    addends: ``e = (H + 5) u size``. An exponential errs by 4 u, and by the rounding of
    its argument, at most the range R of the row's scores; a block of keys rescales what
    came before: ``d = e + max e + (S + 8 blocks + 4 R + |lse| + 8) u`` relative in p.
    A product then adds its own sum's roundings, and those of p and ds where they are
    rounded to ``operands``. ds = p (dp - delta), where delta is do . o of the rounded
    o, or the sum of p dp: both are counted. A fused kernel rounds ds times the scale,
    and dk and dv of each query head before those that share a key are added.

    Args:
        x: operands and cotangents.
        dtype: of the results.
        blocks: blocks of keys.
        operands: dtype of p and ds in products; None for float32.
        fused: whether a fused kernel rounds to ``operands`` in between, too.

    Returns:
        The bound of every element of :func:`attention`'s results.
    """
    exact, parts = _evaluate(x)
    t, s, h, hv = *exact.ds.shape[2:], x.q.shape[-1], x.v.shape[-1]
    kv_heads, group = x.k.shape[1], x.q.shape[1] // x.k.shape[1]
    k, v, q, do = (np.abs(a) for a in (parts.k, parts.v, x.q, x.do))
    size = abs(x.scale) * np.einsum("bnth,bnsh->bnts", q, k) + np.abs(x.added)
    e = np.where(x.seen, (h + 5) * UNIT * size, 0)
    finite = np.where(np.isfinite(exact.lse), exact.lse, 0)
    span = np.where(x.seen, np.abs(parts.scores - finite[..., None]), 0)
    worst, reach = e.max(-1, initial=0), span.max(-1, initial=0)
    steps = s + 8 * blocks + 4 * reach + np.abs(finite) + 8
    d = np.expm1(e + (worst + steps * UNIT)[..., None])
    p = parts.p * x.kept
    unit, tiny = 0.0, 2.0**-126
    if operands is not None:
        unit = float(ml_dtypes.finfo(operands).eps) / 2
        tiny = max(tiny, float(ml_dtypes.finfo(operands).smallest_subnormal) / 2)

    def product(axes: str, a, a_error, b, count: int, exact, factor: float = 1.0):
        """Of a . b, where a errs by a_error and is rounded for the product."""
        shares = 1 + (fused and axes.endswith("bnsh") and group > 1)
        held = np.einsum(axes, a_error + (shares * unit + count * UNIT) * a, b)
        least = tiny / abs(factor) if fused else tiny
        held = factor * (held + least * np.einsum(axes, np.ones_like(a), b))
        if axes.endswith("bnsh"):
            held = _per_key_head(held, kv_heads)
        return held + output_rounding(exact, held, dtype) + UNIT * np.abs(exact)

    o = product("bnts,bnsh->bnth", p, p * d, v, s + 3, exact.o)
    lse = worst + steps * UNIT
    dv = product("bnts,bnth->bnsh", p, p * d, do, group * t + 3, exact.dv)
    dp = np.einsum("bnth,bnsh->bnts", do, v) * x.kept
    dp_error = (hv + 2) * UNIT * dp
    delta = (do * o).sum(-1) + (hv + 2) * UNIT * (do * np.abs(exact.o)).sum(-1)
    delta += (parts.p * (dp * (d + s * UNIT) + dp_error)).sum(-1)
    delta += UNIT * np.abs(x.dlse)
    ends = np.abs(parts.dp) + np.abs(parts.delta)[..., None]
    ds = parts.p * ((d + 3 * UNIT) * ends + dp_error + delta[..., None])
    both = np.abs(exact.ds)
    scale = abs(x.scale)
    dq = product("bnts,bnsh->bnth", both, ds, k, s + 4, exact.dq, scale)
    dk = product("bnts,bnth->bnsh", both, ds, q, group * t + 4, exact.dk, scale)
    sink = parts.p_sink * (np.abs(parts.delta) * (lse + 9 * UNIT) + delta)
    terms = (parts.p_sink * np.abs(parts.delta)).sum((0, 2)) * t * len(x.q) * UNIT
    return Result(o, lse, dq, dk, dv, ds, sink.sum((0, 2)) + terms)


def summed(a: ArrayLike, like: tuple[int, ...]) -> np.ndarray:
    """Sums ``[B, N, T, S]`` over the dims that an array of shape ``like`` shares.

    Example:
        >>> float(summed(np.ones((2, 3, 4, 5)), (3, 1, 5))[0, 0, 0])
        8.0
    """
    a = np.asarray(a)
    shape = (1,) * (4 - len(like)) + tuple(like)
    axes = tuple(i for i in range(4) if shape[i] == 1)
    return a.sum(axes, keepdims=True).reshape(like)
