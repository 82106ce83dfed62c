"""Runs the encoder example beside other runs on the same GPUs, in turns.

As a module, ``ADDRESS COUNT INDEX LOCK FILE ...``, with ``-`` for the address of a run
of one process; the first process writes the loss of each step to the file.
"""

import fcntl
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from examples import training
from examples.encoder.join import join
from tests.examples.encoder_steps import losses


def in_turns(run: Callable, lock: Path, words: Path, first: bool) -> Callable:
    """``training.run`` that holds a lock from its second step on.

    The first one compiles, which runs do side by side; but kernels that wait for those
    of another GPU take the time of all runs. Of several processes the first takes the
    lock and gives the others its word, in files beside ``words``.
    """
    passes = itertools.count()

    def take(file, word: Path) -> None:
        if first:
            fcntl.flock(file, fcntl.LOCK_EX)
            word.touch()
        while not word.exists():
            time.sleep(0.01)

    def turn(step, batches):
        word = words.with_suffix(f".{next(passes)}")
        with lock.open("a") as file:  # closing it gives the lock back

            def gated() -> Iterator:
                for i, batch in enumerate(batches):
                    if i == 1:
                        take(file, word)
                    yield batch

            return run(step, gated())

    return turn


def main(address, count, index, lock, file, *argv) -> None:
    """Joins the others, trains, and writes the losses."""
    if address != "-":
        join(address, count, index)
    first = jax.process_index() == 0
    training.run = in_turns(training.run, Path(lock), Path(file), first)
    found = losses(argv)
    if first:
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
