"""NaN and Inf are counted, and never stay in a history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8_numpy import DenseState
from fp8_worlds import (
    LENGTH,
    MODES,
    RECIPE,
    STEPS,
    Mlp,
    assert_state,
    assert_update,
    data,
    graph_mode,
    kernels,
    layers,
    linear_loss,
    mlp_backward,
    optimizer,
)

import te_flax as te


@pytest.fixture(params=MODES, autouse=True)
def mode(request):
    with graph_mode(request.param), te.autocast(RECIPE):
        yield request.param


def damaged(t):
    """The usual data; some steps hold non-finite elements, or nothing else."""
    x, dy = data(t)
    if t in (3, 14):
        dy[0, 0], dy[2, 1] = np.nan, np.inf
    if t == 7:
        dy[1, :] = -np.inf
    if t == 9:
        x[0, 3] = np.nan
    if t == 12:
        x[:] = np.nan
    if t == 16:
        dy[:] = -np.nan
    return x, dy


def test_bad_steps_do_not_poison_later_ones():
    """The loop skips bad updates, as any training loop does; the state lives on."""
    model = Mlp()
    opt = optimizer(model)

    @nnx.jit
    def step(model, opt, x, dy):
        grads = te.grad(linear_loss)(model, x, dy)
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        good = jnp.stack(finite).all()
        opt.update(model, jax.tree.map(lambda g: jnp.where(good, g, 0), grads))

    states = [DenseState(LENGTH), DenseState(LENGTH)]
    for t in range(STEPS):
        before = kernels(model)
        x, dy = damaged(t)
        step(model, opt, jnp.asarray(x), jnp.asarray(dy))
        with np.errstate(all="ignore"):
            gradients = mlp_backward(states, list(before.values()), x, dy)
        good = all(np.isfinite(g).all() for g in gradients)
        for path, state, gradient in zip(before, states, gradients, strict=True):
            assert_state(layers(model)[path].fp8, state)
            moved = gradient if good else np.zeros_like(gradient)
            assert_update(before[path], kernels(model)[path], moved)
    # By hand: an Inf in dy saturates, so step 7 leaves no trace in the first layer;
    # a NaN in x counts there in the forward and, through tanh, in the backward pass.
    assert [state.nonfinite for state in states] == [7, 6]
