"""Checkpoints of the encoder example, on a small model."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from examples.encoder.checkpoint import Checkpoints
from examples.errors import InputError
from examples.training import adam

# Orbax warns of its own next version.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")
HISTORY = [{"epoch": 1, "train_loss": 0.1 + 0.2}, {"epoch": 2, "train_loss": 1e-17}]


def make(seed):
    model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(seed), amax_history_len=8)
    return model, nnx.Optimizer(model, adam(4, 1e-3), wrt=nnx.Param)


def step(model, optimizer):
    with te.autocast(te.DelayedScaling(amax_history_len=8)):
        grads = te.grad(lambda model: model(jnp.ones((2, 4))).sum())(model)
    optimizer.update(model, grads)


def same(a, b):
    flat = [dict(nnx.to_flat_state(nnx.state(m, te.checkpoint_filter))) for m in (a, b)]
    assert flat[0].keys() == flat[1].keys()
    for path, leaf in flat[0].items():
        values = (np.asarray(v[...]) for v in (leaf, flat[1][path]))
        np.testing.assert_array_equal(*values, err_msg=str(path))


def test_everything_comes_back(tmp_path):
    """Parameters, moments of the optimizer, FP8 statistics; metrics to the last bit."""
    first = make(0)
    step(*first)
    assert np.count_nonzero(first[0].fp8.dy[...]) == 1
    with Checkpoints(tmp_path / "new" / "folder", {"seed": 0}) as checkpoints:
        assert checkpoints.restore(*first) == []
        checkpoints.save(*first, HISTORY[:1])
        step(*first)
        checkpoints.save(*first, HISTORY)
    second = make(1)
    with Checkpoints(tmp_path / "new" / "folder", {"seed": 0}) as checkpoints:
        assert checkpoints.restore(*second) == HISTORY
    same(first, second)


def test_other_settings_are_refused(tmp_path):
    model, optimizer = make(0)
    settings = {"batch_size": 8, "data": "a"}
    with Checkpoints(tmp_path, settings) as checkpoints:
        checkpoints.save(model, optimizer, HISTORY[:1])
    for name, value, line in (
        ("batch_size", 16, "--batch-size must be 8, as in the checkpoint, got 16; rep"),
        ("data", "b", "--data must be a, as in the checkpoint, got b"),
        ("heads", 2, "--heads must be None, as in the checkpoint, got 2"),
    ):
        with (
            Checkpoints(tmp_path, {**settings, name: value}) as checkpoints,
            pytest.raises(InputError, match=line),
        ):
            checkpoints.restore(model, optimizer)


def test_without_a_folder_nothing_happens():
    with Checkpoints(None, {}) as checkpoints:
        checkpoints.save(*make(0), HISTORY)
        assert checkpoints.restore(*make(0)) == []
