"""What the command lines of the examples have in common."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax

import te_flax as te
from examples.errors import InputError, invalid


class Parser(argparse.ArgumentParser):
    """Has the common options; reports bad words as InputError, like all bad input."""

    def __init__(self, description: str, *, epochs: int, batch_size: int, plot: str):
        super().__init__(description=description)
        recipes = "none, delayed_scaling, current_scaling, mxfp8, ..., or a .toml file"
        self.add_argument("--recipe", default="delayed_scaling", help=recipes)
        self.add_argument("--epochs", type=positive, default=epochs)
        self.add_argument("--batch-size", type=positive, default=batch_size)
        self.add_argument("--seed", type=int, default=0)
        metrics = "write a JSON line per epoch here"
        self.add_argument("--metrics", type=Path, help=metrics)
        self.add_argument("--plot", type=Path, default=Path(plot), help="a PNG")

    def error(self, message: str) -> NoReturn:
        """Raises InputError."""
        raise invalid("the command line", "be valid", message, "see --help")


def positive(text: str) -> int:
    """Returns the integer >= 1 that ``text`` spells."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def load_recipe(name: str) -> te.Recipe:
    """Returns the recipe; bad names and bad files become InputError."""
    try:
        return te.load_recipe(name)
    except (OSError, ValueError) as error:
        raise InputError(error) from error


def check_batch_size(size: int, most: int) -> None:
    """Raises InputError if not even one batch can be filled."""
    if size > most:
        rule = f"be at most {most}, the number of training examples"
        raise invalid("--batch-size", rule, size, "lower it")


def check_writable(option: str, path: Path | None) -> None:
    """Creates the file now, so that a bad path is not found after the training."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise invalid(option, "be writable", error, "name another") from error


def exit_code(command: Callable[[], None]) -> int:
    """Runs the command; an InputError becomes one line on stderr and exit code 2.

    Of the processes of one run, which meet the same error, the first prints it.
    """
    try:
        command()
    except InputError as error:
        if jax.process_index() == 0:
            print(error, file=sys.stderr)
        return 2
    return 0
