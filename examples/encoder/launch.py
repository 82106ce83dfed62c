"""Runs the example in several processes of this machine, as one training run.

python -m examples.encoder.launch --processes 2 --recipe mxfp8 --epochs 2

Each process has its own device (on a CPU one device, or JAX_NUM_CPU_DEVICES of them;
their collectives run over gloo). All other options are those of train.py.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples import command_line

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds


def main(argv: list[str] | None = None) -> int:
    """Starts the processes; returns 0 if all succeed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=command_line.positive, default=2)
    options, rest = parser.parse_known_args(argv)
    return run("examples.encoder.join", options.processes, rest)


def run(module: str, processes: int, arguments: Sequence[str]) -> int:
    """Runs a module that joins the run at ``ADDRESS COUNT INDEX`` in each process."""
    command = [sys.executable, "-m", module, f"localhost:{free_port()}", str(processes)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return wait(
        [
            subprocess.Popen([*command, str(index), *arguments], env=environment)
            for index in range(processes)
        ]
    )


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def wait(processes: Sequence[subprocess.Popen]) -> int:
    """Waits for all; returns the exit code of one that fails, or 0.

    The others would wait for it forever. They get a moment to fail by themselves,
    with a message of their own, and are ended then.
    """
    failed, last_moment = 0, math.inf
    try:
        while time.monotonic() < last_moment:
            codes = [process.poll() for process in processes]
            if None not in codes:
                break
            if any(codes):
                last_moment = min(last_moment, time.monotonic() + GRACE)
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        codes = [process.wait() for process in processes]
    for index, code in enumerate(codes):
        if code not in (0, -signal.SIGTERM):
            print(f"process {index} ended with code {code}", file=sys.stderr)
            failed = failed or code
    return failed


if __name__ == "__main__":
    sys.exit(main())
