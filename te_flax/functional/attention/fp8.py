"""FP8 attention, emulated: every product takes FP8 codes and adds up in float32."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention import scores as _scores
from te_flax.functional.attention.gradients import (
    Sums,
    cotangent,
    modified,
    sink_gradient,
)
from te_flax.functional.attention.options import Options
from te_flax.functional.attention.problem import Problem
from te_flax.functional.attention.reference import softmax
from te_flax.ops._op import cotangent_like
from te_flax.quantize.mailbox import encode
from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.quantize.quantizer import Quantizer, Scale
from te_flax.quantize.statistics import Counts, count
from te_flax.typing import Array

FORWARD = ("q", "k", "v", "s", "o")
BACKWARD = ("do", "dp", "dq", "dk", "dv")
E4M3 = TensorQuantizer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How FP8 attention quantizes, in both passes.

    Attributes:
        forward: quantizer of q, k, v, of the probabilities s and of o.
        backward: of do, of the scores' gradient dp, and of dq, dk and dv; cuDNN's
            kernels need the format of ``forward``.
        amax_axes: manual mesh axes over which an amax is the maximum.
        report: whether the amaxes of the backward pass leave through the mailbox.
        impl: kernel rules of every op of both passes.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> q = jnp.ones((1, 8, 2, 16))
        >>> o, amaxes = te.dot_product_attention(q, q, q, fp8=te.AttentionConfig())
        >>> amaxes.shape, float(amaxes[0, 0])
        ((5, 2), 1.0)
    """

    forward: Quantizer = E4M3
    backward: Quantizer = E4M3
    amax_axes: tuple[str, ...] = ()
    report: bool = False
    impl: tuple | None = None


class AttentionState(NamedTuple):
    """The arrays beside the operands that FP8 attention asks for.

    Attributes:
        forward: scales of q, k, v, s and o, float32 ``[5]`` each; None measures them.
        backward: likewise of do, dp, dq, dk and dv.
        mailbox: float32 ``[5, 279]``; its cotangent carries the amaxes of do, dp, dq,
            dk and dv out of the backward pass when ``AttentionConfig.report``.
        record: float32 ``[5, 563]`` while statistics are recorded; its cotangent
            carries theirs, and the call returns those of the forward pass.

    Example:
        >>> AttentionState().mailbox is None
        True
    """

    forward: Scale | None = None
    backward: Scale | None = None
    mailbox: Array | None = None
    record: Array | None = None


class Static(NamedTuple):
    """The static argument of both passes.

    Attributes:
        options: of the call.
        config: quantizers.
        axes: mesh axes that a surrounding shard_map of ours has made manual.
    """

    options: Options
    config: AttentionConfig
    axes: tuple[str, ...]


class Codes(NamedTuple):
    """One quantized array.

    Attributes:
        data: the codes.
        scale_inv: the factor that undoes the scale.
        found: what was measured.
    """

    data: Array
    scale_inv: Array
    found: "Measured"

    @property
    def values(self) -> Array:
        """What the codes stand for, in float32."""
        return self.data.astype(jnp.float32) * self.scale_inv


class Measured(NamedTuple):
    """What is known of one array.

    Attributes:
        amax: as in :func:`te_flax.quantize.mailbox.encode`.
        counts: None unless statistics are recorded.
    """

    amax: Array
    counts: Counts | None


def attend(
    config: AttentionConfig,
    options: Options,
    axes: tuple[str, ...],
    problem: Problem,
    state: AttentionState,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """As :func:`te_flax.functional.attention.reference.attend`, with FP8 products.

    ``s = softmax(scale q . k)``, ``o = s . v``; backwards ``dv = s^T do``,
    ``dp = s (do . v - sum(do o))``, ``dq = scale dp . k``, ``dk = scale dp^T q``. All
    ten arrays are rounded to FP8 by their own scales.

    Args:
        config: quantizers.
        options: the static part of the call.
        axes: mesh axes that a surrounding shard_map of ours has made manual.
        problem: the arrays.
        state: scales and mailbox.

    Returns:
        o, log-sum-exp, and what was measured, as :func:`forward` returns it.
    """
    made: Any = _attend(Static(options, config, axes), problem, state)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, problem: Problem, state: AttentionState):
    return _attend_fwd(static, problem, state)[0]


def _attend_fwd(static: Static, problem: Problem, state: AttentionState):
    given = zip(FORWARD, (problem.q, problem.k, problem.v), strict=False)
    q, k, v = (quantize(static, state, name, a) for name, a in given)
    products = _product("bkgth,bksh->bkgts", q, k)
    scores = _scores.modify(static.options, problem, products)
    p, below = softmax(static.options, problem, scores)
    keep = _scores.kept(static.options, problem)
    s = quantize(static, state, "s", _scores.drop(static.options, keep, p))
    o = _product("bkgts,bksh->bkgth", s, v)
    o = quantize(
        static, state, "o", jnp.where(below.none[..., None], jnp.float32(0), o)
    )
    found = forward(state, [a.found for a in (q, k, v, s, o)])
    out = (o.values.astype(problem.q.dtype), below.lse, found)
    return out, (problem, state, q, k, v, o, below)


