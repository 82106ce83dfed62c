"""Trains a small CNN on handwritten digits, its dense layers in FP8, on any device.

python examples/mnist/train.py --recipe delayed_scaling
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NoReturn

from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

import te_flax as te

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for "examples"

from examples.mnist import plot
from examples.mnist.data import Dataset, load
from examples.mnist.errors import InputError, invalid
from examples.mnist.model import CNN
from examples.mnist.training import fit


class Parser(argparse.ArgumentParser):
    """Reports a bad command line as InputError, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise invalid("the command line", "be valid", message, "see --help")


def positive(text: str) -> int:
    """Returns the integer >= 1 that ``text`` spells."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options."""
    parser = Parser(description="Trains a small CNN with te_flax layers on MNIST.")
    recipes = "none, delayed_scaling, current_scaling, mxfp8, or a path to a .toml file"
    parser.add_argument("--recipe", default="delayed_scaling", help=recipes)
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", type=Path, help="write a JSON line per epoch here")
    parser.add_argument("--plot", type=Path, default=Path("mnist.png"), help="a PNG")
    parser.add_argument(
        "--data-dir",
        help="folder with the four IDX files of MNIST or Fashion-MNIST, plain or .gz; "
        "default: 5,000 MNIST digits, downloaded once",
    )
    return parser.parse_args(argv)


def load_recipe(name: str):
    """Returns the recipe; bad names and bad files become InputError."""
    try:
        return te.load_recipe(name)
    except (OSError, ValueError) as error:
        raise InputError(error) from error


def check_writable(option: str, path: Path | None) -> None:
    """Creates the file now, so that a bad path is not found after the training."""
    if path is not None:
        try:
            path.open("w").close()
        except OSError as error:
            raise invalid(option, "be writable", error, "name another") from error


def describe(entry: dict[str, float]) -> str:
    """Returns the line that is printed for an epoch."""
    loss, accuracy = entry["test_loss"], entry["test_accuracy"]
    start = f"epoch {entry['epoch']:>3}   test loss {loss:.4f}"
    return f"{start}   test accuracy {accuracy:.2%}   {entry['seconds']:.1f} s"


def train(options: argparse.Namespace, recipe, data: Dataset) -> None:
    """Trains, showing progress, and writes the metrics and the plot."""
    with te.autocast(recipe):  # gives its amax histories the length of the recipe's
        model = CNN(rngs=nnx.Rngs(options.seed))
    steps = len(data.train_images) // options.batch_size
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    console, history = Console(), []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(options.recipe, total=options.epochs * steps)
        for entry in fit(
            model,
            data,
            recipe,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            on_step=lambda: progress.advance(task),
        ):
            history.append(entry)
            console.print(describe(entry), highlight=False)
            if options.metrics is not None:
                with options.metrics.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    plot.save(history, options.plot, f"MNIST example, recipe {options.recipe}")
    console.print(f"plot: {options.plot}", highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns the exit code."""
    try:
        options = parse(argv)
        recipe, data = load_recipe(options.recipe), load(options.data_dir)
        if options.batch_size > (most := len(data.train_images)):
            rule = f"be at most {most}, the number of training images"
            raise invalid("--batch-size", rule, options.batch_size, "lower it")
        check_writable("--metrics", options.metrics)
        check_writable("--plot", options.plot)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    train(options, recipe, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
