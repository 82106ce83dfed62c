"""Attention by cuDNN's fused kernels, through XLA's custom calls."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.functional.attention import chunked
from te_flax.functional.attention.options import Operands, Options, sizes_of
from te_flax.functional.attention.problem import Problem, pose
from te_flax.functional.attention.scores import lowest, seen
from te_flax.functional.attention.structure import packed_side
from te_flax.ops._op import cotangent_like
from te_flax.ops.attention import Kind, backward, forward
from te_flax.typing import Array

# Hides a key: what jax.nn takes, as cuDNN is known to go wrong with lower numbers.
_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
# The least bias beside a mask, so that what is seen beats what is hidden. The kernel's
# float32 log-sum-exp next to it is exact to 2^-8.
_LEAST = {"bfloat16": -(2.0**16), "float16": -(2.0**14)}


class _Static(NamedTuple):
    """The static argument of both passes.

    Attributes:
        kind: which operands the call has.
        attrs: of the ops.
    """

    kind: Kind
    attrs: tuple[tuple[str, Any], ...]


class _Given(NamedTuple):
    """The arrays of one call.

    Attributes:
        q: ``[B, T, K, G, H]``.
        k: ``[B, S, K, H]``.
        v: ``[B, S, K, Hv]``.
        bias: ``([B,] [K, G,] T, S)`` or None.
        tokens: int32, lengths and starts as the ops take them.
        written: bool ``[B, T]`` and ``[B, S]``, which tokens lie in a segment; None
            where the kernel writes all.
        blind: bool ``[B|1, K|1, G|1, T]``, queries of which a mask hides every key;
            None without masks.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    tokens: tuple[Array, ...]
    written: tuple[Array, Array] | None
    blind: Array | None


def attend(
    options: Options, operands: Operands, batch: Array, heads: Array
) -> tuple[Array, Array]:
    """Computes attention on one device, or on an Auto mesh.

    Args:
        options: the static part.
        operands: the arrays.
        batch: int32 ``[B]``, the examples' numbers in the whole call.
        heads: int32 ``[N]``, likewise of the heads.

    Returns:
        o in the user's layout, and log-sum-exp ``[B, N, T]``.
    """
    added = operands.bias is not None or operands.mask is not None
    problem = None
    if added or options.return_residual:
        problem = pose(options, operands, batch, heads)
    static, given = _prepare(options, operands, problem if added else None)
    made: Any = _attend(static, given)
    o, stats = made
    lse = _log_sum_exp(static, given, lax.stop_gradient(stats))
    if options.return_residual:
        lse = jnp.asarray(_residual(options, problem, lse))
    return laid(options.layout, o), lse.reshape(lse.shape[0], -1, lse.shape[-1])


def by_token(layout: str, a: Array) -> Array:
    """From the user's layout to ``[B, T, N, H]``."""
    return jnp.transpose(a, [layout.index(d) for d in "BTN"] + [3])


def grouped(q: Array, groups: int) -> Array:
    """From ``[B, T, N, H]`` to ``[B, T, K, G, H]``."""
    return q.reshape(*q.shape[:2], groups, -1, q.shape[-1])


def laid(layout: str, a: Array) -> Array:
    """From ``[B, T, ..., H]`` with the heads in one dim or two to the user's layout."""
    a = a.reshape(*a.shape[:2], -1, a.shape[-1])
    return jnp.transpose(a, ["BTN".index(d) for d in layout[:3]] + [3])


def _prepare(options: Options, operands: Operands, problem: Problem | None):
    """Both arguments of _attend; problem is None where nothing joins the scores."""
    sizes = sizes_of(options.layout, operands)
    q, k, v = (by_token(options.layout, a) for a in operands[:3])
    q = grouped(q, sizes.kv_heads)
    lengths, tokens, written = _tokens(options, operands, sizes)
    dims, bias, blind = "", None, None
    if problem is not None:
        problem = _hiding(problem)
        dims, bias = _bias(problem, q.dtype)
        if problem.masks:
            blind = ~jnp.any(jnp.asarray(seen(options, problem)), axis=-1)
    dbias = "dbias" if problem is not None and problem.addends else ""
    kind = Kind(dims, dbias, lengths)
    window = 0 if options.left is None else options.left + 1
    attrs = {
        "scale": options.scale,
        "causal": options.right == 0,
        "window": 0 if window >= max(sizes.queries, sizes.keys) else window,
        # The starts of packed segments count tokens whose heads lie side by side.
        "layout": "BTNH" if lengths == "packed" else f"{options.layout[:3]}H",
    }
    static = _Static(kind, tuple(attrs.items()))
    return static, _Given(q, k, v, bias, tokens, written, blind)


