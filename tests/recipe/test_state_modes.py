"""Who may change the FP8 state, and which scale dy gets when nobody fills it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fp8_numpy import DenseState
from fp8_worlds import (
    LENGTH,
    MODES,
    RECIPE,
    STEPS,
    WIDTH,
    Mlp,
    assert_state,
    assert_update,
    data,
    dense,
    graph_mode,
    kernels,
    layers,
    linear_loss,
    mlp_backward,
    optimizer,
    run_mlp,
    scales_made,
    train_step,
)

import te_flax as te


@pytest.fixture(params=MODES, autouse=True)
def mode(request):
    with graph_mode(request.param):
        yield request.param


def twins(**options):
    states = [DenseState(LENGTH), DenseState(LENGTH)]
    for state in states:
        vars(state).update(options)
    return states


def params_only(grads):
    return nnx.state(grads, nnx.Param)


def test_plain_nnx_value_and_grad_uses_current_scaling_for_dy(mode):
    """Training works without te.value_and_grad; the dy history stays empty."""
    model = Mlp()
    opt = optimizer(model)
    # Outside the default mode nnx differentiates every leaf, integers included.
    allow_int = mode != "graph"

    @nnx.jit
    def step(model, opt, x, dy):
        _, grads = nnx.value_and_grad(linear_loss, allow_int=allow_int)(model, x, dy)
        opt.update(model, params_only(grads))

    states = twins(dy_current=True)
    for t in range(6):
        before = kernels(model)
        x, dy = data(t)
        with te.autocast(RECIPE):
            step(model, opt, jnp.asarray(x), jnp.asarray(dy))
        gradients = mlp_step(states, before, x, dy)
        for path, state, gradient in zip(before, states, gradients, strict=True):
            assert_state(layers(model)[path].fp8, state)
            assert_update(before[path], kernels(model)[path], gradient)


def mlp_step(states, before, x, dy):
    return mlp_backward(states, list(before.values()), x, dy, deliver=False)


def test_frozen_layers_keep_their_statistics():
    """A frozen first layer before a training one; then both train again."""
    model = Mlp()
    opt, step = optimizer(model), train_step()
    states = twins()
    with te.autocast(RECIPE):
        run_mlp(lambda x, dy: step(model, opt, x, dy), model, states, range(3))
        model.first.eval()
        states[0].frozen = True
        run_mlp(lambda x, dy: step(model, opt, x, dy), model, states, range(3, 6))
        model.train()
        states[0].frozen = False
        run_mlp(lambda x, dy: step(model, opt, x, dy), model, states, range(6, 9))


@pytest.mark.parametrize(
    "freeze",
    [
        lambda m: m.eval() or m,
        lambda m: m.set_attributes(use_running_average=True) or m,
        lambda m: nnx.view(m, use_running_average=True),
    ],
    ids=["eval", "set_attributes", "view"],
)
def test_ways_to_freeze(freeze):
    state, amax = te.Fp8State(2), jnp.array([3.0, 1.0], jnp.float32)
    frozen = freeze(state)
    frozen.push(amax, amax)
    np.testing.assert_array_equal(state.x[...], 0)
    assert int(state.nonfinite[...]) == 0
    with te.track_gradients(frozen):
        assert not frozen.tracked
    frozen.train()
    frozen.push(amax, amax)
    np.testing.assert_array_equal(state.x[...], [3, 0])
    assert int(state.nonfinite[...]) == 2


def test_evaluation_changes_nothing():
    model = Mlp()
    opt, step = optimizer(model), train_step()
    x, dy = map(jnp.asarray, data(0))
    with te.autocast(RECIPE):
        step(model, opt, x, dy)
        before = nnx.to_pure_dict(nnx.state(model))
        frozen = nnx.view(model, use_running_average=True)
        nnx.jit(lambda m, x: m(x))(frozen, 100 * x)
        nnx.jit(lambda m, x, dy: te.grad(linear_loss)(m, x, dy))(frozen, x, dy)
    jax.tree.map(
        np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model))
    )
    assert model.first.fp8.use_running_average is False


def test_a_model_that_is_not_differentiated_uses_current_scaling():
    """A critic closed over: dy flows through it, nobody fills its dy history."""
    critic, model = dense(3), dense(4)
    opt = optimizer(model)

    @nnx.jit
    def step(model, critic, opt, x, dy):
        def loss(model, x, dy):
            hidden = model(x)
            return jnp.sum(nnx.view(critic, use_running_average=True)(hidden) * dy)

        opt.update(model, te.grad(loss)(model, x, dy))

    states = twins()
    states[1].frozen = True
    for t in range(4):
        before, weight = np.array(model.kernel[...]), np.array(critic.kernel[...])
        x, dy = data(t)
        with te.autocast(RECIPE):
            step(model, critic, opt, jnp.asarray(x), jnp.asarray(dy))
        y, saved = states[0].forward(x, before)
        _, saved_critic = states[1].forward(y, weight)
        dhidden, _ = states[1].backward(dy, saved_critic)
        _, gradient = states[0].backward(dhidden, saved)
        states[0].deliver()
        assert_state(model.fp8, states[0])
        assert_state(critic.fp8, states[1])
        assert_update(before, np.array(model.kernel[...]), gradient)


def entered(recipe):
    def loss(model, x, dy):
        with te.autocast(recipe):
            return linear_loss(model, x, dy)

    return loss


def remat(recipe):
    def loss(model, x, dy):
        with te.autocast(recipe):
            return jnp.sum(nnx.remat(lambda m, x: m(x))(model, x) * dy)

    return loss


def vmapped(recipe):
    def loss(model, x, dy):
        graphdef, state = nnx.split(model)

        def one(state, x):
            inner = nnx.merge(graphdef, state, copy=True)
            with te.autocast(recipe):
                return inner(x), nnx.state(inner)

        y, state = jax.vmap(one, in_axes=(None, 0), out_axes=(0, None))(state, x)
        nnx.update(model, state)
        return jnp.sum(y * dy)

    return loss


def scanned(recipe):
    """The batch in one slice of a scan, so that the numbers stay the same."""

    def loss(model, x, dy):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(model, x):
            with te.autocast(recipe):
                return model, model(x)

        inner, y = body(model, x[None])
        nnx.update(model, nnx.state(inner))
        return jnp.sum(y[0] * dy)

    return loss


@pytest.mark.parametrize("make", [entered, remat, vmapped, scanned])
def test_context_entered_inside_the_loss(make):
    """The backward pass follows the inner recipe too: margin 3, not none at all."""
    model = Mlp()
    recipe = te.DelayedScaling(amax_history_len=LENGTH, margin=3)
    opt, step = optimizer(model), train_step(loss=make(recipe))
    states = twins(margin=3)
    steps = range(STEPS if make is entered else 4)
    run_mlp(lambda x, dy: step(model, opt, x, dy), model, states, steps)
    graphdef, state = nnx.split(model)
    back = lambda state, x, dy: te.grad(make(recipe))(
        nnx.merge(graphdef, state, copy=True), x, dy
    )
    jaxpr = jax.make_jaxpr(back)(state, *map(jnp.asarray, data(0)))
    assert set(scales_made(jaxpr.jaxpr)) == {("e4m3", 3), ("e5m2", 3)}


def test_contexts_inside_the_loss_reach_the_backward_jaxpr():
    model = dense()
    graphdef, diff, rest = nnx.split(model, te.diff_filter(nnx.Param), ...)

    def loss(diff, x):
        inner = nnx.merge(graphdef, diff, rest, copy=True)
        with te.autocast(te.MXFP8BlockScaling(fp8_format="hybrid")):
            return inner(x).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(diff, jnp.ones((4, WIDTH))))
    assert "te_quantize_mxfp8_rowcol" in text
    assert "('row_format', 'e5m2')" in text
    with te.autocast(RECIPE, enabled=False):
        text = str(jax.make_jaxpr(jax.grad(loss))(diff, jnp.ones((4, WIDTH))))
    assert "te_quantize" not in text


def test_optimizer_never_sees_the_state():
    """Weight decay, clipping by global norm and parameter counts see kernels only."""
    model = Mlp()
    tx = optax.chain(
        optax.clip_by_global_norm(1e-4),
        optax.add_decayed_weights(1e-2),
        optax.sgd(1e-2, momentum=0.9),
    )
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    held = [path for path, _ in nnx.to_flat_state(nnx.state(opt))]
    assert not [path for path in held if "fp8" in path]
    x, dy = map(jnp.asarray, data(0))

    @nnx.jit
    def step(model, opt, x, dy):
        grads = te.grad(linear_loss)(model, x, dy)
        opt.update(model, grads)
        return grads

    with te.autocast(RECIPE):
        grads = step(model, opt, x, dy)
    flat = nnx.to_flat_state(grads)
    assert [path for path, _ in flat] == [("first", "kernel"), ("second", "kernel")]
    assert all(isinstance(leaf, nnx.Param) for _, leaf in flat)
    state = DenseState(LENGTH)
    state.forward(np.asarray(x), np.asarray(dense(0).kernel[...]))
    state.history["dy"] = list(np.asarray(model.first.fp8.dy[...]))
    assert_state(model.first.fp8, state)


def test_a_layer_keeps_its_tree_under_every_recipe():
    make = lambda: te.DenseGeneral(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    shapes = []
    for name in ("none", "delayed_scaling", "current_scaling", "mxfp8"):
        with te.autocast(te.load_recipe(name)):
            state = nnx.state(nnx.eval_shape(make))
        shapes.append(jax.tree.map(jnp.shape, nnx.to_pure_dict(state)))
    assert all(shape == shapes[0] for shape in shapes)


def test_history_length():
    with te.autocast(te.DelayedScaling(amax_history_len=7)):
        assert te.Fp8State().x.shape == (7,)
        assert te.Fp8State(3).x.shape == (3,)
    assert te.Fp8State().x.shape == (1024,)
    layer = dense(amax_history_len=2)
    match = "DelayedScaling: amax_history_len must be <= 2.*amax_history_len=4"
    with te.autocast(RECIPE), pytest.raises(ValueError, match=match):
        layer(jnp.ones((2, WIDTH)))


def test_history_length_of_the_layers_own_recipe():
    own = te.DelayedScaling(amax_history_len=2048)
    assert te.Fp8State(recipe=own).x.shape == (2048,)
    assert te.Fp8State(3, own).x.shape == (3,)
    with te.autocast(te.DelayedScaling(amax_history_len=7)):
        assert te.Fp8State(recipe=own).x.shape == (2048,)
        assert te.Fp8State(recipe=te.MXFP8BlockScaling()).x.shape == (1024,)
        assert te.Fp8State(recipe=te.HIGH_PRECISION).x.shape == (1024,)
    with te.autocast(enabled=False):
        assert te.Fp8State(recipe=own).x.shape == (2048,)
    with pytest.raises(TypeError, match="Fp8State: recipe must be a recipe, None or"):
        te.Fp8State(recipe="delayed_scaling")


@pytest.mark.parametrize("length", [0, -1, 2.0, True, "4"])
def test_history_length_errors(length):
    with pytest.raises(ValueError, match="Fp8State: amax_history_len must be an int"):
        te.Fp8State(length)
