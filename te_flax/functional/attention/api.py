"""The public function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.errors import check_float64, message
from te_flax.functional._core import array
from te_flax.functional.attention import (
    capabilities,
    chunked,
    cudnn,
    cudnn_fp8,
    mesh,
    reference,
)
from te_flax.functional.attention import fp8 as _emulation
from te_flax.functional.attention.checks import (
    check_arrays,
    check_static,
    choice,
    rate_of,
    refuse,
    scale_of,
    window_of,
)
from te_flax.functional.attention.fp8 import AttentionConfig, AttentionState
from te_flax.functional.attention.options import (
    INTEGERS,
    LAYOUTS,
    WHERE,
    Operands,
    Options,
    standard_slopes,
)
from te_flax.functional.attention.problem import lay, pose
from te_flax.functional.attention.structure import band
from te_flax.typing import Array

_ATTEND = {"chunked": chunked.attend, "reference": reference.attend}


def dot_product_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "BTNH",
    bias: Array | None = None,
    mask: Array | None = None,
    mask_type: str = "no_mask",
    alibi_slopes: Array | bool | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    positions: Array | tuple[Array, Array] | None = None,
    max_segments: int | None = None,
    q_seqlen: Array | None = None,
    kv_seqlen: Array | None = None,
    offsets: tuple[Array, Array] | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softmax_type: str = "vanilla",
    sink: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    score_mod: Callable[..., Array] | None = None,
    score_mod_args: tuple[Any, ...] = (),
    page_table: tuple[Array, Array] | None = None,
    return_residual: bool = False,
    fp8: AttentionConfig | tuple[AttentionConfig, AttentionState] | None = None,
    implementation: str | None = None,
) -> Array | tuple[Array, ...]:
    """Computes ``o = dropout(softmax(scores)) . v``, ``scores = scale q . k + bias``.

    A key that a query does not see contributes nothing, not even a NaN (but cuDNN wants
    it finite, and a bias too without a mask); a query that sees no key gets 0 and
    passes no gradient on. All that limits what a query sees applies at once: mask,
    mask_type, lengths or segments, window.

    Args:
        q: ``[B, T, N, H]`` in the order of ``layout``; float32, bfloat16 or float16,
            with ``jax_enable_x64`` float64.
        k: ``[B, S, K, H]`` likewise, K a divisor of N (grouped or multi-query).
        v: ``[B, S, K, Hv]`` likewise.
        layout: "BTNH", "BNTH" or "TBNH", of q, k, v and the result.
        bias: added to the scores, broadcast right-aligned to ``[B, N, T, S]``.
        mask: likewise; boolean, True where a query sees a key, or added to the scores,
            where entries below half the lowest number of its dtype hide the key.
        mask_type: "no_mask", "padding", "causal", "causal_bottom_right",
            "padding_causal" or "padding_causal_bottom_right". Bottom right: the last
            query of an example, or of a segment, sees its last key. Lengths and
            segments count under every type; the padding types demand them.
        alibi_slopes: ``[N]``; the scores lose ``slope |distance|``. True takes the
            published slopes.
        segment_ids: int32 ``[B, T]``, or a pair for queries and keys: a query sees
            keys of its own segment, 0 is padding.
        positions: int32, likewise, what causal masks, windows and ALiBi measure;
            by default from the start of the array or of the run of one segment id.
        max_segments: largest segment id; None is the length.
        q_seqlen: int32 ``[B]``, how many queries are no padding; ``[B, M]`` for M
            packed segments, -1 where there is none.
        kv_seqlen: likewise of the keys.
        offsets: int32 ``[B, M + 1]`` of queries and of keys, where the packed segments
            start, and the end; None packs them without gaps.
        window: (left, right): a query at position i sees keys from i - left to
            i + right; -1 or None is unlimited, one integer stands for both.
        scale: factor of q . k; None is ``1 / sqrt(H)``.
        softmax_type: "vanilla"; "off_by_one" adds 1 = ``exp(0)`` to the sum of
            ``exp(scores)`` that the softmax divides by, "learnable" ``exp(sink)``.
        sink: ``[N]``, only for "learnable"; +inf counts as the largest float32, so
            that the head gives 0 and passes no gradient on.
        dropout_rate: share of the probabilities that become 0, >= 0 and < 1.
        dropout_key: random key. What is dropped depends on it and on the numbers of
            example, head, query and key alone.
        score_mod: ``f(scores, b, n, t, s, *score_mod_args)`` changes the scaled scores
            ``[B, N, T, S]`` element by element, before bias and masks; the four arrays
            of numbers broadcast to them. It must work on any block of them.
        score_mod_args: tuple of arrays, numbers or trees of them. What is
            differentiated must come in here: score_mod must not close over it.
        page_table: int32 ``[B, pages]`` of keys and of values: k and v then hold pages
            ``[P, size, K, H]`` in place of examples, and ``S = pages size``; -1 is no
            page.
        return_residual: whether the log-sum-exp of the scores is returned too.
        fp8: quantizers of FP8 attention, with its state where earlier steps fix the
            scales; None multiplies q, k and v as they are.
        implementation: "reference", "chunked" or "cudnn"; None takes the first of
            "cudnn", "chunked" and "reference" that can serve the call.

    Returns:
        o ``[B, T, N, Hv]`` in the order of ``layout`` and q's dtype; with
        ``return_residual`` also float32 ``[B, N, T]``, -inf where a query sees no key;
        with ``fp8`` also the amax (largest finite magnitude, non-finite flag) of q, k,
        v, the probabilities and o, float32 ``[5, 2]``, and their statistics, float32
        ``[5, 5]``, if its state has a ``record``.

    Raises:
        ValueError: shapes, lengths or options do not fit, or the sequence or head_dim
            is sharded. Numbers inside arrays are checked outside of jit only.
        TypeError: an array has a wrong dtype.
        NotImplementedError: the implementation asked for cannot serve the call.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> q = k = v = jnp.ones((2, 8, 4, 16))
        >>> te.dot_product_attention(q, k, v, mask_type="causal").shape
        (2, 8, 4, 16)

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762),
    section 3.2; Xiao et al. 2023 (arXiv:2309.17453) for the sink.
    """
    check_float64(WHERE, q=q, k=k, v=v, bias=bias, mask=mask, sink=sink)
    q, k, v = map(jnp.asarray, (q, k, v))
    choice("layout", layout, LAYOUTS)
    left, right = window_of(window)
    if isinstance(mask_type, str) and "causal" in mask_type:
        right = 0 if right is None else min(right, 0)
    operands = Operands(
        q,
        k,
        v,
        bias=array(bias),
        mask=array(mask),
        alibi_slopes=_slopes(alibi_slopes, q.shape[layout.index("N") :][:1]),
        segment_ids=_pair("segment_ids", segment_ids),
        positions=_pair("positions", positions),
        q_seqlen=array(q_seqlen),
        kv_seqlen=array(kv_seqlen),
        offsets=_pair("offsets", offsets),
        sink=array(sink),
        dropout_key=dropout_key,
        score_mod_args=jax.tree.map(jnp.asarray, score_mod_args),
        page_table=_pair("page_table", page_table),
    )
    options = Options(
        layout=layout,
        mask_type=mask_type,
        left=left,
        right=right,
        scale=scale_of(scale, q.shape[-1] if q.ndim else 1),
        softmax_type=softmax_type,
        dropout_rate=rate_of(dropout_rate),
        score_mod=score_mod,
        max_segments=max_segments,
        return_residual=return_residual,
    )
    return _run(options, operands, fp8, implementation)


def _run(options: Options, operands: Operands, given: Any, implementation: str | None):
    check_static(options, operands)
    sizes = check_arrays(options, operands)
    options = options._replace(band=band(options, operands, sizes))
    config, state = _fp8(given)
    scaled = state is not None and None not in state[:2]
    call = capabilities.Call(
        options,
        operands,
        sizes,
        fp8=config is not None,
        scaled=scaled,
        uniform=config is None or config.forward == config.backward,
    )
    chosen = capabilities.choose(call, implementation)

    def local(axes, operands: Operands, batch: Array, heads: Array, state: Any):
        if chosen == "cudnn" and config is not None:
            return cudnn_fp8.attend(config, options, axes, operands, state)
        if chosen == "cudnn":
            return *cudnn.attend(options, operands, batch, heads), ()
        problem, measured = pose(options, operands, batch, heads), ()
        if config is None:
            o, lse = _ATTEND[chosen](options, problem)
        else:
            o, lse, measured = _emulation.attend(config, options, axes, problem, state)
        b, *split, t = lse.shape
        return lay(options, o), lse.reshape(b, split[0] * split[1], t), measured

    operands = operands._replace(
        dropout_key=_words(options, operands),
        **{name: _int32(getattr(operands, name)) for name in INTEGERS},
    )
    o, lse, measured = mesh.run(local, options, operands, sizes, state)
    found = (o, *[lse] * options.return_residual, *measured)
    return found if len(found) > 1 else o


def _fp8(given: Any) -> tuple[AttentionConfig | None, AttentionState | None]:
    """The quantizers of FP8 attention and its arrays; None without."""
    if given is None:
        return None, None
    pair = given if isinstance(given, tuple) else (given, AttentionState())
    types = (AttentionConfig, AttentionState)
    if len(pair) != 2 or not all(map(isinstance, pair, types)):
        rule = "be an AttentionConfig, or a pair of one and an AttentionState"
        remedy = "pass fp8=te.AttentionConfig()"
        raise TypeError(message(WHERE, "fp8", rule, repr(given)[:60], remedy))
    return pair


def _int32(tree: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(jnp.int32), tree)


def _pair(name: str, given: Any) -> tuple[Array, Array] | None:
    """Of queries and keys; a single array serves both."""
    if given is None:
        return None
    both = given if isinstance(given, tuple | list) else (given, given)
    if len(both) != 2:
        rule, remedy = "be an array or a pair", "write (queries, keys)"
        raise refuse(name, rule, f"{len(both)} arrays", remedy)
    return jnp.asarray(both[0]), jnp.asarray(both[1])


def _slopes(given: Any, heads: tuple[int, ...]) -> Array | None:
    if given is None or given is False:
        return None
    if given is True:
        return standard_slopes(*heads or (1,))
    return jnp.asarray(given)


def _words(options: Options, operands: Operands) -> Array | None:
    """The key of dropout, another one on every shard inside ``jax.shard_map``."""
    if not options.dropout_rate:
        return None
    key = jnp.asarray(operands.dropout_key)
    for axis in sorted(jax.typeof(operands.q).mat.varying):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return jax.random.bits(key, (2,), jnp.uint32)
