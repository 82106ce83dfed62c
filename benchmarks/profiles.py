"""What a profile of the GPUs holds."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax


class Event(NamedTuple):
    """A kernel, a memset or a copy on a GPU."""

    name: str
    start_ns: float
    duration_ns: float


def gpu_events(step: Callable, steps: int) -> list[list[Event]]:
    """Kernels, memsets and copies of ``steps`` calls, a list for each GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                last = step()
            jax.block_until_ready(last)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        return [
            [
                Event(e.name, e.start_ns, e.duration_ns)
                for line in plane.lines
                if "Stream" in line.name
                for e in line.events
            ]
            for plane in planes
            if plane.name.startswith("/device:GPU")
        ]
