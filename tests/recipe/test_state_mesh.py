"""The FP8 state on meshes: the same trajectory, and replicas that stay bit-equal."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from fp8_numpy import DenseState
from fp8_worlds import (
    BATCH,
    LENGTH,
    MODES,
    RATE,
    RECIPE,
    WIDTH,
    Mlp,
    assert_state,
    data,
    dense,
    graph_mode,
    linear_loss,
    optimizer,
    run_mlp,
    train_step,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.recipe.state import amax_axes

WANTED = te.diff_filter(nnx.Param)


@pytest.fixture(params=MODES)
def mode(request):
    with graph_mode(request.param), te.autocast(RECIPE):
        yield request.param


def mesh_of(axis_type, shape=(4,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def replicas(array):
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def assert_replicas_equal(model):
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        first, *rest = replicas(leaf[...])
        for other in rest:
            np.testing.assert_array_equal(first, other, err_msg=str(path))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_data_parallel(mode, axis_type):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        model = Mlp()
        opt, step = optimizer(model), train_step()
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("d")))
        states = [DenseState(LENGTH), DenseState(LENGTH)]
        steps = range(20 if mode == "graph" else 4)
        run_mlp(
            lambda x, dy: step(model, opt, place(x), place(dy)), model, states, steps
        )


def grad_outside(check_vma):
    """shard_map around the forward pass; returns the state with out_specs P()."""

    def loss(model, x, dy):
        graphdef, diff, rest = nnx.split(model, WANTED, ...)

        @functools.partial(
            jax.shard_map,
            in_specs=(P(), P(), P("d"), P("d")),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
        def local(diff, rest, x, dy):
            inner = nnx.merge(graphdef, diff, rest, copy=True)
            value = jax.lax.psum(linear_loss(inner, x, dy), "d")
            return value, nnx.state(inner, nnx.Not(WANTED))

        value, rest = local(diff, rest, x, dy)
        nnx.update(model, rest)
        return value

    return train_step(loss=loss)


def grad_inside(check_vma):
    """te.value_and_grad inside shard_map: every device does the whole step."""

    def step(state, x, dy, graphdef):
        @functools.partial(
            jax.shard_map,
            in_specs=(P(), P("d"), P("d")),
            out_specs=P(),
            check_vma=check_vma,
        )
        def local(state, x, dy):
            inner = nnx.merge(graphdef, state, copy=True)
            grads = te.grad(linear_loss)(inner, x, dy)
            if not check_vma:  # with it, JAX sums what varies by itself
                grads = jax.lax.psum(grads, "d")
            opt = nnx.Optimizer(inner, optax.sgd(RATE), wrt=nnx.Param)
            opt.update(inner, grads)
            return nnx.state(inner)

        return local(state, x, dy)

    step = jax.jit(step, static_argnums=3)

    def run(model, opt, x, dy):
        graphdef, state = nnx.split(model)
        nnx.update(model, step(state, x, dy, graphdef))

    return run


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize("where", [grad_outside, grad_inside])
def test_shard_map(mode, where, check_vma):
    """amax is the global maximum; the mailbox of replicated layers is delivered."""
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        model = Mlp()
        opt, step = optimizer(model), where(check_vma)
        # Without check_vma the transpose sums one equal copy from each device.
        copies = 4 if where is grad_outside and not check_vma else 1
        states = [DenseState(LENGTH), DenseState(LENGTH)]
        steps = range(20 if mode == "graph" else 4)
        run_mlp(
            lambda x, dy: step(model, opt, x, dy), model, states, steps, copies=copies
        )
        assert_replicas_equal(model)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_layers_that_differ_by_device_keep_their_own_amax(check_vma):
    """Expert parallel: check_vma sees it, else local_amax_axes says it."""
    mesh = mesh_of(AxisType.Auto, (2, 2), ("d", "ep"))
    sizes = np.array([1.0, 8.0], np.float32)[:, None, None]
    x, dy = (a * sizes for a in data(0, (2, BATCH, WIDTH)))
    local_axes = () if check_vma else ("ep",)
    with (
        jax.set_mesh(mesh),
        te.autocast(RECIPE, local_amax_axes=local_axes),
    ):
        make = nnx.vmap(lambda rngs: dense(rngs=rngs), in_axes=0)
        model = make(nnx.Rngs(0).split(2))
        graphdef, state = nnx.split(model)

        @jax.jit
        @functools.partial(
            jax.shard_map,
            in_specs=(P("ep"), P("ep", "d"), P("ep", "d")),
            out_specs=P("ep"),
            check_vma=check_vma,
        )
        def local(state, x, dy):
            inner = nnx.merge(graphdef, jax.tree.map(lambda a: a[0], state), copy=True)
            te.grad(linear_loss)(inner, x[0], dy[0])
            return jax.tree.map(lambda a: a[None], nnx.state(inner))

        nnx.update(model, local(state, x, dy))
    for i in range(2):
        expected = DenseState(LENGTH)
        _, saved = expected.forward(x[i], np.asarray(model.kernel[...])[i])
        expected.backward(dy[i], saved)
        expected.deliver()
        assert_state(model.fp8, expected, (i,))


def test_amax_axes_outside_shard_map_is_empty():
    with te.autocast(RECIPE, local_amax_axes=("pp",)):
        assert amax_axes(te.Fp8State(LENGTH)) == ()
