"""MultiHeadAttention: equal to flax.nnx's without a recipe, trained with one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import mha, projections, step
from _dense import data
from _fused import RECIPES
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
        y, ours = want(*arrays, **call), got(*arrays, **call)
    assert (y.shape, y.dtype) == (ours.shape, ours.dtype)
    wide = np.asarray(y).astype(np.float64)
    share = 2.0**-6 if y.dtype == jnp.bfloat16 else ROUNDING
    close_to(np.asarray(ours).astype(np.float64), wide, share * np.abs(wide).max())


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_under_every_recipe(recipe):
    layer = mha(input_layernorm=True, attn_mask_type="causal", num_kv_heads=2)
    x = data((B, T, F))
    y, (dx,), grads = step(layer, (x,), data((B, T, F), 1), recipe)
    plain, (dplain,), _ = step(layer, (x,), data((B, T, F), 1), None)
    for a, b in ((y, plain), (dx, dplain)):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 0 < error < (0.5 if "nvfp4" in recipe else 0.1), error
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    for name, gemm in projections(layer).items():
        pushed = [int((h[...] > 0).sum()) for h in (gemm.fp8.x, gemm.fp8.dy)]
        assert pushed == [recipe == "delayed_scaling"] * 2, name
