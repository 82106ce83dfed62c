"""TransformerLayer: its structure without a recipe, its training with one."""

import functools

import _plain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import (
    block,
    decoded,
    forward,
    held_to_format,
    params,
    pushed_once,
    step,
)
from _dense import RECIPES, data
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to

B, T, S, F = 2, 6, 5, 32
X, ENCODED, DY = data((B, T, F)), data((B, S, F), 1), data((B, T, F), 2)
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DEFAULTS = {
    "layernorm_type": "layernorm",
    "zero_centered_gamma": False,
    "enable_rotary_pos_emb": False,
    "rotary_pos_emb_windows": (1, 10000),
    "rotary_pos_emb_group_method": "consecutive",
    "window_size": None,
    "self_attn_mask_type": "causal",
    "scale_attn_logits": False,
    "mlp_activations": ("gelu",),
    "layer_type": "encoder",
    "apply_residual_connection_post_layernorm": False,
}
CASES = {
    "encoder": {},
    "decoder": {
        "layer_type": "decoder",
        "num_gqa_groups": 2,
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_windows": (2, 500),
        "scale_attn_logits": True,
        "layernorm_type": "rmsnorm",
        "low_rank_adaptation_scope": "all",
    },
    "post": {
        "self_attn_mask_type": "no_mask",
        "apply_residual_connection_post_layernorm": True,
        "output_layernorm": True,
        "fuse_qkv_params": False,
        "mlp_activations": ("silu", "linear"),
        "zero_centered_gamma": True,
        "use_bias": False,
    },
    "window": {
        "layer_type": "decoder",
        "window_size": (3, -1),
        "softmax_type": "learnable",
        "normalize_qk": True,
        "enable_relative_embedding": False,
        "enable_rotary_pos_emb": True,
        "rotary_pos_emb_group_method": "alternate",
        "apply_residual_connection_post_layernorm": True,
    },
}


def make(name, **more):
    layer = block(**QUIET, **(CASES[name] | more))
    inputs = (X, ENCODED) if layer.layer_type == "decoder" else (X,)
    return layer, inputs, params(layer, seed=4)


@pytest.mark.parametrize("name", CASES)
def test_both_passes_against_float64(name):
    """y, and the slope of the loss along random directions of all arrays."""
    layer, inputs, p = make(name)
    y, dx, grads = step(layer, inputs, DY)
    run = functools.partial(_plain.layer, o=DEFAULTS | CASES[name])
    wide = [np.asarray(a, np.float64) for a in inputs]
    want = run(p, x=wide[0], encoded=(*wide, None)[1])
    # Some twenty roundings of float32 lie between x and y, and a few products of 64.
    close_to(np.asarray(y, np.float64), want, 2.0**-17 * np.abs(want).max())
    leaves, tree = jax.tree.flatten((p, wide))
    flat = [np.asarray(g, np.float64) for g in jax.tree.leaves((_pure(grads), [*dx]))]
    assert [a.shape for a in flat] == [a.shape for a in leaves]
    rng = np.random.default_rng(5)
    for _ in range(4):
        direction = [rng.standard_normal(a.shape) for a in leaves]

        def loss(t, direction=direction):
            moved = [a + t * d for a, d in zip(leaves, direction, strict=True)]
            q, arrays = jax.tree.unflatten(tree, moved)
            y = run(q, x=arrays[0], encoded=(*arrays, None)[1])
            return float((y * np.asarray(DY, np.float64)).sum())

        h = 2.0**-16
        slope = (loss(h) - loss(-h)) / (2 * h)
        terms = [(g * d).sum() for g, d in zip(flat, direction, strict=True)]
        size = sum(np.linalg.norm(g) for g in flat)
        assert abs(sum(terms) - slope) <= 2.0**-15 * size, (sum(terms), slope)


def _pure(state):
    return nnx.to_pure_dict(state)