def _hiding(problem: Problem) -> Problem:
    """Beside a mask, a bias hides too where 'reference' gives it no probability."""
    if not problem.masks:
        return problem
    least = lowest(jnp.float32)
    shown = tuple(~(a.astype(jnp.float32) < least) for a in problem.addends)
    return problem._replace(masks=(*problem.masks, *shown))


def _bias(problem: Problem, dtype: Any) -> tuple[str, Array]:
    """What is added to the scores: which dims it has, ``([B,] [K, G,] T, S)``."""
    bias = jnp.zeros([1] * 5, dtype)
    if problem.addends:
        bias = functools.reduce(jnp.add, problem.addends)
    hidden, least = (jnp.asarray(d[dtype.name], dtype) for d in (_HIDDEN, _LEAST))
    if problem.masks:
        zero = bias - lax.stop_gradient(bias)  # passes the gradient on
        bias = jnp.where(bias < least, least + zero, bias)
    for mask in problem.masks:
        bias = jnp.where(mask, bias, hidden)
    b, groups, each = bias.shape[:3]
    examples, heads = b > 1, groups * each > 1
    shape = (problem.q.shape[3], problem.k.shape[2])
    if heads:
        shape = (*problem.q.shape[1:3], *shape)
    if examples:
        shape = (b, *shape)
    shared = (() if examples else (0,)) + (() if heads else (1, 2))
    dims = f"{'B' * examples}{'N' * heads}" or "shared"
    bias = jnp.squeeze(bias, shared)
    if bias.shape != shape:  # its gradient is summed in float32
        bias = jnp.broadcast_to(bias.astype(jnp.float32), shape).astype(dtype)
    return dims, bias


def _tokens(options: Options, operands: Operands, sizes: Any):
    """Lengths without the queries that see no key: the kernel writes zeros there."""
    counts: Any = (operands.q_seqlen, operands.kv_seqlen)
    full = (sizes.queries, sizes.keys)
    # The kernel has no window where queries outnumber keys, unless there are lengths.
    beyond = options.left is not None and full[0] > full[1]
    if counts == (None, None) and not beyond:
        return "", (), None
    like = next((a for a in counts if a is not None), jnp.zeros(sizes.batch))
    pairs = zip(counts, full, strict=True)
    q, kv = (
        jnp.full(like.shape, n, jnp.int32) if a is None else a.astype(jnp.int32)
        for a, n in pairs
    )
    q = jnp.where(kv <= 0, jnp.int32(0), q)
    if options.left is not None:
        q = jnp.minimum(q, kv + jnp.int32(options.left))
    kv = jnp.where(q <= 0, jnp.int32(0), kv)
    if q.ndim == 1:
        inside = None if options.left is None else _inside((q, kv), full)
        return "prefix", (q, kv), inside
    return "packed", *_packed(operands, (q, kv), full)


def _inside(counts: Any, full: tuple[int, int]) -> Any:
    """The tokens that have a length: under a window the kernel skips the others."""
    pairs = zip(counts, full, strict=True)
    return tuple(jnp.arange(n, dtype=jnp.int32) < c[:, None] for c, n in pairs)


