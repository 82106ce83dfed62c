"""Trains a small CNN on handwritten digits, its dense layers in FP8, on any device.

python examples/mnist/train.py --recipe delayed_scaling
"""

import argparse
import functools
import sys
from pathlib import Path

from flax import nnx

import te_flax as te

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for "examples"

from examples import command_line
from examples.mnist.data import load
from examples.mnist.model import CNN
from examples.mnist.training import fit
from examples.reporting import Report


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options."""
    description = "Trains a small CNN with te_flax layers on MNIST."
    parser = command_line.Parser(
        description, epochs=8, batch_size=100, plot="mnist.png"
    )
    parser.add_argument(
        "--data-dir",
        help="folder with the four IDX files of MNIST or Fashion-MNIST, plain or .gz; "
        "default: 5,000 MNIST digits, downloaded once",
    )
    return parser.parse_args(argv)


def train(argv: list[str] | None) -> None:
    """Trains, showing progress, and writes the metrics and the plot."""
    options = parse(argv)
    recipe = command_line.load_recipe(options.recipe)
    data = load(options.data_dir)
    command_line.check_batch_size(options.batch_size, len(data.train_images))
    command_line.check_writable("--metrics", options.metrics)
    command_line.check_writable("--plot", options.plot)

    with te.autocast(recipe):  # gives its amax histories the length of the recipe's
        model = CNN(rngs=nnx.Rngs(options.seed))
    steps = options.epochs * (len(data.train_images) // options.batch_size)
    with Report(options.recipe, steps, metrics=options.metrics) as report:
        for entry in fit(
            model,
            data,
            recipe,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            on_step=report.step,
        ):
            report.epoch(entry)
    report.plot(options.plot, f"MNIST example, recipe {options.recipe}")


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    return command_line.exit_code(functools.partial(train, argv))


if __name__ == "__main__":
    sys.exit(main())