@pytest.mark.parametrize("name", [n for n in CASES if n != "post"])
def test_decoding_is_the_full_forward_token_by_token(name):
    layer, inputs, _ = make(name)
    full = forward(layer, *inputs)
    bound = 2.0**-19 * float(jnp.abs(full).max())
    close_to(decoded(layer, X, *inputs[1:], chunks=(4, 1, 1)), np.asarray(full), bound)


def test_sequence_first_is_the_same_layer():
    layer, inputs, _ = make("decoder")
    turned, _, _ = make("decoder", transpose_batch_sequence=True)
    nnx.update(turned, nnx.state(layer, nnx.Param))
    swapped = [jnp.swapaxes(a, 0, 1) for a in inputs]
    got, want = forward(turned, *swapped), forward(layer, *inputs)
    np.testing.assert_array_equal(jnp.swapaxes(got, 0, 1), want)
    step_by_step = decoded(turned, *swapped, chunks=(4, 1, 1))
    bound = 2.0**-19 * float(jnp.abs(want).max())
    close_to(jnp.swapaxes(step_by_step, 0, 1), np.asarray(want), bound)


@functools.cache
def unquantized():
    layer = block(**QUIET)
    y, (dx,), _ = step(layer, (X,), DY)
    return y, dx


@pytest.mark.parametrize(
    "recipe", [*RECIPES, "float8_block_scaling", "nvfp4_nearest", "mxfp6"]
)
def test_it_trains_under_every_recipe(recipe):
    layer = block(**QUIET)
    y, (dx,), grads = step(layer, (X,), DY, recipe)
    held_to_format(recipe, zip((y, dx), unquantized(), strict=True))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    pushed_once(layer, recipe)


def test_lengths_and_segments_hide_what_is_padding():
    layer = block(**QUIET, self_attn_mask_type="padding_causal")
    whole = forward(layer, X[:, :3], seqlen=jnp.array([3, 3]))
    bound = 2.0**-20 * float(jnp.abs(whole).max())
    padded = forward(layer, X, seqlen=jnp.array([3, 3]))
    close_to(padded[:, :3], np.asarray(whole), bound)
    packed = X[:, :3].reshape(1, T, F)
    ids, positions = jnp.array([[1, 1, 1, 2, 2, 2]]), jnp.array([[0, 1, 2, 0, 1, 2]])
    got = forward(layer, packed, segment_ids=ids, positions=positions)
    close_to(got, np.asarray(whole).reshape(1, T, F), bound)


def test_several_layers_share_a_relative_embedding():
    shared = te.RelativePositionBiases(32, 128, 4, rngs=nnx.Rngs(0))
    layers = nnx.List([block(relative_embedding=shared) for _ in range(2)])
    assert layers[0].relative_embedding is layers[1].relative_embedding
    count = len([p for p, _ in nnx.to_flat_state(nnx.state(layers, nnx.Param))])
    own = len(jax.tree.leaves(nnx.state(block(), nnx.Param)))
    assert count == 2 * own - 1


def test_relative_biases_have_the_dtype_of_the_queries():
    """cuDNN adds no others."""
    for dtype, expected in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        layer = block(**QUIET, dtype=dtype)
        assert layer.relative_embedding(3, 3).dtype == expected
        assert layer.relative_embedding.embedding.dtype == jnp.float32


def test_dropout_follows_the_mode_and_the_branches():
    layer = block(hidden_dropout=0.5, hidden_dropout_dims=(1,), attention_dropout=0.2)
    first, second = forward(layer, X), forward(layer, X)
    assert not (first == second).all()
    layer.eval()
    still = forward(layer, X)
    layer.train()
    assert (still == forward(layer, X, static={"deterministic": True})).all()
    gone = block(**QUIET, drop_path=1 - 1e-7)  # nothing but the residual stays
    np.testing.assert_array_equal(forward(gone, X), X)
    some = block(**QUIET, drop_path=0.5, intermediate_dropout=0.0)
    many = jnp.broadcast_to(X[:1], (64, T, F))
    y = forward(some, many)
    kept = {tuple(np.asarray(row).ravel()[:3].round(4)) for row in y}
    assert len(kept) == 4  # two branches, each there or not, whole examples alike