def _packed(operands: Operands, counts: Any, full: tuple[int, int]):
    """Counts and starts of two segments or more, and which tokens lie in one."""
    offsets = operands.offsets or (None, None)
    starts, written = [], []
    for count, offset, n in zip(counts, offsets, full, strict=True):
        start, segments, _ = packed_side(count, offset, jnp.arange(n, dtype=jnp.int32))
        starts.append(start)
        written.append(segments > 0)
    tokens = [*counts, *starts]
    if counts[0].shape[1] == 1:  # one segment would not count as packed
        tokens = [jnp.pad(a, ((0, 0), (0, 1))) for a in tokens]
    return tuple(tokens), tuple(written)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, given: _Given) -> tuple[Array, Array]:
    """The result, and what the kernel's backward pass reads beside it."""
    bias = () if given.bias is None else (given.bias,)
    o, stats = forward(static.kind)(
        *given[:3], *bias, *given.tokens, impl=(), **dict(static.attrs)
    )
    o = _zeroed(given, o)
    if given.written is not None:
        o = _where(given.written[0], o)
    return o, stats


def _attend_fwd(static: _Static, given: _Given):
    made: Any = _attend(static, given)
    return made, (given, *made)


def _attend_bwd(static: _Static, res: tuple, cotangents: tuple[Array, Array]):
    given, o, stats = res
    # That of stats is zero: see _residual.
    do = _zeroed(given, cotangents[0])
    bias = () if given.bias is None else (given.bias,)
    dq, dk, dv, *dbias = backward(static.kind)(
        *given[:3], o, do, stats, *bias, *given.tokens, impl=(), **dict(static.attrs)
    )
    if given.written is not None:
        rows, cols = given.written
        dq, dk, dv = _where(rows, dq), _where(cols, dk), _where(cols, dv)
    like: Any = cotangent_like
    none: Any = None
    made = _Given(*[none] * len(_Given._fields))
    if dbias:
        made = made._replace(bias=like(dbias[0], given.bias))
    pairs = zip((dq, dk, dv), given[:3], strict=True)
    dq, dk, dv = (like(g, a) for g, a in pairs)
    return (made._replace(q=dq, k=dk, v=dv),)


_attend.defvjp(_attend_fwd, _attend_bwd)


def _zeroed(given: _Given, o: Array) -> Array:
    """0 for queries of which a mask hides every key: the kernel takes a mean there."""
    if given.blind is None:
        return o
    blind = jnp.moveaxis(given.blind, 3, 1)[..., None]
    return jnp.where(blind, jnp.zeros((), o.dtype), o)


def _where(tokens: Array, a: Array) -> Array:
    """0 where the kernel leaves memory as it was."""
    tokens = tokens.reshape(*tokens.shape, *[1] * (a.ndim - 2))
    return jnp.where(tokens, a, jnp.zeros((), a.dtype))


def _log_sum_exp(static: _Static, given: _Given, stats: Array) -> Array:
    """``[B, K, G, T]``, -inf where a query sees no key."""
    queries = stats.shape[-1]
    index = jnp.arange(queries, dtype=jnp.int32)
    none = jnp.asarray(False) if given.blind is None else given.blind
    if static.kind.lengths == "prefix":
        none = none | (index >= given.tokens[0][:, None, None, None])
    if static.kind.lengths == "packed":
        counts, starts = given.tokens[0], given.tokens[2]
        local = index - starts[..., None]
        inside = (local >= 0) & (local < counts[..., None])
        place = jnp.argmax(inside, axis=1)
        local = jnp.take_along_axis(local, place[:, None], axis=1)[:, 0]
        flat = jnp.moveaxis(stats, 1, 3)
        flat = flat.reshape(*flat.shape[:3], -1)
        place = place.astype(jnp.int32) * jnp.int32(queries) + jnp.maximum(local, 0)
        stats = jnp.take_along_axis(flat, place[:, None, None], axis=-1)
        none = ~jnp.any(inside, axis=1)[:, None, None]
    return jnp.where(none, jnp.float32(-jnp.inf), stats)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual(options: Options, problem: Problem | None, lse: Array) -> Array:
    """The log-sum-exp with a gradient of its own, which cuDNN has none for."""
    return lse


def _residual_fwd(options: Options, problem: Problem | None, lse: Array):
    return lse, problem


def _residual_bwd(options: Options, problem: Problem, dlse: Array):
    _, pull = jax.vjp(lambda problem: chunked.attend(options, problem)[1], problem)
    return (*pull(dlse), None)


_residual.defvjp(_residual_fwd, _residual_bwd)
