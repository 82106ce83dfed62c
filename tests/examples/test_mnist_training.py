"""Steps of the MNIST example: bad batches, frozen statistics, metrics."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import examples.mnist.model
import te_flax as te
from examples.mnist import data
from examples.mnist.model import CNN
from examples.mnist.training import PEAK_RATE, fit
from examples.training import adam, eval_step, train_step

RECIPES = ("none", "delayed_scaling", "current_scaling", "mxfp8")


def test_the_models_docstring():
    assert doctest.testmod(examples.mnist.model).failed == 0


def batches(count, size=20):
    rng = np.random.default_rng(0)
    for _ in range(count):
        images = rng.normal(size=(size, 28, 28, 1)).astype(np.float32)
        yield images, rng.integers(0, 10, size).astype(np.int32)


def leaves(*modules):
    """Every array of the modules by name; keys of random streams left out."""
    state = nnx.state(modules, nnx.Not(nnx.RngState))
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_batch_does_not_poison_later_steps(name, poison):
    with te.autocast(te.load_recipe(name)):
        model = CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, adam(100, PEAK_RATE), wrt=nnx.Param)
        for batch in batches(3):
            train_step(model, optimizer, batch)
        before = leaves(nnx.state(model, nnx.Param))
        images, labels = next(batches(1))
        images[3, 5, 5, 0] = poison
        loss, _ = train_step(model, optimizer, (images, labels))
        assert not np.isfinite(loss)
        after = leaves(nnx.state(model, nnx.Param))
        for path, leaf in before.items():
            np.testing.assert_array_equal(leaf, after[path], err_msg=path)
        for batch in batches(3):
            loss, _ = train_step(model, optimizer, batch)
            assert np.isfinite(loss)
    for path, leaf in leaves(model, optimizer).items():
        assert np.isfinite(leaf).all(), path
    moved = leaves(nnx.state(model, nnx.Param))
    assert not any(np.array_equal(leaf, after[path]) for path, leaf in moved.items())
    delayed = name == "delayed_scaling"
    for layer in (model.hidden, model.features):
        assert (int(layer.fp8.nonfinite[...]) > 0) == delayed
        assert np.count_nonzero(layer.fp8.kernel[...]) == 7 * delayed


def test_evaluation_changes_nothing_under_delayed_scaling():
    with te.autocast(te.load_recipe("delayed_scaling")):
        model = CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, adam(100, PEAK_RATE), wrt=nnx.Param)
        for batch in batches(2):
            train_step(model, optimizer, batch)
        before = leaves(model)
        assert np.count_nonzero(model.hidden.fp8.x[...]) == 2
        assert np.count_nonzero(model.hidden.fp8.dy[...]) == 2
        model.eval()
        first = eval_step(model, next(batches(1, 30)))
        assert first == eval_step(model, next(batches(1, 30)))
        for path, leaf in before.items():
            np.testing.assert_array_equal(leaf, leaves(model)[path], err_msg=path)
        model.train()
        train_step(model, optimizer, next(batches(1)))
        assert np.count_nonzero(model.hidden.fp8.x[...]) == 3


def test_metrics_count_every_image(idx_folder, monkeypatch):
    """Losses are means over images, not over batches of unequal size."""
    monkeypatch.setattr(data, "EVAL_BATCH", 20)
    digits = data.load(idx_folder)
    model, recipe = CNN(rngs=nnx.Rngs(1)), te.load_recipe("delayed_scaling")
    steps = []
    history = list(
        fit(
            model,
            digits,
            recipe,
            epochs=2,
            batch_size=50,
            seed=0,
            on_step=steps.append,
        )
    )
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert len(steps) == np.count_nonzero(model.hidden.fp8.dy[...]) == 4
    with te.autocast(recipe):
        logits = model(jnp.asarray(data.normalize(digits.test_images)))
    chosen = jax.nn.log_softmax(logits)[np.arange(30), digits.test_labels]
    right = logits.argmax(-1) == digits.test_labels
    last = history[-1]
    np.testing.assert_allclose(last["test_loss"], -chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(last["test_accuracy"], right.mean(), rtol=1e-6)
