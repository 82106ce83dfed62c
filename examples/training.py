"""The training loop of the examples: what a step, a pass and an epoch do."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import te_flax as te

MAX_NONFINITE = 10  # steps in a row; then the run is allowed to fail visibly
Batch = tuple[Any, Any]  # inputs and labels: NumPy's or JAX's
Counts = tuple[Any, Any]  # of right answers and of answers
Metrics = dict[str, float]


def loss_fn(model: nnx.Module, batch: Batch) -> tuple[jax.Array, Counts]:
    """Returns the mean cross entropy, and how many answers are right, of how many.

    A row with a label below 0 only fills the batch up, and counts for nothing.
    """
    inputs, labels = batch
    logits = model(inputs)  # pyright: ignore[reportCallIssue]
    counts = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.maximum(labels, 0)
    )
    right = logits.argmax(axis=-1) == labels
    return losses.mean(where=counts), (right.sum(), counts.sum())


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch):
    """Updates the model on one batch; returns what loss_fn returns."""
    result, grads = te.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return result


@nnx.jit
def eval_step(model: nnx.Module, batch: Batch):
    """Returns what loss_fn returns, changing nothing."""
    return loss_fn(model, batch)


@functools.cache  # equal for equal arguments: a second run reuses the compiled step
def adam(steps: int, peak_rate: float) -> optax.GradientTransformation:
    """AdamW under one cosine cycle; a step with a non-finite gradient is left out."""
    schedule = optax.cosine_onecycle_schedule(max(steps, 4), peak_rate)
    return optax.apply_if_finite(optax.adamw(schedule), MAX_NONFINITE)


def run(step: Callable, batches: Iterable[Batch]) -> tuple[float, float]:
    """Applies ``step`` to each batch; returns the mean loss and the accuracy."""
    # None is read before all are under way: the next step need not wait.
    results = jax.device_get([step(batch) for batch in batches])
    losses = np.array([loss for loss, _ in results], np.float64)
    right, sizes = np.array([counts for _, counts in results], np.float64).T
    return float(losses @ sizes / sizes.sum()), float(right.sum() / sizes.sum())


def fit(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    recipe: Any,
    *,
    epochs: Iterable[int],
    train_batches: Callable[[int], Iterable[Batch]],
    eval_batches: Callable[[], Iterable[Batch]],
    on_step: Callable[[Any], None] = lambda result: None,
) -> Iterator[Metrics]:
    """Trains the model; yields the metrics of each epoch when it is over.

    Args:
        model: maps the inputs of a batch to logits; changed in place.
        optimizer: of the model.
        recipe: what ``te.load_recipe`` returned.
        epochs: the numbers of the epochs.
        train_batches: returns the batches of the epoch with that number.
        eval_batches: returns the batches of the test set.
        on_step: called with the result of each training step.

    Yields:
        epoch, train_loss, train_accuracy (while training, so under dropout),
        test_loss, test_accuracy, seconds (training and test).
    """

    def train_on(batch: Batch):
        result = train_step(model, optimizer, batch)
        on_step(result)
        return result

    for epoch in epochs:
        start = time.perf_counter()
        with te.autocast(recipe):
            model.train()
            train = run(train_on, train_batches(epoch))
            model.eval()
            test = run(lambda batch: eval_step(model, batch), eval_batches())
        yield {
            "epoch": epoch,
            "train_loss": train[0],
            "train_accuracy": train[1],
            "test_loss": test[0],
            "test_accuracy": test[1],
            "seconds": time.perf_counter() - start,
        }
