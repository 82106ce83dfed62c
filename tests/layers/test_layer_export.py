"""jax.export of a whole layer under each recipe, and use from Flax Linen."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import block
from _dense import data
from _fused import RECIPES, context
from flax import nnx
from flax.nnx import bridge

import te_flax as te

X = data((2, 4, 32))
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# nvfp4's stochastic rounding is of the backward pass alone: nvfp4_nearest has the same
# forward pass. Float32 scales of blocks differ by an attribute.
NAMES = [None, *(r for r in RECIPES if r not in ("nvfp4", "block_float32_scales"))]


@pytest.mark.parametrize("recipe", NAMES)
def test_an_exported_layer_gives_the_same_numbers(recipe):
    layer = block(**QUIET, enable_relative_embedding=False)
    layer.eval()
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def forward(params, x):
        return nnx.merge(graph, params, rest)(x)

    with context(recipe), te.kernels("*=reference"):
        run = jax.jit(forward)
        exported = jax.export.export(run)(params, X)
        want = run(params, X)
    got = exported.call(params, X)  # outside of the recipe's context
    np.testing.assert_array_equal(got, want)


def test_a_layer_inside_linen():
    """Its state travels in Linen's collections and changes as it does in NNX."""
    sizes = (32, 64, 4)
    linen = bridge.ToLinen(te.TransformerLayer, args=sizes, kwargs=QUIET)
    with context("delayed_scaling"):
        variables = linen.init(jax.random.key(0), X)
        run = jax.jit(lambda v, x: linen.apply(v, x, mutable=["Fp8Stat"]))
        y, changed = run(variables, X)
        y, changed = run({**variables, **changed}, X)
    layer = block(**QUIET)
    nnx.update(layer, nnx.State(variables["params"]))
    with context("delayed_scaling"):
        for _ in range(2):
            want = nnx.jit(lambda m, x: m(x))(layer, X)
    np.testing.assert_array_equal(y, want)
    history = changed["Fp8Stat"]["mlp"]["wi"]["fp8"]["x"]
    np.testing.assert_array_equal(history, layer.mlp.wi.fp8.x[...])
    assert (np.asarray(history)[:2] > 0).all()

    def loss(params):
        return jnp.sum(run({**variables, "params": params}, X)[0] ** 2)

    with context("delayed_scaling"):
        grads = jax.grad(loss)(variables["params"])
    assert all(np.abs(g).sum() > 0 for g in jax.tree.leaves(grads))
