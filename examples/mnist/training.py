"""The training of the MNIST example: its optimizer and its batches in the loop."""

from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from examples import training
from examples.mnist.data import Dataset, eval_batches, train_batches
from examples.mnist.model import CNN

PEAK_RATE = 3e-3


def fit(
    model: CNN,
    data: Dataset,
    recipe: Any,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[Any], None] = lambda result: None,
) -> Iterator[training.Metrics]:
    """Trains the model; yields the metrics of each epoch when it is over.

    Args:
        model: changed in place.
        data: the images and labels.
        recipe: what ``te.load_recipe`` returned.
        epochs: passes over the training images.
        batch_size: images a step.
        seed: decides the order of the images and their shifts.
        on_step: called with the result of each training step.

    Yields:
        What :func:`examples.training.fit` yields; epochs count from 1.
    """
    steps = epochs * (len(data.train_images) // batch_size)
    adam = training.adam(steps, PEAK_RATE)
    yield from training.fit(
        model,
        nnx.Optimizer(model, adam, wrt=nnx.Param),
        recipe,
        epochs=range(1, epochs + 1),
        train_batches=lambda epoch: train_batches(data, batch_size, seed, epoch),
        eval_batches=lambda: eval_batches(data),
        on_step=on_step,
    )
