"""Trains a transformer encoder to classify sentences, in FP8, on any devices.

python -m examples.encoder.train --recipe delayed_scaling --mesh dp=4,tp=2
"""

import argparse
import functools
import sys
from pathlib import Path

import jax
from flax import nnx

import te_flax as te

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for "examples"

from examples import command_line, training
from examples.encoder import data, mesh
from examples.encoder.checkpoint import Checkpoints
from examples.encoder.model import Encoder
from examples.encoder.options import parse, settings
from examples.reporting import Report

PEAK_RATE = 1e-3


def create(options: argparse.Namespace, dataset: data.Dataset, steps: int):
    """Returns the model and its optimizer, each variable made where it belongs."""

    @nnx.jit
    def make():
        model = Encoder(
            dataset.vocabulary,
            len(dataset.classes),
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            length=options.length,
            sequence_first=options.sequence_first,
            rngs=nnx.Rngs(options.seed),
        )
        adam = training.adam(steps, PEAK_RATE)
        return model, nnx.Optimizer(model, adam, wrt=nnx.Param)

    return make()


def run(
    options, recipe, dataset: data.Dataset, place, checkpoints: Checkpoints
) -> None:
    """Trains from the last checkpoint to the last epoch, showing the progress."""
    batch_size, seed = options.batch_size, options.seed
    steps = len(dataset.train_labels) // batch_size
    with te.autocast(recipe):  # gives the amax histories the length of the recipe's
        model, optimizer = create(options, dataset, options.epochs * steps)
    earlier = checkpoints.restore(model, optimizer)
    with Report(
        options.recipe,
        steps * options.epochs,
        done=steps * len(earlier),
        metrics=options.metrics,
        earlier=earlier,
        quiet=jax.process_index() > 0,  # one process speaks for all
    ) as report:
        for entry in training.fit(
            model,
            optimizer,
            recipe,
            epochs=range(len(earlier) + 1, options.epochs + 1),
            train_batches=lambda epoch: map(
                place, data.train_batches(dataset, batch_size, seed, epoch)
            ),
            eval_batches=lambda: map(place, data.eval_batches(dataset, batch_size)),
            on_step=report.step,
        ):
            report.epoch(entry)
            checkpoints.save(model, optimizer, report.history)
    title = f"Encoder example on {dataset.name}, recipe {options.recipe}"
    report.plot(options.plot, title)


def train(argv: list[str] | None) -> None:
    """Reads the options and the data, and trains on the mesh that they name."""
    options = parse(argv)
    if options.distributed:
        mesh.join_processes()
    recipe = command_line.load_recipe(options.recipe)
    dataset = data.load(options.data, options.length)
    layout = mesh.layout(options)
    command_line.check_batch_size(options.batch_size, len(dataset.train_labels))
    if jax.process_index() == 0:
        command_line.check_writable("--metrics", options.metrics)
        command_line.check_writable("--plot", options.plot)
    decisive = settings(options, dataset.fingerprint())
    with (
        jax.set_mesh(layout.mesh),
        nnx.logical_axis_rules(layout.rules),
        Checkpoints(options.checkpoints, decisive) as checkpoints,
    ):
        run(options, recipe, dataset, layout.place, checkpoints)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    return command_line.exit_code(functools.partial(train, argv))


if __name__ == "__main__":
    sys.exit(main())
