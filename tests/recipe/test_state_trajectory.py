"""Histories and scales over 20 steps against numpy, in all three graph modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8_numpy import DenseState
from fp8_worlds import (
    BATCH,
    LENGTH,
    MODES,
    RECIPE,
    STEPS,
    WIDTH,
    Mlp,
    Twice,
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
    train_step,
    twice_backward,
)

import te_flax as te


@pytest.fixture(params=MODES, autouse=True)
def mode(request):
    with graph_mode(request.param), te.autocast(RECIPE):
        yield request.param


def test_jit():
    model = Mlp()
    opt, step = optimizer(model), train_step()
    states = [DenseState(LENGTH), DenseState(LENGTH)]
    run_mlp(lambda x, dy: step(model, opt, x, dy), model, states)


def test_eager(mode):
    model = Mlp()
    opt, vag = optimizer(model), te.value_and_grad(linear_loss)

    def step(x, dy):
        opt.update(model, vag(model, x, dy)[1])

    states = [DenseState(LENGTH), DenseState(LENGTH)]
    run_mlp(step, model, states, range(STEPS if mode == "graph" else 6))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (te.DelayedScaling(margin=2, amax_history_len=2), {"window": 2, "margin": 2}),
        (
            te.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
            {"window": 3, "most_recent": True},
        ),
    ],
    ids=["short-window-margin", "most-recent"],
)
def test_recipe_fields(recipe, options):
    model = Mlp()
    opt, step = optimizer(model), train_step()
    states = [DenseState(LENGTH, **options) for _ in range(2)]
    with te.autocast(recipe):
        run_mlp(lambda x, dy: step(model, opt, x, dy), model, states)


def test_layer_used_twice():
    model = Twice()
    opt, step = optimizer(model), train_step()
    state = DenseState(LENGTH)
    for t in range(STEPS):
        (before,) = kernels(model).values()
        x, dy = data(t)
        step(model, opt, jnp.asarray(x), jnp.asarray(dy))
        gradient = twice_backward(state, before, x, dy)
        assert_state(model.layer.fp8, state)
        assert_update(before, model.layer.kernel[...], gradient)


def microbatches(t):
    x, dy = data(t, (2, BATCH, WIDTH))
    return x, dy * np.array([[[1]], [[3]]], np.float32)


def test_accumulation_by_value_and_grad():
    """Each microbatch is a call of te.value_and_grad: each pushes once."""
    model = Mlp()
    opt = optimizer(model)

    @nnx.jit
    def step(model, opt, xs, dys):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        def body(model, x, dy):
            return model, te.grad(linear_loss)(model, x, dy)

        model_, grads = body(model, xs, dys)
        nnx.update(model, nnx.state(model_))
        opt.update(model, jax.tree.map(lambda g: g.sum(0), grads))

    states = [DenseState(LENGTH), DenseState(LENGTH)]
    for t in range(STEPS):
        before = kernels(model)
        xs, dys = microbatches(t)
        step(model, opt, jnp.asarray(xs), jnp.asarray(dys))
        weights = list(before.values())
        parts = [mlp_backward(states, weights, xs[i], dys[i]) for i in range(2)]
        for i, (path, state) in enumerate(zip(before, states, strict=True)):
            assert_state(layers(model)[path].fp8, state)
            total = parts[0][i] + parts[1][i]
            assert_update(before[path], kernels(model)[path], total)


@pytest.mark.parametrize("weight", [1.0, 0.5], ids=["sum", "mean"])
def test_accumulation_by_hand(weight):
    """One absorb for the sum of all microbatches: pushes one upper bound."""
    model = Mlp()
    opt, wanted = optimizer(model), te.diff_filter(nnx.Param)

    @nnx.jit
    def step(model, opt, xs, dys):
        graphdef, diff, rest = nnx.split(model, wanted, ...)

        def loss(diff, rest, x, dy):
            inner = nnx.merge(graphdef, diff, rest, copy=True)
            with te.track_gradients(inner):
                value = linear_loss(inner, x, dy)
            return value, nnx.state(inner, nnx.Not(wanted))

        total = None
        for i in range(2):
            grads, rest = jax.grad(loss, has_aux=True)(diff, rest, xs[i], dys[i])
            grads = jax.tree.map(lambda g: g * weight, grads)
            add = lambda *g: sum(g)
            total = grads if total is None else jax.tree.map(add, total, grads)
        nnx.update(model, rest)
        opt.update(model, te.absorb(model, total))

    states = [DenseState(LENGTH), DenseState(LENGTH)]
    for t in range(STEPS):
        before = kernels(model)
        xs, dys = microbatches(t)
        step(model, opt, jnp.asarray(xs), jnp.asarray(dys))
        weights = list(before.values())
        parts = [
            mlp_backward(states, weights, xs[i], dys[i], deliver=False)
            for i in range(2)
        ]
        for i, (path, state) in enumerate(zip(before, states, strict=True)):
            state.deliver()
            assert_state(layers(model)[path].fp8, state)
            total = (parts[0][i] + parts[1][i]) * weight
            assert_update(before[path], kernels(model)[path], total)


def stack(count):
    return nnx.vmap(lambda rngs: dense(rngs=rngs), in_axes=0)(nnx.Rngs(0).split(count))


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan-remat"])
def test_scan_over_layers(remat):
    count = 3
    model = stack(count)
    opt = optimizer(model)

    def loss(model, x, dy):
        def body(layer, x):
            return jnp.tanh(layer(x))

        body = nnx.remat(body) if remat else body
        body = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return jnp.sum(body(model, x) * dy)

    step = train_step(loss=loss)
    states = [DenseState(LENGTH) for _ in range(count)]
    for t in range(STEPS):
        before = np.array(model.kernel[...])
        x, dy = data(t)
        step(model, opt, jnp.asarray(x), jnp.asarray(dy))
        hidden, saved = [x], []
        for state, kernel in zip(states, before, strict=True):
            y, kept = state.forward(hidden[-1], kernel)
            hidden.append(np.tanh(y))
            saved.append(kept)
        cotangent = dy
        for i in reversed(range(count)):
            cotangent = cotangent * (1 - hidden[i + 1] ** 2)
            cotangent, gradient = states[i].backward(cotangent, saved[i])
            states[i].deliver()
            assert_state(model.fp8, states[i], (i,), rtol=1e-5)
            assert_update(before[i], np.array(model.kernel[...])[i], gradient)


def test_vmapped_experts():
    """Every expert has its own histories."""
    count = 3
    model = stack(count)
    opt = optimizer(model)

    def loss(model, x, dy):
        return jnp.sum(nnx.vmap(lambda layer, x: layer(x))(model, x) * dy)

    step = train_step(loss=loss)
    sizes = np.array([1.0, 5.0, 0.2], np.float32)[:, None, None]
    states = [DenseState(LENGTH) for _ in range(count)]
    for t in range(STEPS):
        before = np.array(model.kernel[...])
        x, dy = (sizes * a for a in data(t, (count, BATCH, WIDTH)))
        step(model, opt, jnp.asarray(x), jnp.asarray(dy))
        for i, state in enumerate(states):
            _, saved = state.forward(x[i], before[i])
            _, gradient = state.backward(dy[i], saved)
            state.deliver()
            assert_state(model.fp8, state, (i,))
            assert_update(before[i], np.array(model.kernel[...])[i], gradient)


def test_one_model_under_vmap_of_the_batch():
    """One shared state: one amax over the whole batch, and one contribution."""
    model = Mlp()
    opt = optimizer(model)

    def loss(model, x, dy):
        graphdef, state = nnx.split(model)

        def one(state, x):
            inner = nnx.merge(graphdef, state, copy=True)
            return inner(x), nnx.state(inner)

        axes = {"in_axes": (None, 0), "out_axes": (0, None)}
        y, state = jax.vmap(one, **axes)(state, x)
        nnx.update(model, state)
        return jnp.sum(y * dy)

    step = train_step(loss=loss)
    states = [DenseState(LENGTH), DenseState(LENGTH)]
    run_mlp(lambda x, dy: step(model, opt, x, dy), model, states)
