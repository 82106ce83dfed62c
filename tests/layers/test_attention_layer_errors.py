"""Bad input to the attention layers: who refuses it, and with which words."""

import jax.numpy as jnp
import pytest
from _attention import block, mha
from _dense import data
from flax import nnx

import te_flax as te

B, T, F = 2, 6, 32
X = data((B, T, F))


def refuses(text, call, error=(ValueError, TypeError)):
    with pytest.raises(error, match=f"^{text}"):
        call()


CHOICES = {
    "attention_type": "'self', 'cross'",
    "rotary_pos_emb_group_method": "'consecutive', 'alternate'",
    "low_rank_adaptation_scope": "'none', 'all', 'qkv_proj', .*",
    "layernorm_type": "'layernorm', 'rmsnorm'",
    "attn_mask_type": "'no_mask', 'padding', .*",
    "attn_bias_type": "None, 'no_bias', 'pre_scale_bias', 'post_scale_bias'",
    "softmax_type": "'vanilla', 'off_by_one', 'learnable'",
    "implementation": "None, 'cudnn', 'chunked', 'reference'",
}


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choices(name):
    text = f"MultiHeadAttention: {name} must be one of {CHOICES[name]}, got 'own'; ch"
    refuses(text, lambda: mha(**{name: "own"}))


@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ((3, 32), {}, "qkv_features must be a multiple of num_heads 3, got 32; change"),
        ((0, 32), {}, "num_heads must be a positive int, got 0"),
        ((4, 32), {"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4, got 3"),
        ((4, 32), {"num_kv_heads": 0}, "num_kv_heads must be a positive int, got 0"),
        (
            (4, 32, 12),
            {"enable_rotary_pos_emb": True},
            "qkv_features must give heads of even size for RoPE, got head_dim 3",
        ),
        ((4, 32), {"in_kv_features": 8}, "in_kv_features must be in_features where"),
        ((4, 32), {"rotary_pos_emb_windows": (0, 1)}, "rotary_pos_emb_windows must be"),
        ((4, 32), {"window_size": (-2, 0)}, "window_size must have integers >= -1"),
        ((4, 32), {"window_size": (1, 2, 3)}, "window_size must be None, an integer"),
        ((4, 32), {"dropout_rate": 1.0}, "dropout_rate must be .* got 1.0; use 0.0"),
        ((4, 32), {"layernorm_epsilon": -1}, "layernorm_epsilon must be .* got -1"),
        (
            (4, 32),
            {"layernorm_epsilon": -1, "input_layernorm": True},
            "layernorm_epsilon must be .* got -1",
        ),
        ((4, 32), {"recipe": "mxfp8"}, "recipe must be a recipe"),
        ((4, 32), {"alibi_slopes": (1, 2)}, "alibi_slopes must be .* 4 constants, one"),
        ((4, 32), {"alibi_slopes": "own"}, "alibi_slopes must be None, True or 4 cons"),
        (
            (4, 32),
            {"kernel_axes": ("a",)},
            "kernel_axes must be an argument of this la",
        ),
        (
            (4, 32),
            {"qkv_kernel_axes": ("a", "b")},
            r"qkv_kernel_axes must name each of the 3 dims \(in, heads, head_dim\)",
        ),
        (
            (4, 32),
            {"out_bias_axes": ("a", "b")},
            "out_bias_axes must name each of the",
        ),
        (
            (4, 32),
            {"num_kv_heads": 2, "kv_bias_axes": ("a",)},
            "kv_bias_axes must name",
        ),
    ],
)
def test_arguments_of_multi_head_attention(sizes, options, text):
    refuses(f"MultiHeadAttention: {text}", lambda: mha(*sizes, **options))


