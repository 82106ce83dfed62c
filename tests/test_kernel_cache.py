"""Kernels quantized once for several calls: the same bits, one push, fewer passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_checkpoint_policies import count

import te_flax as te
from te_flax.recipe.state import Fp8KernelCache

RECIPES = [
    te.DelayedScaling(amax_history_len=4),
    te.Float8CurrentScaling(),
    te.MXFP8BlockScaling(),
    te.Float8BlockScaling(),
    te.NVFP4BlockScaling(),
]
LAYERS = {
    "dense": lambda rngs: te.DenseGeneral(32, 48, rngs=rngs),
    "ln_dense": lambda rngs: te.LayerNormDenseGeneral(32, (2, 24), rngs=rngs),
    "mlp": lambda rngs: te.LayerNormMLP(32, 64, rngs=rngs),
    "gated": lambda rngs: te.LayerNormMLP(
        32, 64, activations=("silu", "linear"), rngs=rngs
    ),
    "callable": lambda rngs: te.LayerNormMLP(32, 64, activations=jnp.tanh, rngs=rngs),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)


def loss(model, x):
    return jnp.sum(model(x) ** 2)


def microbatches(model, xs):
    return [te.value_and_grad(loss)(model, x) for x in xs]


def step(model, xs):
    return microbatches(model, xs)


def step_cached(model, xs):
    with te.cache_quantized(model):
        return microbatches(model, xs)


def settled(layer, recipe, xs):
    """A layer whose kernel's amax is in its history already: its scale stays."""
    model = LAYERS[layer](nnx.Rngs(0))
    if isinstance(recipe, te.DelayedScaling):
        with te.autocast(recipe):
            nnx.jit(step)(model, xs)
    return model


@pytest.mark.parametrize(
    ("layer", "recipe"),
    [("mlp", recipe) for recipe in RECIPES]
    + [(name, RECIPES[2]) for name in LAYERS if name != "mlp"],
    ids=lambda p: p if isinstance(p, str) else type(p).__name__,
)
def test_microbatches_are_bit_equal(layer, recipe):
    xs = jax.random.normal(jax.random.key(0), (2, 8, 32))
    a, b = settled(layer, recipe, xs), settled(layer, recipe, xs)
    with te.autocast(recipe):
        want = nnx.jit(step)(a, xs)
        got = nnx.jit(step_cached)(b, xs)
    for p, q in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(p, q)


@each_recipe
def test_kernels_are_quantized_once(recipe):
    model = LAYERS["mlp"](nnx.Rngs(0))
    graph, state = nnx.split(model)
    xs = jnp.ones((3, 8, 32))

    def ops(step):
        def run(state):
            step(nnx.merge(graph, state), xs)

        with te.autocast(recipe):
            found = count(jax.make_jaxpr(run)(state).jaxpr)
        return sum(n for name, n in found.items() if name.startswith("te_quantize"))

    assert ops(step) - ops(step_cached) == 4


def test_delayed_scaling_pushes_the_kernel_once():
    recipe, xs = RECIPES[0], jnp.ones((3, 8, 32))
    model = LAYERS["dense"](nnx.Rngs(0))
    with te.autocast(recipe):
        step_cached(model, xs)
    pushed = {name: int((getattr(model.fp8, name)[...] > 0).sum()) for name in "x"}
    pushed["kernel"] = int((model.fp8.kernel[...] > 0).sum())
    assert pushed == {"x": 3, "kernel": 1}
    np.testing.assert_array_equal(
        model.fp8.kernel[...][0], jnp.abs(model.kernel[...]).max()
    )


def test_the_copies_are_gone_afterwards():
    model = nnx.Dict(a=LAYERS["mlp"](nnx.Rngs(0)), b=LAYERS["dense"](nnx.Rngs(1)))
    before = nnx.split(model)[0]

    def boom():
        with te.autocast(RECIPES[2]), te.cache_quantized(model):
            caches = nnx.to_flat_state(nnx.state(model, Fp8KernelCache))
            assert len(caches) == 3
            raise KeyError

    with pytest.raises(KeyError):
        boom()
    assert nnx.split(model)[0] == before


def test_layers_without_a_recipe_are_left_alone():
    model = LAYERS["dense"](nnx.Rngs(0))
    with te.cache_quantized(model):
        assert model.fp8.kernel_cache is None


@pytest.mark.parametrize("recipe", RECIPES[:3:2], ids=lambda r: type(r).__name__)
def test_stacked_layers(recipe):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return te.DenseGeneral(32, 32, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    def apply(model, x):
        return run(model, x)

    def apply_cached(model, x):
        with te.cache_quantized(model):
            return run(model, x)

    x = jax.random.normal(jax.random.key(1), (8, 32))
    with te.autocast(recipe):
        want = nnx.jit(apply)(make(nnx.Rngs(0)), x)
        got = nnx.jit(apply_cached)(make(nnx.Rngs(0)), x)
    np.testing.assert_array_equal(got, want)


def test_a_model_without_gemm_layers_is_refused():
    with (
        pytest.raises(ValueError, match=r"cache_quantized: model must hold a te_flax"),
        te.cache_quantized(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    ):
        pass
