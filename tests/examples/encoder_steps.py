"""Runs the encoder example and keeps the loss of each step, in several processes too.

As a module, ``ADDRESS COUNT INDEX FILE ...``: the first process writes the losses.
"""

import json
import sys
from pathlib import Path

import jax

from examples.encoder import train
from examples.encoder.join import join
from examples.reporting import Report


def losses(argv) -> list[float]:
    """The loss of each training step of a run."""
    found = []

    class Recording(Report):
        def step(self, result=None):
            super().step()
            found.append(result[0])

    train.Report, usual = Recording, train.Report
    try:
        assert train.main(argv) == 0
    finally:
        train.Report = usual
    return [float(loss) for loss in jax.device_get(found)]


if __name__ == "__main__":
    join(*sys.argv[1:4])
    found = losses(sys.argv[5:])
    if jax.process_index() == 0:
        Path(sys.argv[4]).write_text(json.dumps(found))