@pytest.mark.parametrize(
    ("options", "call", "text"),
    [
        ({}, lambda m: m(X[..., :8]), "inputs_q must hold in_features 32 in its last"),
        ({}, lambda m: m(X.astype(int)), "inputs_q must be a float32, bfloat16 or"),
        ({}, lambda m: m(X[0, 0]), "inputs_q must have at least 2 dims"),
        (
            {"transpose_batch_sequence": True},
            lambda m: m(X[0]),
            "inputs_q must have at least 3 dims",
        ),
        (
            {},
            lambda m: m(X, X),
            "inputs_k must be left out of self attention with a sh",
        ),
        ({}, lambda m: m(X, None, X), "inputs_k must be given with inputs_v, got None"),
        (
            {"attention_type": "cross"},
            lambda m: m(X),
            "inputs_k must be given for cross attention, got None; build a 'self'",
        ),
        (
            {"attention_type": "cross"},
            lambda m: m(X, X, X),
            "inputs_v must be left out where keys and values share a kernel",
        ),
        (
            {"attention_type": "cross"},
            lambda m: m(X, X[..., :8]),
            "inputs_k must hold in_kv_features 32 in its last axis, got",
        ),
        ({}, lambda m: m(X, mask=jnp.ones((3, 1, T, T))), "mask must broadcast to"),
        ({}, lambda m: m(X, bias=jnp.ones((B, 4, T, 2))), "bias must broadcast to"),
        (
            {"attn_mask_type": "padding"},
            lambda m: m(X),
            "attn_mask_type must come with q_seqlen, kv_seqlen or segment_ids",
        ),
        (
            {"attn_bias_type": "no_bias"},
            lambda m: m(X, bias=jnp.ones((1, 4, T, T))),
            "bias must be None where attn_bias_type is 'no_bias'",
        ),
        (
            {"max_segments_per_seq": 1},
            lambda m: m(X, segment_ids=jnp.full((B, T), 2)),
            r"segment_ids must lie in \[0, 1\], got 2; 0 is padding",
        ),
        (
            {"input_axes": ("batch",)},
            lambda m: m(X),
            "input_axes must name each of the 3 dims of x",
        ),
    ],
)
def test_inputs_of_multi_head_attention(options, call, text):
    refuses(f"MultiHeadAttention: {text}", lambda: call(mha(**options)))


def test_the_weights_are_not_kept():
    with pytest.raises(NotImplementedError, match=r"^MultiHeadAttention: module"):
        mha()(X, sow_weights=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layer_type": "both"}, "layer_type must be one of 'encoder', 'decoder', got"),
        ({"hidden_dropout": 1}, "hidden_dropout must be a finite number >= 0 and < 1"),
        ({"attention_dropout": -1}, "attention_dropout must be .* got -1; use 0.0"),
        ({"intermediate_dropout": 2}, "intermediate_dropout must be .* got 2; use 0.0"),
        ({"drop_path": 1.0}, "drop_path must be .* got 1.0; use 0.0 for none"),
        ({"hidden_dropout_dims": 1}, "hidden_dropout_dims must be a tuple of ints"),
        ({"num_gqa_groups": 3}, "num_gqa_groups must divide num_heads 4, got 3"),
        ({"self_attn_mask_type": "own"}, "self_attn_mask_type must be one of"),
        ({"self_attn_bias_type": "own"}, "self_attn_bias_type must be one of"),
        ({"mlp_activations": "own"}, "mlp_activations must be names of"),
        ({"layernorm_type": "own"}, "layernorm_type must be one of"),
        ({"layernorm_epsilon": -1}, "layernorm_epsilon must be .* got -1"),
        ({"low_rank_adaptation_scope": "own"}, "low_rank_adaptation_scope must be one"),
        ({"mlp_kernel_axes_1": ("a",)}, "mlp_kernel_axes_1 must name each of the 2"),
        ({"mlp_bias_axes_2": ("a", "b")}, "mlp_bias_axes_2 must name each of the 1"),
        ({"attn_mask_type": "causal"}, "attn_mask_type must be an argument of this la"),
        ({"kernel_init": None}, "kernel_init must be an argument of this layer"),
        ({"no_such": 1}, "no_such must be an argument of this layer"),
    ],
)
def test_arguments_of_a_transformer_layer(options, text):
    refuses(f"TransformerLayer: {text}", lambda: block(**options))


def test_sizes_of_a_transformer_layer():
    text = "TransformerLayer: hidden_size must be a multiple of num_heads 5, got 32"
    refuses(text, lambda: block(32, 64, 5))
    text = "TransformerLayer: mlp_hidden_size must be a positive int, got 0"
    refuses(text, lambda: block(32, 0, 4))


@pytest.mark.parametrize(
    ("options", "call", "text"),
    [
        (
            {},
            lambda m: m(X[0]),
            r"inputs must be \[batch, sequence, features\], got sh",
        ),
        ({}, lambda m: m(X[..., :8]), "inputs must hold hidden_size 32 in its last"),
        ({}, lambda m: m(X, X), "encoded must be given to a decoder layer alone, got"),
        (
            {"layer_type": "decoder"},
            lambda m: m(X),
            "encoded must be given to a decoder",
        ),
        (
            {"layer_type": "decoder"},
            lambda m: m(X, X[..., :8]),
            "encoded must hold hidden_size 32",
        ),
        (
            {"hidden_dropout_dims": (3,)},
            lambda m: m(X),
            "hidden_dropout_dims must be dims of x, which has 3",
        ),
        ({}, lambda m: m(X, None, jnp.ones((3, 1, T, T))), "mask must broadcast to"),
    ],
)
def test_inputs_of_a_transformer_layer(options, call, text):
    refuses(f"TransformerLayer: {text}", lambda: call(block(**options)))


