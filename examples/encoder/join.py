"""One process of several: ``python -m examples.encoder.join ADDRESS COUNT INDEX ...``.

:mod:`examples.encoder.launch` starts these; the further words are options of train.py.
"""

import sys

import jax

from examples.encoder import train


def main(argv: list[str]) -> int:
    """Meets the other processes at the address, then trains; returns the exit code."""
    address, count, index, *options = argv
    jax.distributed.initialize(
        address, int(count), int(index), local_device_ids=[int(index)]
    )
    return train.main(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
