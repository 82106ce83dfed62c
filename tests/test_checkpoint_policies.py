"""What nnx.remat runs again under each policy, counted in the jaxpr of a gradient."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax import checkpoint_policies

RECIPES = [te.MXFP8BlockScaling(), te.DelayedScaling(), te.Float8CurrentScaling()]
QUANTIZERS = ("te_quantize", "te_norm_fwd", "te_act_fwd")


def count(jaxpr, found=None):
    """How often each te_flax primitive occurs, inner jaxprs included."""
    found = collections.Counter() if found is None else found
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("te_"):
            found[equation.primitive.name] += 1
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                count(getattr(inner, "jaxpr", inner), found)
    return found


def gradient(layer, x, policy, remat=True):
    """A function of (state, x) that returns the gradients, and its arguments."""
    graph, state = nnx.split(layer)

    def call(layer, x):
        return layer(x)

    run = nnx.remat(call, policy=policy) if remat else call

    def loss(layer, x):
        return jnp.sum(run(layer, x) ** 2)

    def gradients(state, x):
        return nnx.state(te.value_and_grad(loss)(nnx.merge(graph, state), x)[1])

    return gradients, (state, x)


def quantized(layer, x, policy, remat=True):
    """How often anything is quantized."""
    fn, args = gradient(layer, x, policy, remat)
    found = count(jax.make_jaxpr(fn)(*args).jaxpr)
    return sum(n for name, n in found.items() if name.startswith(QUANTIZERS)), found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_saved_operands_are_not_quantized_twice(recipe):
    layer = te.LayerNormMLP(64, 96, recipe=recipe, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (32, 64))
    once, _ = quantized(layer, x, None, remat=False)
    saved, found = quantized(layer, x, checkpoint_policies.save_quantized())
    again, _ = quantized(layer, x, jax.checkpoint_policies.nothing_saveable)
    assert saved == once
    assert again > once
    products = sum(n for name, n in found.items() if name.startswith("te_gemm"))
    assert products == 7  # the first GEMM once more: its result is not saved


@pytest.mark.parametrize(
    ("policy", "products"),
    [
        (checkpoint_policies.save_quantized("ffn1"), 6),
        (checkpoint_policies.save_quantized_and_gemms(), 6),
        (checkpoint_policies.save_gemms, 6),
        (jax.checkpoint_policies.save_only_these_names("own", "ffn1"), 6),
    ],
)
def test_saved_products_are_not_computed_twice(policy, products):
    layer = te.LayerNormMLP(
        64, 96, quantization_checkpoint_name="own", rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (32, 64))
    with te.autocast(te.MXFP8BlockScaling()):
        _, found = quantized(layer, x, policy)
    assert sum(n for name, n in found.items() if name.startswith("te_gemm")) == products


EXACT = [None, *RECIPES, te.Float8BlockScaling(), te.MXFP6BlockScaling()]
EXACT += [pytest.param(te.NVFP4BlockScaling(), marks=pytest.mark.slow)]  # large


@pytest.mark.parametrize("recipe", EXACT, ids=lambda r: type(r).__name__)
def test_policies_change_no_bit(recipe):
    layer = te.LayerNormMLP(64, 96, recipe=recipe, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (32, 64))
    plain, args = gradient(layer, x, None, remat=False)
    want = jax.tree.leaves(jax.jit(plain)(*args))
    for policy in (
        checkpoint_policies.save_quantized("ffn1"),
        checkpoint_policies.save_quantized(),
        jax.checkpoint_policies.nothing_saveable,
    ):
        fn, args = gradient(layer, x, policy)
        for a, b in zip(jax.tree.leaves(jax.jit(fn)(*args)), want, strict=True):
            np.testing.assert_array_equal(a, b)
