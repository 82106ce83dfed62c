"""The stream "sr" of stochastic rounding: who seeds it, who draws, who must not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import data
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_flax as te

RECIPE = te.NVFP4BlockScaling()
NEAREST = te.NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = [
    te.HIGH_PRECISION,
    te.DelayedScaling(),
    te.Float8CurrentScaling(),
    te.MXFP8BlockScaling(),
    te.Float8BlockScaling(),
    RECIPE,
]
LAYERS = {
    "dense": lambda **k: te.DenseGeneral(32, 32, **k),
    "ln_dense": lambda **k: te.LayerNormDenseGeneral(32, 32, **k),
    "mlp": lambda **k: te.LayerNormMLP(32, 32, **k),
    "callable": lambda **k: te.LayerNormMLP(32, 32, activations=jnp.tanh, **k),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)

two_passes = pytest.mark.parametrize(
    "layer", [LAYERS["dense"], LAYERS["mlp"]], ids=["dense", "mlp"]
)


def dense(seed=0, **streams):
    return te.DenseGeneral(32, 32, rngs=nnx.Rngs(seed, **streams))


def key(layer):
    return np.asarray(layer.fp8.rounding[...][:2])


def streams(model):
    """Seed and count of every layer, by path."""
    return {p: v[...] for p, v in nnx.to_flat_state(nnx.state(model, te.Fp8Rounding))}


@nnx.jit
def step(model, x, dy):
    loss = lambda model, x: jnp.sum(model(x) * dy)
    return te.grad(loss, argnums=(0, 1))(model, x)


def gradients(model, x, dy, recipe=RECIPE):
    """Those of x and of the parameters."""
    with te.autocast(recipe):
        return jax.tree.leaves(nnx.as_pure(step(model, x, dy)))


def equal(a, b):
    return [bool((p == q).all()) for p, q in zip(a, b, strict=True)]


@each_layer
def test_the_variables_do_not_depend_on_the_recipe(layer):
    def variables(**own):
        flat = nnx.to_flat_state(nnx.state(layer(rngs=nnx.Rngs(0), **own)))
        return {path: (type(v), v.shape, v.dtype) for path, v in flat}

    plain = variables()
    for recipe in RECIPES:
        with te.autocast(recipe):
            assert variables() == plain
        assert variables(recipe=recipe) == plain


@pytest.mark.parametrize("named", [{}, {"sr": 1}], ids=["derived", "named"])
def test_parameters_are_those_of_layers_without_a_stream(named):
    ours, theirs = nnx.Rngs(0, **named), nnx.Rngs(0)
    for _ in range(2):  # the second one sees what the first one drew
        a = te.DenseGeneral(32, 32, rngs=ours)
        b = nnx.Linear(32, 32, rngs=theirs)
        np.testing.assert_array_equal(a.kernel[...], b.kernel[...])
    assert int(ours.params.count[...]) == int(theirs.params.count[...])


def test_the_stream_is_seeded_by_its_name():
    named = dense(0, sr=1)
    np.testing.assert_array_equal(key(named), key(dense(5, sr=1)))
    assert (key(named) != key(dense(0, sr=2))).any()
    assert (key(named) != key(dense(0))).any()
    assert (key(dense(0)) != key(dense(5))).any()


@pytest.mark.parametrize("named", [{}, {"sr": 1}], ids=["derived", "named"])
def test_no_two_layers_share_a_key(named):
    rngs = nnx.Rngs(0, **named)
    model = nnx.List([layer(rngs=rngs) for layer in LAYERS.values()])
    keys = [words[:2] for words in streams(model).values()]
    assert len(keys) == 6
    assert len({np.asarray(k).tobytes() for k in keys}) == 6


@two_passes
def test_every_call_draws_and_a_copy_draws_the_same(layer):
    model = layer(rngs=nnx.Rngs(0))
    copy = nnx.clone(model)
    x, dy = data((16, 32)), data((16, 32), seed=1)
    first, second = gradients(model, x, dy), gradients(model, x, dy)
    assert not all(equal(first, second))
    assert all(equal(first, gradients(copy, x, dy)))
    assert all(equal(second, gradients(copy, x, dy)))


@two_passes
def test_evaluation_rounds_to_nearest(layer):
    model = layer(rngs=nnx.Rngs(0))
    x, dy = data((16, 32)), data((16, 32), seed=1)
    want = gradients(model, x, dy, NEAREST)
    model.eval()
    assert all(equal(gradients(model, x, dy), want))


@each_layer
def test_only_training_under_stochastic_rounding_draws(layer):
    model, x = layer(rngs=nnx.Rngs(0)), data((16, 32))

    def draws(recipe):
        before = streams(model)
        with te.autocast(recipe):
            nnx.jit(lambda model, x: model(x))(model, x)
        return not all(equal(before.values(), streams(model).values()))

    others = (te.HIGH_PRECISION, te.DelayedScaling(), NEAREST)
    assert not any(map(draws, others))
    assert draws(RECIPE)
    model.eval()
    assert not draws(RECIPE)


def test_a_checkpoint_without_the_stream_leaves_it_alone():
    saved, model = dense(0), dense(1)
    x, dy = data((16, 32)), data((16, 32), seed=1)
    gradients(model, x, dy)
    before = streams(model)
    state = nnx.state(saved, nnx.Not(te.Fp8Rounding))
    te.restore_state(model, state)
    np.testing.assert_array_equal(model.kernel[...], saved.kernel[...])
    assert all(equal(before.values(), streams(model).values()))
    te.restore_state(model, nnx.state(saved))
    assert all(equal(streams(saved).values(), streams(model).values()))


@two_passes
def test_shards_draw_differently(layer):
    """Each shard holds the same x and dy, so that equal draws would show."""
    graph, state = nnx.split(layer(rngs=nnx.Rngs(0)))
    one, mesh = data((16, 32)), jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P("d")
    )
    def dx(state, x, dy):
        loss = lambda x: jnp.sum(nnx.merge(graph, state, copy=True)(x) * dy)
        return jax.grad(loss)(x)

    x, dy = jnp.tile(one, (4, 1)), jnp.tile(data((16, 32), seed=1), (4, 1))

    def distinct(recipe):
        with te.autocast(recipe):
            shards = np.asarray(dx(state, x, dy)).reshape(4, -1)
        return len({shard.tobytes() for shard in shards})

    assert distinct(NEAREST) == 1
    assert distinct(RECIPE) == 4


def test_stacked_layers_draw_differently():
    """Each layer holds the same kernel and sees the same x and dy."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        ones = nnx.initializers.ones_init()
        return te.DenseGeneral(32, 32, kernel_init=ones, rngs=rngs)

    @nnx.vmap(in_axes=(0, None, None))
    def dx(layer, x, dy):
        return te.grad(lambda layer, x: jnp.sum(layer(x) * dy), argnums=1)(layer, x)

    model = make(nnx.Rngs(0))
    assert model.fp8.rounding.shape == (3, 3)
    with te.autocast(RECIPE):
        found = np.asarray(dx(model, data((16, 32)), data((16, 32), seed=1)))
    assert len({layer.tobytes() for layer in found}) == 3
