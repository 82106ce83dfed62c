"""Small models, data and checks shared by the trajectory tests."""

import contextlib

import fp8_numpy
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import te_flax as te
from te_flax.ops.amax import AMAX_TO_SCALE

WIDTH, BATCH, LENGTH, STEPS, RATE = 16, 8, 4, 20, 0.125
RECIPE = te.DelayedScaling(amax_history_len=LENGTH)
MODES = ("graph", "simple", "tree")


@contextlib.contextmanager
def graph_mode(name):
    """Enters one of the three execution modes of flax.nnx."""
    with nnx.set_graph_mode(name != "tree"), nnx.set_graph_updates(name == "graph"):
        yield


def dense(seed=0, rngs=None, **options):
    options = {"amax_history_len": LENGTH, "use_bias": False, **options}
    return te.DenseGeneral(WIDTH, WIDTH, rngs=rngs or nnx.Rngs(seed), **options)


class Mlp(nnx.Module):
    def __init__(self, first=0, second=1, **options):
        self.first, self.second = dense(first, **options), dense(second, **options)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Twice(nnx.Module):
    """One layer used twice in a step."""

    def __init__(self, **options):
        self.layer = dense(**options)

    def __call__(self, x):
        return self.layer(jnp.tanh(self.layer(x)))


def linear_loss(model, x, weights):
    """A loss whose dy is `weights` exactly, whatever y is."""
    return jnp.sum(model(x) * weights)


def optimizer(model):
    return nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)


def data(step, shape=(BATCH, WIDTH), seed=0):
    """x and dy of a step: sizes jump, some steps are all zero."""
    rng = np.random.default_rng([seed, step])
    x = rng.normal(size=shape) * [1, 3, 0.1, 0.5, 20][step % 5]
    dy = rng.normal(size=shape) * [1e-3, 2e-3, 1e-5, 1e-3][step % 4]
    x, dy = x * (step % 7 != 5), dy * (step % 11 != 6)
    return x.astype(np.float32), dy.astype(np.float32)


def kernels(model):
    """Copies of all kernels by the path of their layer, in sorted order."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {p[:-1]: np.array(v[...]) for p, v in sorted(flat, key=lambda e: e[0])}


def layers(model):
    """All layers by path, in sorted order."""
    found = [(p, m) for p, m in nnx.iter_graph(model) if isinstance(m, te.DenseGeneral)]
    return dict(sorted(found, key=lambda entry: entry[0]))


def library_scale(fp8, name, recipe):
    """The scale that a layer gives an operand, as the library computes it."""
    quantizer = getattr(recipe.quantizers(), name)
    scale, _ = AMAX_TO_SCALE(
        jnp.asarray(np.asarray(fp8.amax(name, recipe))),
        format=quantizer.format,
        margin=quantizer.margin,
        power_of_2=quantizer.power_of_2,
        epsilon=quantizer.epsilon,
    )
    return np.asarray(scale)


def scales_made(jaxpr):
    """(format, margin) of every scale in a jaxpr, its inner jaxprs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "te_amax_to_scale":
            attrs = dict(eqn.params["attrs"])
            yield attrs["format"], attrs["margin"]
        if eqn.primitive.name == "te_history_to_scale":
            attrs = dict(eqn.params["attrs"])
            for name in ("x", "kernel", "dy"):
                yield attrs[f"{name}_format"], attrs["margin"]
        is_jaxpr = lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from scales_made(getattr(value, "jaxpr", value))


def assert_state(fp8, expected, index=(), rtol=2e-6):
    """Histories, scales and counters of one layer against numpy's.

    The scale that the library makes of the found history is numpy's bit for bit; the
    history itself has seen sums in another order.
    """
    recipe = te.DelayedScaling(
        margin=expected.margin,
        amax_history_len=expected.window,
        amax_compute_algo="most_recent" if expected.most_recent else "max",
    )
    for name, format in (("x", "e4m3"), ("kernel", "e4m3"), ("dy", "e5m2")):
        history = np.asarray(getattr(fp8, name)[...])[index]
        np.testing.assert_allclose(history, expected.history[name], rtol, err_msg=name)
        found = fp8_numpy.amax(history[: expected.window])[0]
        found = history[0] if expected.most_recent else found
        scale = library_scale(fp8, name, recipe)[index]
        exact = fp8_numpy.scale_of(found, format, expected.margin)
        np.testing.assert_array_equal(scale, exact, err_msg=name)
        np.testing.assert_allclose(scale, expected.scale(name, format), rtol)
    assert int(np.asarray(fp8.nonfinite[...])[index]) == expected.nonfinite
    np.testing.assert_array_equal(np.asarray(fp8.mailbox[...]), 0)


def assert_update(before, after, gradient, rtol=5e-3):
    """The optimizer moved a kernel along numpy's gradient.

    A float32 rounding may flip a code, so the bound is on the whole tensor; a wrong
    scale of dy would move it by about 5e-2.
    """
    moved = (before.astype(np.float64) - after) / RATE
    error = np.linalg.norm(moved - gradient)
    assert error <= rtol * np.linalg.norm(gradient) + 1e-6 * np.linalg.norm(before)


def mlp_backward(states, weights, x, dy, copies=1, deliver=True):
    """One step of `Mlp` in numpy; returns the two kernel gradients."""
    pre, saved_first = states[0].forward(x, weights[0])
    hidden = np.tanh(pre)
    _, saved_second = states[1].forward(hidden, weights[1])
    dhidden, dsecond = states[1].backward(dy, saved_second)
    _, dfirst = states[0].backward(dhidden * (1 - hidden**2), saved_first)
    if deliver:
        for state in states:
            state.deliver(copies)
    return [dfirst, dsecond]


def twice_backward(state, weight, x, dy):
    """One step of `Twice` in numpy; returns the kernel gradient."""
    pre, saved_first = state.forward(x, weight)
    hidden = np.tanh(pre)
    _, saved_second = state.forward(hidden, weight)
    dhidden, dsecond = state.backward(dy, saved_second)
    _, dfirst = state.backward(dhidden * (1 - hidden**2), saved_first)
    state.deliver()
    return dfirst + dsecond


def run_mlp(step, model, expected, steps=range(STEPS), copies=1, batches=data):
    """Drives an `Mlp` and its numpy twin through the steps, comparing at each.

    `step(x, dy)` trains the model once.
    """
    for t in steps:
        before = kernels(model)
        x, dy = batches(t)
        step(jnp.asarray(x), jnp.asarray(dy))
        gradients = mlp_backward(expected, list(before.values()), x, dy, copies)
        after = kernels(model)
        for path, state, gradient in zip(before, expected, gradients, strict=True):
            assert_state(layers(model)[path].fp8, state)
            assert_update(before[path], after[path], gradient)
    assert not any(np.isnan(value).any() for value in kernels(model).values())


def train_step(transform=te.value_and_grad, loss=linear_loss):
    """The usual train step, jitted."""

    @nnx.jit
    def step(model, opt, x, dy):
        value, grads = transform(loss)(model, x, dy)
        opt.update(model, grads)
        return value

    return step
