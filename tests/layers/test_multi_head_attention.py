"""MultiHeadAttention: equal to flax.nnx's without a recipe, trained with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import forward, held_to_format, mha, projections, pushed_once, step
from _dense import data
from _fused import context
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to

B, T, F = 2, 6, 32
# Products of at most 32 terms, softmax of at most 6: a few roundings each, which
# later products carry on without growth.
ROUNDING = 64 * 2.0**-24


def nnx_options(**options):
    return {"num_heads": 4, "in_features": F, "decode": False} | options


NNX = {
    "self": ({}, (1,), {}),
    "causal": ({}, (1,), {"is_causal": True}),
    "masked": ({}, (1,), {"mask": nnx.make_causal_mask(jnp.ones((B, T)))}),
    "grouped": ({"num_kv_heads": 2}, (1,), {}),
    "normalised": ({"normalize_qk": True}, (1,), {}),
    "no bias": ({"use_bias": False, "out_features": 24}, (1,), {}),
    "cross": ({"in_kv_features": 16, "qkv_features": 64}, (1, 2), {}),
    "three": ({"in_kv_features": 16}, (1, 2, 2), {}),
    "batches": ({}, (3,), {}),
    "bfloat16": ({"dtype": jnp.bfloat16}, (1,), {}),
}
INPUTS = {1: data((B, T, F)), 2: data((B, 5, 16), 1), 3: data((2, 3, T, F), 2)}


@pytest.mark.parametrize("name", NNX)
def test_equals_nnx_given_the_same_weights(name):
    options, inputs, call = NNX[name]
    want = nnx.MultiHeadAttention(**nnx_options(**options), rngs=nnx.Rngs(0))
    options = {k: v for k, v in nnx_options(**options).items() if k != "decode"}
    got = te.MultiHeadAttention(**options, fuse_qkv_params=False, rngs=nnx.Rngs(1))
    state = nnx.state(want, nnx.Param)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(got, nnx.Param))
    draw = nnx.initializers.normal(0.2)
    keys = jax.random.split(jax.random.key(3), len(jax.tree.leaves(state)))
    leaves, treedef = jax.tree.flatten(state)
    drawn = [a + draw(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
    for layer in (want, got):
        nnx.update(layer, jax.tree.unflatten(treedef, drawn))
    arrays = [INPUTS[i] for i in inputs]
    with jax.numpy_dtype_promotion("standard"):
        static = {k: v for k, v in call.items() if k == "is_causal"}
        masks = {k: v for k, v in call.items() if k == "mask"}
        y, ours = (forward(m, *arrays, static=static, **masks) for m in (want, got))
    assert (y.shape, y.dtype) == (ours.shape, ours.dtype)
    wide = np.asarray(y).astype(np.float64)
    share = 2.0**-6 if y.dtype == jnp.bfloat16 else ROUNDING
    close_to(np.asarray(ours).astype(np.float64), wide, share * np.abs(wide).max())


PARTS = {"packed": {}, "grouped": {"num_kv_heads": 2}}


@pytest.mark.parametrize(
    ("name", "recipe"), [("packed", "delayed_scaling"), ("grouped", "mxfp8")]
)
def test_it_is_its_parts_to_the_bit(name, recipe):
    """te.LayerNormDenseGeneral, te.dot_product_attention and te.DenseGeneral."""
    options = PARTS[name] | {"input_layernorm": True, "attn_mask_type": "causal"}
    layer = mha(**options)
    x = data((B, T, F))
    again = nnx.clone(layer)
    with context(recipe):
        for _ in range(2):  # delayed scaling: with the scales of the first call
            got, want = layer(x), by_hand(again, x)
            np.testing.assert_array_equal(got, want)
    for path, gemm in projections(layer).items():
        np.testing.assert_array_equal(gemm.fp8.x, projections(again)[path].fp8.x)


def by_hand(layer, x):
    if layer.packed:
        q, k, v = jnp.moveaxis(layer.qkv(x), -3, 0)
    else:
        q, h = layer.query(x)
        k, v = jnp.moveaxis(layer.kv(h), -3, 0)
    return layer.out(te.dot_product_attention(q, k, v, mask_type="causal"))


def test_it_trains_under_a_recipe_with_everything_on():
    layer = mha(
        input_layernorm=True,
        attn_mask_type="causal",
        num_kv_heads=2,
        enable_rotary_pos_emb=True,
        normalize_qk=True,
        low_rank_adaptation_scope="all",
        return_layernorm_output=False,
    )
    x, dy = data((B, T, F)), data((B, T, F), 1)
    y, (dx,), grads = step(layer, (x,), dy, "delayed_scaling")
    plain, (dplain,), _ = step(layer, (x,), dy)
    held_to_format("delayed_scaling", ((y, plain), (dx, dplain)))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    pushed_once(layer, "delayed_scaling")


def test_gradients_of_q_k_and_v_are_joined_in_one_pass():
    layer = mha(decode=False)
    graphdef, state = nnx.split(layer)

    def loss(state, x):
        return nnx.merge(graphdef, state)(x).sum()

    x = data((B, T, F))
    program = jax.jit(jax.grad(loss, argnums=1)).lower(state, x).as_text()
    assert "stablehlo.concatenate" in program
    assert "stablehlo.pad" not in program


def test_evaluation_changes_no_state():
    layer = mha(attn_mask_type="causal")
    layer.eval()
    before = jax.tree.leaves(nnx.state(layer))
    with context("delayed_scaling"):
        layer(data((B, T, F)))
    for a, b in zip(before, jax.tree.leaves(nnx.state(layer)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_norms_output_is_returned_when_asked_for():
    layer = mha(input_layernorm=True, return_layernorm_output=True)
    x = data((B, T, F))
    y, h = layer(x)
    norm = nnx.LayerNorm(F, use_fast_variance=False, rngs=nnx.Rngs(0))
    close_to(h, np.asarray(norm(x)), 2.0**-20 * float(jnp.abs(h).max()))
    bare = mha(return_layernorm_output=True)
    assert (bare(x)[1] == x).all()
    assert y.shape == x.shape


@pytest.mark.parametrize("mode", ["simple", "tree"])
def test_graph_modes(mode):
    with nnx.set_graph_updates(mode != "simple"), nnx.set_graph_mode(mode != "tree"):
        layer, x = mha(attn_mask_type="causal"), data((B, T, F))
        with context("delayed_scaling"):
            run = te.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2))
            # The tree mode of nnx.jit returns no changed state.
            value, _ = (nnx.jit(run) if mode == "simple" else run)(layer, x)
    assert np.isfinite(value)
    pushed_once(layer, "delayed_scaling")


def test_fp8_attention_keeps_its_statistics():
    """One amax of each of ten arrays a step; frozen ones in evaluation."""
    recipe = te.DelayedScaling(amax_history_len=4, fp8_attention=True)
    layer, x = mha(recipe=recipe, attn_mask_type="causal"), data((B, T, F))
    y, _, _ = step(layer, (x,), data((B, T, F), 1))
    for _ in range(2):
        y, _, _ = step(layer, (x,), data((B, T, F), 1))
    state = layer.core_attention.fp8
    assert state.forward.shape == (5, 4)
    for history in (state.forward, state.dy):
        assert ((np.asarray(history) > 0) == [True, True, True, False]).all()
    plain = mha(recipe=te.DelayedScaling(amax_history_len=4), attn_mask_type="causal")
    nnx.update(plain, nnx.state(layer, nnx.Param))
    held_to_format("delayed_scaling", ((y, plain(x)),))
    layer.eval()
    before = np.asarray(state.forward)
    layer(x)
    np.testing.assert_array_equal(state.forward, before)
