"""One process of several: ``python -m examples.encoder.join ADDRESS COUNT INDEX ...``.

:mod:`examples.encoder.launch` starts these; the further words are options of train.py.
"""

import sys

import jax

from examples.encoder import train


def join(address: str, count: str, index: str) -> None:
    """Meets the other processes at the address; the first of them listens there."""
    devices = [int(index)]  # of a GPU machine; a CPU's are each process's own
    jax.distributed.initialize(
        address, int(count), int(index), local_device_ids=devices
    )


def main(argv: list[str]) -> int:
    """Joins the others, then trains; returns the exit code."""
    join(*argv[:3])
    return train.main(argv[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