def biases(*sizes, **kwargs):
    return te.RelativePositionBiases(*sizes, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: biases(7, 128, 4), "num_buckets must be even and >= 4, got 7; use 32"),
        (lambda: biases(2, 128, 4), "num_buckets must be even and >= 4, got 2; use 32"),
        (lambda: biases(32, 16, 4), "max_distance must be > num_buckets / 2 = 16, got"),
        (lambda: biases(32, 128, 0), "num_heads must be a positive int, got 0"),
        (lambda: biases(32, 128, 4)(0, 4), "q_seqlen must be a positive int, got 0"),
        (
            lambda: biases(32, 128, 4)(3, 4, q_positions=jnp.arange(2)),
            r"q_positions must have shape \[3\] or \[batch, 3\], got \(2,\); give",
        ),
        (lambda: biases(32, 128, 4, embedding_axes=("a",)), "embedding_axes must name"),
    ],
)
def test_relative_position_biases(call, text):
    refuses(f"RelativePositionBiases: {text}", call)


Q = jnp.ones((B, T, 4, 8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: te.rotary_embedding(Q[..., :7]),
            "x must be BTNH with an even last ax",
        ),
        (lambda: te.rotary_embedding(Q[0]), "x must be BTNH with an even last axis"),
        (
            lambda: te.rotary_embedding(Q.astype(int)),
            "x must be a float array, got int",
        ),
        (
            lambda: te.rotary_embedding(Q, jnp.ones(T)),
            "positions must be integers, got",
        ),
        (
            lambda: te.rotary_embedding(Q, jnp.arange(3)),
            r"positions must have shape \(6",
        ),
        (lambda: te.rotary_embedding(Q, layout="NTBH"), "layout must be one of 'BTNH'"),
        (
            lambda: te.rotary_embedding(Q, group_method="own"),
            "group_method must be one",
        ),
        (
            lambda: te.rotary_embedding(Q, windows=(1,)),
            "windows must be two numbers > 0",
        ),
    ],
)
def test_rotary_embedding(call, text):
    refuses(f"rotary_embedding: {text}", call)


def attend(**kwargs):
    return te.DotProductAttention(4, 8, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: attend()(Q[..., :4], Q, Q), r"query must end in \(4, 8\), heads and"),
        (
            lambda: attend()(Q, Q[:, :, :2], Q),
            r"key must end in \(4, 8\), heads and he",
        ),
        (
            lambda: attend(scale_factor=float("nan")),
            "scale_factor must be a finite Pyt",
        ),
        (lambda: attend(num_kv_heads=3), "num_kv_heads must divide num_heads 4, got 3"),
        (
            lambda: attend(softmax_type="learnable", softmax_offset_axes=()),
            "softmax_offset_axes must name each of the 1 dims",
        ),
        (
            lambda: attend()(Q, Q, Q, dropout_rate=0.1),
            "dropout_rng must be given with a dropout_rate, got None; pass a key",
        ),
    ],
)
def test_dot_product_attention(call, text):
    refuses(f"DotProductAttention: {text}", call)


SHAPE = r"be \[B, pages\] of keys and values alike, got"


@pytest.mark.parametrize(
    ("pages", "rule"),
    [
        ([[0, 1, 2]] * B, r"lie in \[-1, 1\], got 2; -1 is no page"),
        ([[0, -2, 1]] * B, r"lie in \[-1, 1\], got -2; -1 is no page"),
        ([[0, 1, 1]], rf"{SHAPE} \[\(1, 3\)"),
        ([[0.0, 1.0]] * B, "be int32, got float32; cast it first"),
        ([0, 1], rf"{SHAPE} \[\(2,\)"),
    ],
)
def test_pages(pages, rule):
    layer = te.DotProductAttention(4, 8, rngs=nnx.Rngs(0))
    q = data((B, T, 4, 8))
    options = {"page_table": jnp.array(pages), "kv_seqlen": jnp.array([3, 3])}
    text = f"DotProductAttention: page_table must {rule}"
    refuses(text, lambda: layer(q, q, q, **options))


def test_pages_come_with_lengths():
    layer = te.DotProductAttention(4, 8, rngs=nnx.Rngs(0))
    q = data((B, T, 4, 8))
    text = "DotProductAttention: page_table must come with kv_seqlen, got none"
    refuses(text, lambda: layer(q, q, q, page_table=jnp.zeros((B, 1), int)))
