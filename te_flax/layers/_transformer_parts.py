"""How a transformer layer makes its parts out of its own arguments."""

import inspect
from typing import Any

from flax import nnx

from te_flax.errors import message, part_of
from te_flax.layers._projections import LOW_RANK_SCOPES
from te_flax.layers.dense_general import DEFAULT_KERNEL_INIT, DenseGeneral
from te_flax.layers.layer_norm_mlp import LayerNormMLP
from te_flax.layers.multi_head_attention import MultiHeadAttention
from te_flax.layers.norm import NORMS
from te_flax.layers.relative_position_biases import RelativePositionBiases

_WHERE = "TransformerLayer"
# Argument of the part -> argument of the layer; one name where they are the same.
_SHARED = (
    "layernorm_type",
    "zero_centered_gamma",
    "use_bias",
    "bias_init",
    "scale_axes",
    "ln_bias_axes",
    "low_rank_adaptation_dim",
    "low_rank_adaptation_alpha",
    "transpose_batch_sequence",
    "dtype",
    "param_dtype",
    "rngs",
)
_ATTENTION = {name: name for name in _SHARED} | {
    "num_kv_heads": "num_gqa_groups",
    "dropout_rate": "attention_dropout",
    "float32_logits": "float32_attention_logits",
    "return_layernorm_output": "apply_residual_connection_post_layernorm",
    "layernorm_epsilon": "layernorm_epsilon",
    "dropout_rng_name": "dropout_rng_name",
    "enable_rotary_pos_emb": "enable_rotary_pos_emb",
    "rotary_pos_emb_windows": "rotary_pos_emb_windows",
    "rotary_pos_emb_group_method": "rotary_pos_emb_group_method",
    "low_rank_adaptation_scope": "low_rank_adaptation_scope",
    "fuse_qkv_params": "fuse_qkv_params",
    "scale_attn_logits": "scale_attn_logits",
    "scaled_query_init": "scaled_query_init",
    "window_size": "window_size",
    "softmax_type": "softmax_type",
    "input_axes": "input_axes",
    "dot_input_axes": "dot_input_axes",
}
_SELF = {
    "attn_mask_type": "self_attn_mask_type",
    "attn_bias_type": "self_attn_bias_type",
    "score_mod": "score_mod",
}
_MLP = {name: name for name in _SHARED} | {
    "intermediate_dim": "mlp_hidden_size",
    "epsilon": "layernorm_epsilon",
    "activations": "mlp_activations",
    "activation_params": "mlp_activation_params",
    "return_layernorm_output": "apply_residual_connection_post_layernorm",
    "intermediate_dropout_rate": "intermediate_dropout",
    "intermediate_dropout_rng_name": "dropout_rng_name",
    "intermediate_hidden_dropout_dims": "intermediate_dropout_dims",
    "kernel_axes_1": "mlp_kernel_axes_1",
    "kernel_axes_2": "mlp_kernel_axes_2",
    "bias_axes_1": "mlp_bias_axes_1",
    "bias_axes_2": "mlp_bias_axes_2",
    "layernorm_input_axes": "input_axes",
    "dot_1_input_axes": "dot_input_axes",
    "dot_2_input_axes": "mlp_axes",
}
# Arguments of the parts that a transformer layer does not take under their names.
REFUSED = (
    *(part for part, own in (_ATTENTION | _SELF).items() if part != own),
    "attention_type",
    "input_layernorm",
    "kernel_init",
    "decode",
    "axis",
    "enable_low_rank_adaptation",
    "kernel_axes",
    "bias_axes",
)


def make_attention(
    given: dict[str, Any], more: dict[str, Any], cross: bool = False
) -> MultiHeadAttention:
    """The self attention of a layer, or its cross attention.

    Args:
        given: the layer's arguments.
        more: those for MultiHeadAttention that it takes under their names there;
            ALiBi is for the self attention, as the relative biases.
        cross: which of both.
    """
    names = _ATTENTION if cross else _ATTENTION | _SELF
    if cross:
        more = {name: value for name, value in more.items() if name != "alibi_slopes"}
    init = given["mha_kernel_init"]
    if init is None:
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
    parts = {part: own for part, own in names.items() if part != own}
    parts |= {"num_heads": "num_attention_heads", "in_features": "hidden_size"}
    with part_of(_WHERE, qkv_features="hidden_size", **parts):
        return MultiHeadAttention(
            given["num_attention_heads"],
            given["hidden_size"],
            attention_type="cross" if cross else "self",
            # What a cross attention reads was never normalised as a sum.
            input_layernorm=cross or not given["output_layernorm"],
            kernel_init=init,
            **{part: given[own] for part, own in names.items()},
            **more,
        )


