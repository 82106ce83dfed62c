"""The training loop: what one step, one pass over the data and one epoch do."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import te_flax as te
from examples.mnist.data import Dataset, eval_batches, train_batches
from examples.mnist.model import CNN

PEAK_RATE = 3e-3
MAX_NONFINITE = 10  # steps in a row; then the run is allowed to fail visibly
Batch = tuple[Any, Any]  # images and labels: NumPy's outside of jit, JAX's inside


def loss_fn(model: CNN, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross entropy of a batch and its number of right answers."""
    images, labels = batch
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(axis=-1) == labels).sum()


@nnx.jit
def train_step(model: CNN, optimizer: nnx.Optimizer, batch: Batch):
    """Updates the model on one batch; returns what loss_fn returns."""
    result, grads = te.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return result


@nnx.jit
def eval_step(model: CNN, batch: Batch):
    """Returns what loss_fn returns, changing nothing."""
    return loss_fn(model, batch)


@functools.cache  # equal for equal steps: a second run reuses the compiled step
def adam(steps: int) -> optax.GradientTransformation:
    """AdamW under one cosine cycle; a step with a non-finite gradient is left out."""
    schedule = optax.cosine_onecycle_schedule(max(steps, 4), PEAK_RATE)
    return optax.apply_if_finite(optax.adamw(schedule), MAX_NONFINITE)


def run(step: Callable, batches: Iterator[Batch]) -> tuple[float, float]:
    """Applies ``step`` to each batch; returns the mean loss and the accuracy."""
    results, sizes = [], []
    for batch in batches:
        results.append(step(batch))  # not yet read: the next step may start
        sizes.append(len(batch[1]))
    losses, right = np.asarray(jax.device_get(results), np.float64).T
    return float(losses @ sizes / sum(sizes)), float(right.sum() / sum(sizes))


def fit(
    model: CNN,
    data: Dataset,
    recipe: Any,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, float]]:
    """Trains the model; yields the metrics of each epoch when it is over.

    Args:
        model: changed in place.
        data: the images and labels.
        recipe: what ``te.load_recipe`` returned; None trains in float32.
        epochs: passes over the training images.
        batch_size: images a step.
        seed: decides the order of the images and their shifts.
        on_step: called after each training step.

    Yields:
        epoch (from 1), train_loss, train_accuracy (while training, so under dropout
        and shifts), test_loss, test_accuracy, seconds (training and test).
    """
    steps = len(data.train_images) // batch_size
    optimizer = nnx.Optimizer(model, adam(epochs * steps), wrt=nnx.Param)

    def train_on(batch: Batch):
        result = train_step(model, optimizer, batch)
        on_step()
        return result

    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        with te.autocast(recipe):
            model.train()
            train = run(train_on, train_batches(data, batch_size, seed, epoch))
            model.eval()
            test = run(lambda batch: eval_step(model, batch), eval_batches(data))
        yield {
            "epoch": epoch,
            "train_loss": train[0],
            "train_accuracy": train[1],
            "test_loss": test[0],
            "test_accuracy": test[1],
            "seconds": time.perf_counter() - start,
        }
