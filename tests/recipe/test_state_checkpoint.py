"""FP8 state through Orbax, and checkpoints that hold other statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from fp8_worlds import (
    LENGTH,
    MODES,
    RECIPE,
    WIDTH,
    Mlp,
    data,
    dense,
    graph_mode,
    train_step,
)

import te_flax as te

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(params=MODES)
def mode(request):
    with graph_mode(request.param), te.autocast(RECIPE):
        yield request.param


def leaves(*nodes):
    flat = nnx.to_flat_state(nnx.state(nodes))
    return {path: np.asarray(leaf[...]) for path, leaf in flat}


def test_continued_run_equals_the_unbroken_one(mode, tmp_path):
    """Bit for bit, parameters, optimizer and statistics; no mailbox on disk."""

    def fresh(seed):
        model = Mlp(seed, seed + 1)
        tx = optax.sgd(1e-2, momentum=0.9)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def train(model, opt, steps):
        for t in steps:
            x, dy = data(t)
            step(model, opt, jnp.asarray(x), jnp.asarray(dy))

    step = train_step()
    model, opt = fresh(0)
    train(model, opt, range(10))
    saved = {
        "model": nnx.state(model, te.checkpoint_filter),
        "opt": nnx.state(opt, te.checkpoint_filter),
    }
    for path, leaf in nnx.to_flat_state(saved["model"]):
        assert not isinstance(leaf, te.Fp8Mailbox), path
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    train(model, opt, range(10, 20))

    again, again_opt = fresh(5)
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "state", saved)
        bare = checkpointer.restore(tmp_path / "state")
    te.restore_state(again, loaded["model"])
    nnx.update(again_opt, loaded["opt"])
    other, _ = fresh(7)
    te.restore_state(other, bare["model"])
    for path, value in leaves(again).items():
        np.testing.assert_array_equal(value, leaves(other)[path], err_msg=str(path))
    train(again, again_opt, range(10, 20))

    expected, found = leaves(model, opt), leaves(again, again_opt)
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(value, found[path], err_msg=str(path))
    assert expected[(0, "first", "fp8", "dy")].any()


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)


def filled(length, **options):
    """An Mlp whose histories count down from `length`."""
    model = Mlp(amax_history_len=length, **options)
    for layer in (model.first, model.second):
        for stat in (layer.fp8.x, layer.fp8.kernel, layer.fp8.dy):
            stat[...] = jnp.arange(length, 0, -1, dtype=jnp.float32)
        layer.fp8.nonfinite[...] = jnp.int32(3)
    return model


def test_plain_nnx_checkpoint_gives_zero_statistics():
    plain, model = Plain(nnx.Rngs(3)), filled(LENGTH)
    te.restore_state(model, nnx.state(plain))
    np.testing.assert_array_equal(model.first.kernel[...], plain.first.kernel[...])
    for stat in jax.tree.leaves(nnx.state(model, te.Fp8Stat)):
        np.testing.assert_array_equal(stat, 0)


@pytest.mark.parametrize(
    ("saved", "expected"), [(6, [6, 5, 4, 3]), (2, [2, 1, 0, 0]), (4, [4, 3, 2, 1])]
)
def test_other_history_length_keeps_the_newest(saved, expected):
    model = Mlp(2, 3)
    te.restore_state(model, nnx.to_pure_dict(nnx.state(filled(saved))))
    for layer in (model.first, model.second):
        for stat in (layer.fp8.x, layer.fp8.kernel, layer.fp8.dy):
            np.testing.assert_array_equal(stat[...], expected)
        assert int(layer.fp8.nonfinite[...]) == 3
        np.testing.assert_array_equal(layer.fp8.mailbox[...], 0)


def test_stacked_histories_keep_the_newest_of_each_layer():
    def make(length):
        one = lambda rngs: dense(rngs=rngs, amax_history_len=length)
        return nnx.vmap(one)(nnx.Rngs(0).split(2))

    old, new = make(3), make(2)
    old.fp8.x[...] = jnp.array([[3.0, 2, 1], [6, 5, 4]])
    te.restore_state(new, nnx.state(old))
    np.testing.assert_array_equal(new.fp8.x[...], [[3, 2], [6, 5]])


class Named(nnx.Module):
    """A submodule and, in it, a parameter of the name that Orbax adds."""

    def __init__(self, seed):
        self.value = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(seed))
        self.inner = nnx.Dict(value=nnx.Param(jnp.full(2, seed, jnp.float32)))


def test_things_named_value(tmp_path):
    old, saved = Named(1), nnx.state(Named(1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        bare = checkpointer.restore(tmp_path / "state")
    for state in (saved, nnx.to_pure_dict(saved), bare):
        new = Named(2)
        te.restore_state(new, state)
        for path, value in leaves(new).items():
            np.testing.assert_array_equal(value, leaves(old)[path])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s["first"].pop("kernel"), "hold first/kernel, got a state without"),
        (lambda s: s.update(third=jnp.ones(2)), "not hold third, got a state with"),
        (
            lambda s: s["first"].update(mailbox=jnp.ones(2)),
            "not hold first/mailbox, got a state with",
        ),
        (
            lambda s: s["first"].update(kernel=jnp.ones((2, 2))),
            r"restore_state: first/kernel must have shape \(16, 16\), got \(2, 2\)",
        ),
    ],
)
def test_restore_errors(change, match):
    model = Mlp()
    state = nnx.to_pure_dict(nnx.state(Plain(nnx.Rngs(0))))
    change(state)
    before = leaves(model)
    with pytest.raises(ValueError, match=match):
        te.restore_state(model, state)
    for path, value in leaves(model).items():
        np.testing.assert_array_equal(value, before[path])
