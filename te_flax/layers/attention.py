"""DotProductAttention: what lies between the projections, with its options."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.ad_checkpoint import checkpoint_name

from te_flax.errors import message, part_of
from te_flax.functional.attention.api import dot_product_attention
from te_flax.functional.attention.capabilities import IMPLEMENTATIONS
from te_flax.functional.attention.checks import scale_of, window_of
from te_flax.functional.attention.options import MASK_TYPES, SOFTMAX_TYPES
from te_flax.layers import _arguments
from te_flax.layers._batch import batch_of
from te_flax.layers._dropout import dropout_key, make_dropout
from te_flax.layers._fp8 import attention_fp8, keep
from te_flax.layers._head_options import head_counts, slopes_of
from te_flax.layers._params import init_param
from te_flax.recipe.attention import Fp8AttentionState
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import resolve
from te_flax.typing import Array, Axes, Initializer

ZEROS = nnx.initializers.zeros_init()
BIAS_TYPES = (None, "no_bias", "pre_scale_bias", "post_scale_bias")
_WITHOUT_PADDING = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}
_CAUSAL = {"no_mask": "causal", "padding": "padding_causal"}
_WHERE = "DotProductAttention"
# The function's arguments whose values come from the layer's under another name.
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask_type": "attn_mask_type",
    "window": "window_size",
    "scale": "scale_factor",
    "max_segments": "max_segments_per_seq",
    "dropout_key": "dropout_rng",
}


class DotProductAttention(nnx.Module):
    """Attention: ``softmax(scale * query . key^T + bias) . value``.

    The call takes what ``flax.nnx.dot_product_attention`` takes, so a layer serves as
    ``attention_fn`` of :class:`flax.nnx.MultiHeadAttention`.

    Args:
        num_heads: number of query heads N.
        head_dim: size of a query and of a key.
        num_kv_heads: number of key and value heads, a divisor of N; None is N.
        dropout_rate: share of the weights that is dropped, in [0, 1).
        dropout_rng_name: stream of its keys.
        attn_mask_type: "no_mask", "padding", "causal", "causal_bottom_right",
            "padding_causal" or "padding_causal_bottom_right"; the mask, the lengths or
            the segments of a call tell what is padding.
        attn_bias_type: "post_scale_bias" or None adds the bias as the formula says,
            "pre_scale_bias" before the factor, "no_bias" refuses one.
        float32_logits: whether query, key and value are widened to float32, the second
            product with them; the scores alone are float32 without it too.
        scale_factor: of the scores; None is ``1 / sqrt(head_dim)``.
        transpose_batch_sequence: whether query, key and value are
            ``[sequence, *batch, heads, head_dim]``.
        window_size: (left, right), how far a query sees; -1 or None is no limit.
        max_segments_per_seq: largest segment id of packed sequences, or None.
        context_checkpoint_name: name of the result for ``jax.checkpoint`` policies.
        softmax_type: "vanilla", "off_by_one" (a score of 0 joins the denominator's
            sum) or "learnable" (one parameter a head, ``softmax_offset``, does).
        softmax_offset_init: of that parameter.
        softmax_offset_axes: a logical axis, or None, for its dim.
        alibi_slopes: ALiBi: scores lose ``slope |distance|`` of the positions. True
            takes the published slopes, or one constant a head; None is without.
        score_mod: function that changes the scores, as in
            :func:`te_flax.dot_product_attention`.
        implementation: as there; None chooses.
        recipe: beats the recipe of :func:`te_flax.autocast`; None follows it. Attention
            is quantized under ``te.DelayedScaling(fp8_attention=True)`` alone.
        amax_history_len: entries of the amax histories; None takes the recipe's in
            context, else 1024.
        param_dtype: of ``softmax_offset``.
        rngs: keys for the dropout and the parameter.

    Raises:
        ValueError: an argument is out of range or unknown.
        TypeError: a dtype is no float, a flag no bool, a name no str, or logical axes
            no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> attend = te.DotProductAttention(4, 8, attn_mask_type="causal",
        ...                                 rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 6, 4, 8))
        >>> attend(x, x, x).shape
        (2, 6, 4, 8)

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762),
    equation 1; TransformerEngine's layer of the same name.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        dropout_rate: float = 0.0,
        dropout_rng_name: str = "dropout",
        attn_mask_type: str = "no_mask",
        attn_bias_type: str | None = None,
        float32_logits: bool = False,
        scale_factor: float | None = None,
        transpose_batch_sequence: bool = False,
        window_size: Sequence[int | None] | None = None,
        max_segments_per_seq: int | None = None,
        context_checkpoint_name: str = "context",
        softmax_type: str = "vanilla",
        softmax_offset_init: Initializer = ZEROS,
        softmax_offset_axes: Axes | None = None,
        alibi_slopes: Sequence[float] | Array | bool | None = None,
        score_mod: Callable[..., Array] | None = None,
        implementation: str | None = None,
        recipe: Recipe | None = None,
        amax_history_len: int | None = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _arguments.check_options(_WHERE, locals())
        self.num_heads, self.head_dim, self.num_kv_heads = head_counts(
            _WHERE, num_heads, head_dim, num_kv_heads
        )
        with part_of(_WHERE, **_NAMES):
            self.scale_factor = scale_of(scale_factor, self.head_dim)
            self.window_size = window_of(window_size)
        implementations = (None, *IMPLEMENTATIONS)
        _arguments.choice(_WHERE, "implementation", implementation, implementations)
        _arguments.choice(_WHERE, "attn_mask_type", attn_mask_type, MASK_TYPES)
        _arguments.choice(_WHERE, "attn_bias_type", attn_bias_type, BIAS_TYPES)
        _arguments.choice(_WHERE, "softmax_type", softmax_type, SOFTMAX_TYPES)
        _arguments.check_float_dtypes(_WHERE, param_dtype=param_dtype)
        self.attn_mask_type = attn_mask_type
        self.attn_bias_type = attn_bias_type
        self.softmax_type = softmax_type
        self.float32_logits = float32_logits
        self.transpose_batch_sequence = transpose_batch_sequence
        self.max_segments_per_seq = max_segments_per_seq
        self.context_checkpoint_name = context_checkpoint_name
        self.alibi_slopes = slopes_of(_WHERE, alibi_slopes, self.num_heads)
        self.score_mod = score_mod
        self.implementation = implementation
        self.dropout = make_dropout(
            _WHERE, "dropout_rate", dropout_rate, dropout_rng_name, rngs
        )
        self.recipe = recipe
        with part_of(_WHERE):
            self.fp8 = Fp8AttentionState(amax_history_len, recipe=recipe)
        self.softmax_offset = nnx.data(None)
        if softmax_type == "learnable":
            shape = (self.num_heads,)
            self.softmax_offset = init_param(
                _WHERE,
                softmax_offset_init,
                shape,
                shape,
                softmax_offset_axes=softmax_offset_axes,
                dtype=param_dtype,
                metadata={},
                rngs=rngs,
            )

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = False,
        dropout_rng: Array | None = None,
        dropout_rate: float | None = None,
        deterministic: bool | None = None,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        is_causal: bool = False,
        *,
        mask_type: str | None = None,
        segment_ids: Any = None,
        positions: Any = None,
        q_seqlen: Array | None = None,
        kv_seqlen: Array | None = None,
        offsets: Any = None,
        page_table: Any = None,
        score_mod_args: tuple[Any, ...] = (),
    ) -> Array:
        """Applies attention.

        Args:
            query: ``[*batch, T, num_heads, head_dim]``, sequence first
                ``[T, *batch, num_heads, head_dim]``.
            key: ``[*batch, S, num_kv_heads, head_dim]``.
            value: ``[*batch, S, num_kv_heads, value_dim]``.
            bias: added to the scores, broadcasts to ``[*batch, num_heads, T, S]``.
            mask: likewise; a query sees a key where it is not 0.
            broadcast_dropout: of ``flax.nnx``; here each weight is drawn by itself.
            dropout_rng: key of the dropout, where it drops; None takes the layer's
                stream.
            dropout_rate: in place of the layer's; None leaves that.
            deterministic: True drops nothing; None follows ``model.train()``.
            dtype: of the computation; None promotes the operands'.
            precision: of ``flax.nnx``; products accumulate in float32 here.
            module: of ``flax.nnx``, which keeps the weights in it; must be None.
            promote_dtype: as in ``flax.nnx``.
            is_causal: makes the mask type a causal one.
            mask_type: in place of the layer's; None leaves that.
            segment_ids: int ``[*batch, T]``, 0 is padding; a pair where keys differ.
            positions: int ``[*batch, T]``, likewise.
            q_seqlen: int ``[*batch]``, number of queries that count.
            kv_seqlen: int ``[*batch]``, number of keys that count.
            offsets: pair of int ``[*batch, M + 1]`` where lengths are
                ``[*batch, M]``.
            page_table: int ``[*batch, pages]``, a pair where values differ: key and
                value then hold pages ``[P, size, num_kv_heads, head_dim]``, sequence
                first ``[size, P, ..]``, and ``kv_seqlen`` is needed; -1 is no page.
            score_mod_args: arrays for ``score_mod``.

        Returns:
            ``[*batch, T, num_heads, value_dim]``, or sequence first.

        Raises:
            ValueError: shapes do not fit, a bias is given to "no_bias", or outside of
                jit a page is out of range.
            NotImplementedError: ``module`` is given.
        """
        self._check(query, key, module)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        narrow = query.dtype
        if self.float32_logits:
            query, key, value = (a.astype(jnp.float32) for a in (query, key, value))
        batch = batch_of(_WHERE, query.shape, 2, self.transpose_batch_sequence)
        query = batch.join("query", query)
        if page_table is None:  # pages belong to no example
            key, value = batch.join("key", key), batch.join("value", value)
        limits = batch.join_all(
            mask=None if mask is None else mask.astype(bool),
            bias=self._bias(bias),
            segment_ids=segment_ids,
            positions=positions,
            q_seqlen=q_seqlen,
            kv_seqlen=kv_seqlen,
            offsets=offsets,
            page_table=page_table,
        )
        rate, drop_key = self._dropout(dropout_rng, dropout_rate, deterministic)
        padding = (segment_ids, q_seqlen, kv_seqlen)
        told = mask is not None and all(a is None for a in padding)
        mask_type = self._mask_type(mask_type, is_causal, told)
        fp8 = attention_fp8(resolve(self.recipe), self.fp8)
        with part_of(_WHERE, **_NAMES):
            out: Any = dot_product_attention(
                query,
                key,
                value,
                layout="TBNH" if self.transpose_batch_sequence else "BTNH",
                mask_type=mask_type,
                alibi_slopes=self._slopes(),
                max_segments=self.max_segments_per_seq,
                window=self.window_size,
                scale=self.scale_factor,
                softmax_type=self.softmax_type,
                sink=None if self.softmax_offset is None else self.softmax_offset[...],
                dropout_rate=rate,
                dropout_key=drop_key,
                score_mod=self.score_mod,
                score_mod_args=score_mod_args,
                implementation=self.implementation,
                fp8=fp8,
                **limits,
            )
        if fp8 is not None:
            out, *measured = out
            keep(self.fp8, *measured)
        out = batch.split(out.astype(narrow))
        return checkpoint_name(out, self.context_checkpoint_name)

    def _check(self, query: Array, key: Array, module: Any) -> None:
        if module is not None:
            rule, remedy = "be None", "the weights of attention are never kept"
            got = f"a {type(module).__name__}"
            raise NotImplementedError(message(_WHERE, "module", rule, got, remedy))
        for name, array, heads in (
            ("query", query, self.num_heads),
            ("key", key, self.num_kv_heads),
        ):
            tail = (heads, self.head_dim)
            if array.ndim < 3 or array.shape[-2:] != tail:
                rule, got = f"end in {tail}, heads and head_dim", f"shape {array.shape}"
                remedy = "change the layer or the projection"
                raise ValueError(message(_WHERE, name, rule, got, remedy))

    def _slopes(self) -> Any:
        found = self.alibi_slopes
        return jnp.asarray(found, jnp.float32) if isinstance(found, tuple) else found

    def _mask_type(self, asked: str | None, is_causal: bool, told: bool) -> str:
        """What the call asks for, or the layer's; ``told``: a mask says the padding."""
        own = self.attn_mask_type
        found = asked or (_CAUSAL.get(own, own) if is_causal else own)
        return _WITHOUT_PADDING.get(found, found) if told else found

    def _bias(self, bias: Array | None) -> Array | None:
        """The bias as it is added to the scaled scores."""
        if bias is None or self.attn_bias_type in (None, "post_scale_bias"):
            return bias
        if self.attn_bias_type == "no_bias":
            rule, remedy = "be None where attn_bias_type is 'no_bias'", "leave it out"
            got = f"shape {bias.shape}"
            raise ValueError(message(_WHERE, "bias", rule, got, remedy))
        return bias * jnp.asarray(self.scale_factor, bias.dtype)

    def _dropout(
        self, key: Array | None, rate: float | None, deterministic: bool | None
    ) -> tuple[float, Array | None]:
        """Rate and key of this call, (0.0, None) where nothing is dropped."""
        own = 0.0 if self.dropout is None else self.dropout.rate
        rate = own if rate is None else float(rate)
        if deterministic is None and self.dropout is not None:
            deterministic = self.dropout.deterministic
        if rate == 0 or deterministic:
            return 0.0, None
        if key is None:
            key = dropout_key(self.dropout, deterministic)
            if key is None and self.dropout is None:
                rule, remedy = "be given with a dropout_rate", "pass a key"
                raise ValueError(message(_WHERE, "dropout_rng", rule, None, remedy))
        return (0.0, None) if key is None else (rate, key)
