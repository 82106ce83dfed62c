"""TransformerLayer: attention and a feed-forward block, with residual connections."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from te_flax import sharding
from te_flax.errors import message, part_of
from te_flax.layers import _arguments
from te_flax.layers._activations import Activation
from te_flax.layers._dropout import check_dims, drop, make_dropout
from te_flax.layers._transformer_parts import (
    REFUSED,
    cross_limits,
    make_attention,
    make_mlp,
    make_output_norm,
    make_relative_embedding,
)
from te_flax.layers.dense_general import DenseGeneral
from te_flax.layers.layer_norm_dense_general import refuse
from te_flax.layers.multi_head_attention import MultiHeadAttention
from te_flax.layers.norm import ZEROS
from te_flax.typing import Array, Axes, Initializer, Shape

_WHERE = "TransformerLayer"


class TransformerLayer(nnx.Module):
    """Attention and feed-forward block of a transformer: ``x + f(norm(x))``, each.

    An encoder layer has ``self_attention`` and ``mlp``, a decoder layer
    ``cross_attention`` between them; :class:`te_flax.MultiHeadAttention` and
    :class:`te_flax.LayerNormMLP`, which normalise their inputs themselves. Further
    parts, where an option asks for them: ``relative_embedding``, ``output_norm``.

    Args:
        hidden_size: size of the last axis of inputs and result.
        mlp_hidden_size: size between the two maps of the feed-forward block.
        num_attention_heads: number of heads, a divisor of ``hidden_size``.
        num_gqa_groups: number of key and value heads; None is ``num_attention_heads``.
        layer_type: "encoder" or "decoder".
        layernorm_type: "layernorm" or "rmsnorm", of all norms.
        layernorm_epsilon: added to their variance, >= 0.
        zero_centered_gamma: whether their factor is ``1 + scale``.
        hidden_dropout: of what each branch adds, in [0, 1).
        hidden_dropout_dims: dims along which one of its draws serves all.
        attention_dropout: of the weights of attention.
        intermediate_dropout: of the activation's result.
        intermediate_dropout_dims: dims along which one of its draws serves all.
        dropout_rng_name: stream of all keys.
        drop_path: share of the examples for which a branch adds nothing.
        mha_kernel_init: of the kernels of attention; None is a normal distribution with
            the variance 1 / fan in.
        mlp_kernel_init: of the other kernels; None is ``lecun_normal``.
        mlp_activations: as ``activations`` of :class:`te_flax.LayerNormMLP`.
        mlp_activation_params: as ``activation_params`` there.
        use_bias: whether all projections and maps add a bias.
        bias_init: of these biases.
        apply_residual_connection_post_layernorm: whether a branch is added to norm(x).
        output_layernorm: whether the result is normalised, in place of the input of the
            self attention.
        float32_attention_logits: whether attention is computed in float32.
        self_attn_mask_type: of the self attention, see
            :class:`te_flax.DotProductAttention`.
        self_attn_bias_type: likewise.
        enable_relative_embedding: whether scores get a bias for the distance of tokens.
        relative_embedding: the layer that makes it, which several may share; None makes
            a :class:`te_flax.RelativePositionBiases` of 32 buckets up to 128.
        enable_rotary_pos_emb: whether queries and keys are rotated by their positions.
        rotary_pos_emb_windows: smallest and largest time scale.
        rotary_pos_emb_group_method: "consecutive" or "alternate".
        low_rank_adaptation_scope: "none", "all", "qkv_proj", "output_proj", "mlp",
            "exclude_qkv_proj", "exclude_output_proj" or "exclude_mlp".
        low_rank_adaptation_dim: rank of the additions.
        low_rank_adaptation_alpha: their scale is alpha / rank; None is 1.
        fuse_qkv_params: whether projections of one input share a kernel.
        scale_attn_logits: whether scores are divided by sqrt(head_dim).
        scaled_query_init: whether the queries' kernel starts divided by it.
        window_size: how far a query sees to the left and to the right.
        softmax_type: "vanilla", "off_by_one" or "learnable".
        score_mod: function that changes the scores of the self attention.
        mlp_kernel_axes_1: a logical axis, or None, for each dim of ``mlp.wi.kernel``.
        mlp_kernel_axes_2: likewise for ``mlp.wo.kernel``.
        mlp_bias_axes_1: likewise for ``mlp.wi.bias``.
        mlp_bias_axes_2: likewise for ``mlp.wo.bias``.
        scale_axes: likewise for the dim of all norms' scales.
        ln_bias_axes: likewise for their biases.
        input_axes: likewise for inputs, result and what is added up between.
        dot_input_axes: likewise for what the norms write: codes.
        mlp_axes: likewise for the activation's result.
        transpose_batch_sequence: whether inputs are ``[sequence, batch, features]``;
            the ``*_axes`` stay in batch-first order and are turned round.
        dtype: of the computation and of the result; None promotes the input's with the
            parameters'.
        param_dtype: of the parameters.
        rngs: keys for parameters and dropout.
        **attention: other arguments of :class:`te_flax.MultiHeadAttention`, such as
            ``normalize_qk``, ``alibi_slopes`` (of the self attention),
            ``implementation`` and its ``*_axes``. Those of
            :class:`te_flax.DenseGeneral` reach the feed-forward block too: ``recipe``,
            ``amax_history_len``, ``precision``, ``promote_dtype``.

    Raises:
        ValueError: an argument is out of range or unknown, or counts do not divide.
        TypeError: ``recipe`` is no recipe, a dtype no float, a flag no bool, a name no
            str, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.TransformerLayer(64, 128, 4, rngs=nnx.Rngs(0))
        >>> with te.autocast(te.DelayedScaling()):
        ...     layer(jnp.ones((2, 8, 64))).shape
        (2, 8, 64)

    Source: Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), section
    3.1; Huang et al. 2016, "Deep Networks with Stochastic Depth" (arXiv:1603.09382);
    TransformerEngine's layer of the same name.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        layer_type: str = "encoder",
        layernorm_type: str = "layernorm",
        layernorm_epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        hidden_dropout: float = 0.1,
        hidden_dropout_dims: Sequence[int] = (),
        attention_dropout: float = 0.1,
        intermediate_dropout: float = 0.0,
        intermediate_dropout_dims: Sequence[int] = (),
        dropout_rng_name: str = "dropout",
        drop_path: float = 0.0,
        mha_kernel_init: Initializer | None = None,
        mlp_kernel_init: Initializer | None = None,
        mlp_activations: Activation | Sequence[Activation] = ("gelu",),
        mlp_activation_params: Mapping[str, float] = MappingProxyType({}),
        use_bias: bool = True,
        bias_init: Initializer = ZEROS,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        float32_attention_logits: bool = False,
        self_attn_mask_type: str = "causal",
        self_attn_bias_type: str | None = None,
        enable_relative_embedding: bool = True,
        relative_embedding: nnx.Module | None = None,
        enable_rotary_pos_emb: bool = False,
        rotary_pos_emb_windows: Sequence[float] = (1, 10000),
        rotary_pos_emb_group_method: str = "consecutive",
        low_rank_adaptation_scope: str = "none",
        low_rank_adaptation_dim: int = 32,
        low_rank_adaptation_alpha: float | None = None,
        fuse_qkv_params: bool = True,
        scale_attn_logits: bool = False,
        scaled_query_init: bool = True,
        window_size: Sequence[int | None] | None = None,
        softmax_type: str = "vanilla",
        score_mod: Callable[..., Array] | None = None,
        mlp_kernel_axes_1: Axes | None = None,
        mlp_kernel_axes_2: Axes | None = None,
        mlp_bias_axes_1: Axes | None = None,
        mlp_bias_axes_2: Axes | None = None,
        scale_axes: Axes | None = None,
        ln_bias_axes: Axes | None = None,
        input_axes: Axes | None = None,
        dot_input_axes: Axes | None = None,
        mlp_axes: Axes | None = None,
        transpose_batch_sequence: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **attention: Any,
    ):
        given = dict(locals())
        _arguments.check_options(_WHERE, given)
        refuse(_WHERE, attention, (MultiHeadAttention, DenseGeneral), *REFUSED)
        kinds = ("encoder", "decoder")
        decoder = _arguments.choice(_WHERE, "layer_type", layer_type, kinds) == kinds[1]
        self.layer_type, self.input_axes = layer_type, input_axes
        self.transpose_batch_sequence = transpose_batch_sequence
        self.post_layernorm = apply_residual_connection_post_layernorm
        names = {"in_features": "hidden_size", "qkv_features": "hidden_size"}
        with part_of(_WHERE, **names):
            self.self_attention = make_attention(given, attention)
        self.cross_attention = nnx.data(None)
        if decoder:
            self.cross_attention = make_attention(given, attention, cross=True)
        self.mlp = make_mlp(given, attention)
        self.relative_embedding = make_relative_embedding(given)
        self.output_norm = make_output_norm(given)
        dims = _arguments.ints(_WHERE, "hidden_dropout_dims", hidden_dropout_dims)
        self.hidden_dropout = make_dropout(
            _WHERE, "hidden_dropout", hidden_dropout, dropout_rng_name, rngs, dims
        )
        all_but_batch = (0, 2) if transpose_batch_sequence else (1, 2)
        self.drop_path = make_dropout(
            _WHERE, "drop_path", drop_path, dropout_rng_name, rngs, all_but_batch
        )

    def __call__(
        self,
        inputs: Array,
        encoded: Array | None = None,
        attention_mask: Array | None = None,
        encoder_decoder_mask: Array | None = None,
        *,
        seqlen: Array | None = None,
        encoded_seqlen: Array | None = None,
        segment_ids: Array | None = None,
        encoded_segment_ids: Array | None = None,
        positions: Array | None = None,
        encoded_positions: Array | None = None,
        score_mod_args: tuple[Any, ...] = (),
        deterministic: bool | None = None,
        decode: bool | None = None,
        out_sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Array:
        """Applies the layer.

        Args:
            inputs: float ``[batch, T, hidden_size]``, or sequence first.
            encoded: float ``[batch, S, hidden_size]``, likewise, for a decoder layer.
            attention_mask: of the self attention, broadcasts to
                ``[batch, heads, T, T]`` (in decoding to as many keys as the cache has);
                not 0 where a query sees a key.
            encoder_decoder_mask: of the cross attention, to ``[batch, heads, T, S]``.
            seqlen: int ``[batch]``, number of the inputs' tokens that count.
            encoded_seqlen: int ``[batch]``, likewise of ``encoded``.
            segment_ids: int ``[batch, T]`` of packed sequences, 0 is padding.
            encoded_segment_ids: int ``[batch, S]``, likewise of ``encoded``; a packed
                decoder layer needs it, or an ``encoder_decoder_mask``.
            positions: int ``[batch, T]``; None counts from 0, or from the first free
                slot of the cache.
            encoded_positions: int ``[batch, S]``, of ``encoded``, for RoPE and windows;
                None counts from 0.
            score_mod_args: arrays for ``score_mod``.
            deterministic: True drops nothing; None follows ``model.train()`` and
                ``model.eval()``.
            decode: whether to add the tokens to the cache of :meth:`init_cache` and to
                attend to what it holds.
            out_sharding: wanted of the result.

        Returns:
            An array like ``inputs``, of the promoted dtype.

        Raises:
            ValueError: shapes do not fit, ``encoded`` or its segments are missing or
                not taken, or a call decodes without a cache or beyond its end.
            TypeError: inputs are no float arrays.
        """
        self._check(inputs, encoded)
        limits = cross_limits(
            self.layer_type,
            encoder_decoder_mask,
            (segment_ids, encoded_segment_ids),
            (seqlen, encoded_seqlen),
            (positions, encoded_positions),
        )
        decode = self.self_attention.decode if decode is None else decode
        tokens = inputs.shape[0 if self.transpose_batch_sequence else 1]
        if decode and positions is None:
            positions = self.self_attention.slots(tokens)[0]
            limits["positions"] = (positions, encoded_positions)
        asked = sharding.placement(self._axes(), 3)
        x = asked(inputs)
        bias = self._bias(tokens, positions, decode)
        with part_of(_WHERE, inputs_q="inputs"):
            found = self.self_attention(
                x,
                mask=attention_mask,
                bias=bias,
                segment_ids=segment_ids,
                positions=positions,
                q_seqlen=seqlen,
                kv_seqlen=seqlen,
                score_mod_args=score_mod_args,
                deterministic=deterministic,
                decode=decode,
            )
        x = self._add(x, found, deterministic)
        if self.cross_attention is not None:
            with part_of(_WHERE, inputs_q="inputs", inputs_k="encoded"):
                found = self.cross_attention(
                    x,
                    encoded,
                    deterministic=deterministic,
                    **limits,
                )
            x = self._add(x, found, deterministic)
        last = asked.spec if out_sharding is None else out_sharding
        found = self.mlp(x, deterministic=deterministic, out_sharding=last)
        x = self._add(x, found, deterministic, own=out_sharding is None)
        return x if self.output_norm is None else self.output_norm(x)

    def init_cache(self, input_shape: Shape, dtype: Any = jnp.float32) -> None:
        """Makes an empty cache for decoding, in place of the one that may be there.

        Args:
            input_shape: of an input with all tokens that will come.
            dtype: of the cached keys and values.
        """
        self.self_attention.init_cache(input_shape, dtype)

    def _axes(self) -> Axes | None:
        axes, flipped = self.input_axes, self.transpose_batch_sequence
        return _arguments.input_axes(_WHERE, axes, 3, flipped)

    def _check(self, inputs: Array, encoded: Array | None) -> None:
        for name, array in (("inputs", inputs), ("encoded", encoded)):
            if array is not None and array.ndim != 3:
                order = "[sequence, batch," if self.transpose_batch_sequence else None
                rule = f"be {order or '[batch, sequence,'} features]"
                got, remedy = f"shape {array.shape}", "add or join dims"
                raise ValueError(message(_WHERE, name, rule, got, remedy))
            if array is not None:
                with part_of(_WHERE, x=name):
                    size = self.self_attention.in_features
                    _arguments.check_last(_WHERE, array, size, "hidden_size")
        if (encoded is None) != (self.cross_attention is None):
            rule, remedy = "be given to a decoder layer alone", "or change layer_type"
            got = f"{'None' if encoded is None else encoded.shape} in an "
            got += f"{self.layer_type} layer".replace("an d", "a d")
            raise ValueError(message(_WHERE, "encoded", rule, got, remedy))
        if self.hidden_dropout is not None:
            dims = tuple(self.hidden_dropout.broadcast_dims)
            check_dims(_WHERE, "hidden_dropout_dims", dims, inputs.ndim)

    def _bias(self, tokens: int, positions: Any, decode: bool) -> Array | None:
        """The bias of the self attention, for slots of the cache in decoding."""
        if self.relative_embedding is None:
            return None
        both, keys, places = self.layer_type == "encoder", tokens, {}
        if decode:
            slots, held = self.self_attention.slots(tokens)
            keys, places = len(held), {"q_positions": slots, "k_positions": held}
        elif positions is not None:
            places = {"q_positions": positions, "k_positions": positions}
        embedding: Any = self.relative_embedding
        return embedding(tokens, keys, both, **places)

    def _add(
        self, x: Array, found: Any, deterministic: bool | None, own: bool = True
    ) -> Array:
        """The residual connection of one branch."""
        branch, normed = found if self.post_layernorm else (found, None)
        branch = drop(self.hidden_dropout, branch, deterministic)
        branch = drop(self.drop_path, branch, deterministic)
        total = branch + (x if normed is None else normed).astype(branch.dtype)
        return sharding.constrain(total, self._axes()) if own else total