def _attend_bwd(static: Static, res: tuple, cotangents: tuple):
    problem, state, q, k, v, o, below = res
    options, (do, dlse, _) = static.options, cotangents
    none, zero = below.none, jnp.float32(0)
    do = jnp.where(none[..., None], jnp.zeros((), do.dtype), do)
    do = quantize(static, state, "do", do)
    delta = jnp.where(none, zero, jnp.sum(do.values * o.values, axis=-1) - dlse)
    products = _product("bkgth,bksh->bkgts", q, k)
    scores, pull = modified(options, problem, products)
    found, keep = _scores.seen(options, problem), _scores.kept(options, problem)
    p = below.weights(_scores.hide(problem, found, scores))
    p = _scores.shown(found, p)
    s = quantize(static, state, "s", _scores.drop(options, keep, p))
    dv = quantize(static, state, "dv", _product("bkgts,bkgth->bksh", s, do))
    ds = _scores.drop(options, keep, _product("bkgth,bksh->bkgts", do, v))
    ds = _scores.shown(found, p * (ds - delta[..., None]))
    dp = quantize(static, state, "dp", ds)
    dproducts, addends, slopes, args = pull(dp.values)
    dq = _times("bkgts,bksh->bkgth", dproducts, k)
    dk = _times("bkgts,bkgth->bksh", dproducts, q)
    dq, dk = (quantize(static, state, n, a) for n, a in (("dq", dq), ("dk", dk)))
    sums = Sums(dk.values, dv.values, addends, slopes, args)
    dsink = sink_gradient(problem, below, delta)
    mail = backward(static, state, [a.found for a in (do, dp, dq, dk, dv)])
    return cotangent(problem, sums, dq.values, dsink), mail


_attend.defvjp(_attend_fwd, _attend_bwd)


def quantize(static: Static, state: AttentionState, name: str, x: Array) -> Codes:
    """Rounds one of the ten arrays to FP8."""
    first = name in FORWARD
    names = FORWARD if first else BACKWARD
    quantizer = static.config.forward if first else static.config.backward
    known = state.forward if first else state.backward
    axes, impl = (*static.config.amax_axes, *static.axes), static.config.impl
    made = quantizer(
        x,
        k_ndim=1,
        rowwise=True,
        colwise=False,
        scale=None if known is None else Scale(*(a[names.index(name)] for a in known)),
        amax_axes=axes,
        impl=impl,
    )
    copy: Any = made.rowwise
    amax: Any = made.amax
    counts = None if state.record is None else count(x, copy, axes, impl)
    return Codes(copy.data, copy.scale, Measured(amax, counts))


def _product(axes: str, a: Codes, b: Codes) -> Array:
    """Of codes, then both scales one after the other: their product may overflow."""
    return _times(axes, a.data.astype(jnp.float32), b) * a.scale_inv


def _times(axes: str, a: Array, b: Codes) -> Array:
    return jnp.einsum(axes, a, b.data.astype(jnp.float32)) * b.scale_inv


def forward(state: AttentionState, found: list[Measured]) -> tuple[Array, ...]:
    """What the call returns of q, k, v, s and o.

    Returns:
        Their amaxes, float32 ``[5, 2]``, and where the state has a record their
        statistics, float32 ``[5, 5]``.
    """
    amaxes = jnp.stack([a.amax for a in found])
    rows = [a.counts.statistics().row() for a in found if a.counts is not None]
    return (amaxes,) if state.record is None else (amaxes, jnp.stack(rows))


def backward(
    static: Static, state: AttentionState, found: list[Measured]
) -> AttentionState:
    """The cotangent of the state: what it carries of do, dp, dq, dk and dv."""
    nothing: Any = None  # a cotangent of zeros
    mailbox = record = nothing
    if state.mailbox is not None:
        letter = jnp.zeros_like(state.mailbox)
        if static.config.report:
            letter = encode(jnp.stack([a.amax for a in found]))
        mailbox = _shared(static, letter, state.mailbox)
    if state.record is not None:
        letters = [a.counts.mail() for a in found if a.counts is not None]
        record = _shared(static, jnp.stack(letters), state.record)
    return AttentionState(nothing, nothing, mailbox, record)


def _shared(static: Static, letter: Array, like: Array) -> Array:
    """A shard_map of ours adds up the letters of its devices."""
    for axis in static.axes:
        letter = letter / lax.axis_size(axis)
    return cotangent_like(letter, like)