def make_mlp(given: dict[str, Any], more: dict[str, Any]) -> LayerNormMLP:
    """The feed-forward block of a layer."""
    dense = inspect.signature(DenseGeneral.__init__).parameters
    scope = LOW_RANK_SCOPES[given["low_rank_adaptation_scope"]]
    options = {part: given[own] for part, own in _MLP.items()}
    options |= {name: value for name, value in more.items() if name in dense}
    with part_of(_WHERE, **{part: own for part, own in _MLP.items() if part != own}):
        return LayerNormMLP(
            given["hidden_size"],
            kernel_init=given["mlp_kernel_init"] or DEFAULT_KERNEL_INIT,
            enable_low_rank_adaptation="mlp" in scope,
            **options,
        )


def make_relative_embedding(given: dict[str, Any]) -> Any:
    """The layer that makes the relative position biases, or None."""
    if not given["enable_relative_embedding"]:
        return nnx.data(None)
    if given["relative_embedding"] is not None:
        return given["relative_embedding"]
    init = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform")
    return RelativePositionBiases(
        32,
        128,
        given["num_attention_heads"],
        embedding_init=init,
        dtype=given["dtype"],  # of the queries: cuDNN adds no other bias
        param_dtype=given["param_dtype"],
        rngs=given["rngs"],
    )


def make_output_norm(given: dict[str, Any]) -> Any:
    """The norm of the result, or None."""
    if not given["output_layernorm"]:
        return nnx.data(None)
    kind = given["layernorm_type"]
    names = ("zero_centered_gamma", "scale_axes", "input_axes")
    names += ("transpose_batch_sequence", "dtype", "param_dtype", "rngs")
    options: dict[str, Any] = {name: given[name] for name in names}
    if kind == "layernorm":
        options["bias_axes"] = given["ln_bias_axes"]
    with part_of(_WHERE, bias_axes="ln_bias_axes", epsilon="layernorm_epsilon"):
        epsilon = given["layernorm_epsilon"]
        return NORMS[kind](given["hidden_size"], epsilon=epsilon, **options)


def cross_limits(
    layer_type: str, mask: Any, segment_ids: tuple, lengths: tuple, positions: tuple
) -> dict[str, Any]:
    """What limits the cross attention of a call; raises ValueError.

    Args:
        layer_type: "encoder" or "decoder".
        mask: of the cross attention.
        segment_ids: of inputs and of encoded, as the next ones; each may be None.
        lengths: how many tokens count.
        positions: of the tokens.
    """
    own, encoded = segment_ids
    name, got = "encoded_segment_ids", type(encoded).__name__
    if layer_type == "encoder":
        others = {name: encoded, "encoded_positions": positions[1]}
        for name, value in others.items():
            if value is not None:
                rule, remedy = "be given to a decoder layer alone", "leave it out"
                got = type(value).__name__
                raise ValueError(message(_WHERE, name, rule, got, remedy))
    elif encoded is not None and own is None:
        rule, remedy = "be given with segment_ids", "pass those of the inputs too"
        raise ValueError(message(_WHERE, name, rule, got, remedy))
    elif own is not None and encoded is None and mask is None:
        rule = "be given to a decoder layer with segment_ids"
        remedy = "pass the segments of encoded, or an encoder_decoder_mask"
        raise ValueError(message(_WHERE, name, rule, got, remedy))
    return {
        "mask": mask,
        "segment_ids": None if encoded is None else segment_ids,
        "positions": None if all(p is None for p in positions) else positions,
        "q_seqlen": None if lengths[1] is None else lengths[0],
        "kv_seqlen": lengths[1],
    }
