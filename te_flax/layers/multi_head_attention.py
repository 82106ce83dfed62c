"""MultiHeadAttention: projections, positions, a cache and attention between them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from te_flax import sharding
from te_flax.errors import part_of
from te_flax.layers import _arguments
from te_flax.layers._batch import batch_of
from te_flax.layers._dropout import given_key
from te_flax.layers._head_options import check_inputs, check_options, head_sizes
from te_flax.layers._positions import position_pair, rotate
from te_flax.layers._projections import (
    LOW_RANK_SCOPES,
    OWN_AXES,
    make_norms,
    make_out,
    make_projections,
    project,
    project_out,
)
from te_flax.layers.attention import DotProductAttention
from te_flax.layers.dense_general import DEFAULT_KERNEL_INIT, DenseGeneral
from te_flax.layers.kv_cache import KVCache, check_decode
from te_flax.layers.layer_norm_dense_general import refuse
from te_flax.layers.norm import ZEROS
from te_flax.typing import Array, Axes, Initializer

_WHERE = "MultiHeadAttention"
_REFUSED = ("axis", "enable_low_rank_adaptation", *OWN_AXES)
# Arguments that are attributes, under their names.
_KEPT = (
    "attention_type",
    "fuse_qkv_params",
    "input_layernorm",
    "return_layernorm_output",
    "enable_rotary_pos_emb",
    "rotary_pos_emb_group_method",
    "decode",
    "dropout_rng_name",
    "input_axes",
    "attention_axes",
    "transpose_batch_sequence",
)
# Those that all projections take.
_DENSE = (
    "use_bias",
    "bias_init",
    "low_rank_adaptation_dim",
    "low_rank_adaptation_alpha",
    "transpose_batch_sequence",
    "dtype",
    "param_dtype",
    "rngs",
)
# Arguments that the attention between the projections takes.
_ATTENTION = (
    "num_kv_heads",
    "dropout_rate",
    "dropout_rng_name",
    "attn_mask_type",
    "attn_bias_type",
    "float32_logits",
    "window_size",
    "max_segments_per_seq",
    "softmax_type",
    "alibi_slopes",
    "score_mod",
    "implementation",
    "transpose_batch_sequence",
    "param_dtype",
    "rngs",
)
_STATE = ("recipe", "amax_history_len")


class MultiHeadAttention(KVCache):
    """Multi-head attention: ``out(attention(query(h), key(h), value(h)))``.

    h is x, or norm(x). Without a recipe it equals
    :class:`flax.nnx.MultiHeadAttention` where that has the option. Parameters, for N
    heads of size H, K of them for keys and values:

    * ``fuse_qkv_params``: ``qkv.kernel`` ``[in, 3, N, H]``; for cross attention or
      K < N ``query.kernel`` ``[in, N, H]`` and ``kv.kernel`` ``[in, 2, K, H]``.
    * else ``query.kernel``, ``key.kernel``, ``value.kernel``, as in ``flax.nnx``.
    * ``out.kernel`` ``[N, H, out]``; a ``bias`` beside each kernel; ``query_ln.scale``
      and ``key_ln.scale`` with ``normalize_qk``.
    * with ``input_layernorm`` ``norm.scale`` and ``norm.bias`` in ``qkv`` or ``query``.

    Args:
        num_heads: number of query heads N.
        in_features: size of the last axis of inputs_q.
        qkv_features: N * H; None is ``in_features``.
        out_features: size of the result's last axis; None is ``in_features``.
        num_kv_heads: number of key and value heads K, a divisor of N; None is N.
        in_kv_features: size of the last axis of inputs_k; None is ``in_features``.
        attention_type: "self", or "cross": keys and values come from inputs_k.
        fuse_qkv_params: whether projections of one input share a kernel.
        input_layernorm: whether inputs_q is normalised first; for "self" all inputs.
        layernorm_type: "layernorm" or "rmsnorm", of all norms.
        layernorm_epsilon: added to their variance, >= 0.
        zero_centered_gamma: whether their factor is ``1 + scale``.
        scale_init: of their scales; None is ones, or zeros when zero-centred.
        ln_bias_init: of the bias of the input's norm.
        scale_axes: a logical axis, or None, for the dim of the input's norm.
        ln_bias_axes: likewise for its bias.
        return_layernorm_output: whether a call returns ``(y, norm(inputs_q))``.
        normalize_qk: whether queries and keys pass a norm over H.
        use_bias: whether all projections add a bias.
        kernel_init: of the kernels, each called with its own 2-D shape.
        bias_init: of the biases.
        out_kernel_init: of ``out.kernel``; None is ``kernel_init``.
        out_bias_init: of ``out.bias``; None is ``bias_init``.
        scaled_query_init: whether the queries' kernel starts divided by sqrt(H).
        scale_attn_logits: whether scores are divided by sqrt(H).
        dropout_rate: of the weights of attention, in [0, 1).
        dropout_rng_name: stream of its keys.
        attn_mask_type: see :class:`te_flax.DotProductAttention`, as the next ones.
        attn_bias_type: what a bias is added to.
        float32_logits: whether attention is computed in float32.
        window_size: how far a query sees to the left and to the right.
        max_segments_per_seq: largest segment id of packed sequences, or None.
        softmax_type: "vanilla", "off_by_one" or "learnable".
        alibi_slopes: of ALiBi: None, True or one constant a head.
        score_mod: function that changes the scores.
        implementation: of attention; None chooses.
        enable_rotary_pos_emb: whether queries and keys are rotated by their positions.
        rotary_pos_emb_windows: smallest and largest time scale.
        rotary_pos_emb_group_method: "consecutive" or "alternate", see
            :func:`te_flax.rotary_embedding`.
        low_rank_adaptation_scope: "none", "all", "qkv_proj", "output_proj",
            "exclude_qkv_proj" or "exclude_output_proj" ("mlp" and "exclude_mlp" are for
            :class:`te_flax.TransformerLayer`).
        low_rank_adaptation_dim: rank of the additions.
        low_rank_adaptation_alpha: their scale is alpha / rank; None is 1.
        decode: whether calls use the cache that :meth:`init_cache` makes.
        qkv_kernel_axes: a logical axis, or None, for (in, heads, head_dim) of the
            queries' kernel, or of the shared one.
        kv_kernel_axes: likewise of the kernels of keys and values.
        out_kernel_axes: likewise for (heads, head_dim, out).
        qkv_bias_axes: likewise for (heads, head_dim).
        kv_bias_axes: likewise.
        out_bias_axes: likewise for the dim of ``out.bias``.
        input_axes: a logical axis, or None, for each dim of inputs and result.
        dot_input_axes: likewise for what the first maps read: codes travel.
        attention_axes: likewise for (batch, sequence, heads, head_dim) of queries and
            of the result of attention.
        transpose_batch_sequence: whether inputs are ``[sequence, *batch, features]``;
            the ``*_axes`` stay in batch-first order and are turned round.
        dtype: of the computation and of the result; None promotes the input's with the
            parameters'.
        param_dtype: of the parameters.
        rngs: keys for parameters and dropout.
        **dense: other arguments of all :class:`te_flax.DenseGeneral`: ``recipe``,
            ``amax_history_len``, ``precision``, ``promote_dtype``,
            ``quantization_checkpoint_name``, ``kernel_metadata``, ``bias_metadata``.

    Raises:
        ValueError: an argument is out of range or unknown, or counts do not divide.
        TypeError: ``recipe`` is no recipe, a dtype no float, a flag no bool, a name no
            str, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.MultiHeadAttention(4, 64, attn_mask_type="causal",
        ...                               enable_rotary_pos_emb=True, rngs=nnx.Rngs(0))
        >>> with te.autocast(te.Float8CurrentScaling()):
        ...     layer(jnp.ones((2, 8, 64))).shape
        (2, 8, 64)

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), section
    3.2; the layers of flax.nnx and of TransformerEngine of the same name.
    """

    num_heads: int
    attention_type: str
    fuse_qkv_params: bool
    return_layernorm_output: bool
    dropout_rng_name: str
    decode: bool
    packed: bool  # all three projections share a kernel
    query_ln: Any
    key_ln: Any
    out: Any
    rngs: Any = None  # a stream that a converted layer brought along

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        attention_type: str = "self",
        fuse_qkv_params: bool = True,
        input_layernorm: bool = False,
        layernorm_type: str = "layernorm",
        layernorm_epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        scale_init: Initializer | None = None,
        ln_bias_init: Initializer = ZEROS,
        scale_axes: Axes | None = None,
        ln_bias_axes: Axes | None = None,
        return_layernorm_output: bool = False,
        normalize_qk: bool = False,
        use_bias: bool = True,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        bias_init: Initializer = ZEROS,
        out_kernel_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        scaled_query_init: bool = False,
        scale_attn_logits: bool = True,
        dropout_rate: float = 0.0,
        dropout_rng_name: str = "dropout",
        attn_mask_type: str = "no_mask",
        attn_bias_type: str | None = None,
        float32_logits: bool = False,
        window_size: Sequence[int | None] | None = None,
        max_segments_per_seq: int | None = None,
        softmax_type: str = "vanilla",
        alibi_slopes: Sequence[float] | Array | bool | None = None,
        score_mod: Callable[..., Array] | None = None,
        implementation: str | None = None,
        enable_rotary_pos_emb: bool = False,
        rotary_pos_emb_windows: Sequence[float] = (1, 10000),
        rotary_pos_emb_group_method: str = "consecutive",
        low_rank_adaptation_scope: str = "none",
        low_rank_adaptation_dim: int = 32,
        low_rank_adaptation_alpha: float | None = None,
        decode: bool = False,
        qkv_kernel_axes: Axes | None = None,
        kv_kernel_axes: Axes | None = None,
        out_kernel_axes: Axes | None = None,
        qkv_bias_axes: Axes | None = None,
        kv_bias_axes: Axes | None = None,
        out_bias_axes: Axes | None = None,
        input_axes: Axes | None = None,
        dot_input_axes: Axes | None = None,
        attention_axes: Axes | None = None,
        transpose_batch_sequence: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **dense: Any,
    ):
        given = dict(locals())
        _arguments.check_options(_WHERE, given)
        refuse(_WHERE, dense, DenseGeneral, *_REFUSED)
        self.in_features, self.out_features, self.in_kv_features = head_sizes(
            _WHERE, self, given
        )
        check_options(_WHERE, self, given)
        for name in _KEPT:
            setattr(self, name, given[name])
        self.rotary_pos_emb_windows = tuple(rotary_pos_emb_windows)
        scope = LOW_RANK_SCOPES[low_rank_adaptation_scope]
        common = dense | {name: given[name] for name in _DENSE}
        make_projections(self, given, "qkv_proj" in scope, common)
        make_norms(self, given)
        with part_of(_WHERE):
            self.core_attention = DotProductAttention(
                self.num_heads,
                self.head_dim,
                scale_factor=None if scale_attn_logits else 1.0,
                **{name: given[name] for name in _ATTENTION},
                **{name: dense[name] for name in _STATE if name in dense},
            )
        make_out(self, given, "output_proj" in scope, common)
        self._no_cache()

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        segment_ids: Any = None,
        positions: Any = None,
        q_seqlen: Array | None = None,
        kv_seqlen: Array | None = None,
        offsets: Any = None,
        score_mod_args: tuple[Any, ...] = (),
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: PartitionSpec | NamedSharding | None = None,
        qkv_sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Any:
        """Applies the layer.

        Args:
            inputs_q: float ``[*batch, T, in_features]``, sequence first
                ``[T, *batch, in_features]``.
            inputs_k: float ``[*batch, S, in_kv_features]``; None is self attention.
            inputs_v: likewise; None is inputs_k.
            mask: broadcasts to ``[*batch, heads, T, S]``, in decoding S is the length
                of the cache; a query sees a key where it is not 0.
            bias: likewise, added to the scores.
            segment_ids: int ``[*batch, T]`` of packed sequences, 0 is padding; a pair
                where keys have others.
            positions: int ``[*batch, T]``, of RoPE and of causal masks; a pair where
                keys have others. None counts from 0, or from the cache's next slot.
            q_seqlen: int ``[*batch]``, number of queries that count.
            kv_seqlen: int ``[*batch]``, number of keys that count.
            offsets: pair of int ``[*batch, M + 1]`` where lengths are
                ``[*batch, M]``.
            score_mod_args: arrays for ``score_mod``.
            deterministic: True drops nothing; None follows ``model.train()`` and
                ``model.eval()``.
            rngs: of the dropout, where it drops, in place of the layer's stream.
            sow_weights: of ``flax.nnx``; must be False.
            decode: whether to add the tokens to the cache and to attend to what it
                holds; None is the constructor's. Then a token sees those before it.
            is_causal: makes the mask type a causal one.
            out_sharding: wanted of y.
            qkv_sharding: wanted of queries, keys and values.

        Returns:
            y ``[*batch, T, out_features]``, or (y, norm(inputs_q)) with
            ``return_layernorm_output``. y is NaN where a jitted call finds the cache
            full.

        Raises:
            ValueError: shapes do not fit, or a call decodes without a cache, beyond its
                end, or with options for whole sequences.
            TypeError: inputs are no float arrays.
        """
        decode = self.decode if decode is None else decode
        sequence = 0 if self.transpose_batch_sequence else 1
        inputs = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
        with part_of(_WHERE, x="inputs_q"):
            check_inputs(_WHERE, self, *inputs.values())
            batch = batch_of(_WHERE, inputs_q.shape, 1, self.transpose_batch_sequence)
            whole = batch.join_all(
                segment_ids=segment_ids,
                offsets=offsets,
                q_seqlen=q_seqlen,
                kv_seqlen=kv_seqlen,
            )
            limits = batch.join_all(mask=mask, bias=bias)
            positions = batch.join_argument("positions", positions, 1)
            joined = tuple(batch.join(n, a) for n, a in inputs.items())
            made = project(self, joined, qkv_sharding)
            query, key, value = made.query, made.key, made.value
            if self.query_ln is not None:
                query, key = self.query_ln(query), self.key_ln(key)
            if decode:
                score_mod = {"score_mod": self.core_attention.score_mod}
                check_decode(_WHERE, inputs, whole | score_mod)
                slots, _ = self.slots(query.shape[sequence])
                positions = slots if positions is None else positions
            pair = position_pair(self, positions, query, key)
            query, key = rotate(self, query, key, pair)
            overrun, options = None, {**whole, "positions": pair}
            if decode:
                cached = self._append(key, value)
                key, value, overrun = cached.key, cached.value, cached.overrun
                options = cached.as_causal(query.shape[1 - sequence])
            query = sharding.constrain(query, self._axes("attention_axes", 4))
            context = self.core_attention(
                query,
                key,
                value,
                dropout_rng=given_key(self, rngs, deterministic),
                deterministic=deterministic,
                dtype=query.dtype,
                module=self if sow_weights else None,
                is_causal=is_causal,
                score_mod_args=score_mod_args,
                **limits,
                **options,
            )
            y = project_out(self, context, out_sharding)
        if overrun is not None:
            y = jnp.where(overrun, jnp.asarray(jnp.nan, y.dtype), y)
        results = batch.split(y), batch.split(made.normed)
        return results if self.return_layernorm_output else results[0]

    def _axes(self, name: str, ndim: int) -> Axes | None:
        """Logical axes in the order of the arrays."""
        axes, flipped = getattr(self, name), self.transpose_batch_sequence
        return _arguments.input_axes(_WHERE, axes, ndim, flipped, name)
