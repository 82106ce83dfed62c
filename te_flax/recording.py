"""Statistics of each layer's operands, recorded while a model trains."""

import contextlib
import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from te_flax.errors import message
from te_flax.inspect import fp8_states, operands
from te_flax.paths import Place
from te_flax.quantize.statistics import Statistics
from te_flax.recipe.record import start_recording, stop_recording

FIELDS = ("step", "path", "role", *Statistics._fields)


@contextlib.contextmanager
def record(
    file: str | Path, model: Any, *, every: int = 1, first_step: int = 0
) -> Iterator["Recorder"]:
    """Writes the statistics of each layer's operands while the model trains.

    Call ``step()`` of the result after each training step. On recorded steps each
    layer quantizes x and the kernel once more, for the statistics; those of dy leave
    the backward pass as the cotangent of a mailbox, under every recipe, and reach the
    record through ``te.value_and_grad`` or ``te.absorb``. The FP8 state then holds two
    more variables, so a jitted step is traced once with and once without them, and
    without them it is what it would be without ``te.record``.
    ``nnx.cached_partial`` cannot follow that. A layer called several times in a step
    records x and the kernel of the last call and dy of all of them.

    Args:
        file: ends in ``.csv`` or ``.jsonl``; overwritten, or continued when
            ``first_step`` is not 0.
        model: the module that the training step gets, or a pytree that holds it.
        every: records one step in so many, >= 1.
        first_step: the number of the first step, >= 0.

    Yields:
        The :class:`Recorder`.

    Raises:
        ValueError: another file name, a count out of range, or a model without FP8
            state.
        TypeError: the model is none.

    Example:
        >>> import tempfile
        >>> import te_flax as te
        >>> from flax import nnx
        >>> model = te.DenseGeneral(32, 8, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with te.record(f"{folder}/run.csv", model, every=10) as recorder:
        ...         recorder.recording
        True
    """
    recorder = Recorder(file, model, every=every, first_step=first_step)
    try:
        yield recorder
    finally:
        recorder.close()


class Recorder:
    """What :func:`te_flax.record` yields.

    Args:
        file: as there.
        model: as there.
        every: as there.
        first_step: as there.

    Attributes:
        recording: whether the next step is recorded.

    Example:
        >>> Recorder("run.txt", None)
        Traceback (most recent call last):
        ValueError: record: file must end in .csv or .jsonl, got 'run.txt'; rename it
    """

    def __init__(
        self, file: str | Path, model: Any, *, every: int = 1, first_step: int = 0
    ):
        self._path = Path(file)
        if self._path.suffix not in (".csv", ".jsonl"):
            rule, remedy = "end in .csv or .jsonl", "rename it"
            raise ValueError(message("record", "file", rule, repr(str(file)), remedy))
        for name, value, low in (("every", every, 1), ("first_step", first_step, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                rule, remedy = f"be an int >= {low}", f"use {low}"
                raise ValueError(message("record", name, rule, repr(value), remedy))
        self._states = fp8_states("record", model)
        self._every, self._step = every, first_step
        mode = "a" if first_step else "w"
        self._file = self._path.open(mode, encoding="utf-8", newline="")
        if self._path.suffix == ".csv" and self._file.tell() == 0:
            csv.writer(self._file).writerow(FIELDS)
        self._switch()

    def step(self) -> None:
        """Ends a training step: writes its numbers, if they were recorded.

        Raises:
            ValueError: no layer was called under a recipe since the last step.
        """
        if self.recording:
            self._write()
        self._step += 1
        self._switch()

    def close(self) -> None:
        """Ends the recording and closes the file."""
        for place, _ in self._states:
            stop_recording(place.module)
        self._file.close()

    def _switch(self) -> None:
        self.recording = self._step % self._every == 0
        for place, _ in self._states:
            (start_recording if self.recording else stop_recording)(place.module)

    def _write(self) -> None:
        rows = [
            (self._step, path, role, *(_known(float(n)) for n in numbers))
            for place, _ in self._states
            for path, role, numbers in _recorded(place)
        ]
        if not rows:
            rule = "run a layer under a recipe between two calls of step"
            remedy = "pass the model that the training step gets, and te.autocast"
            raise ValueError(message("record", "model", rule, "none", remedy))
        if self._path.suffix == ".csv":
            csv.writer(self._file).writerows(rows)
        else:
            lines = (json.dumps(dict(zip(FIELDS, r, strict=True))) for r in rows)
            self._file.writelines(f"{line}\n" for line in lines)
        self._file.flush()


def _recorded(place: Place) -> Iterator[tuple[str, str, Statistics]]:
    """Path, role and numbers of what a layer recorded."""
    fp8: Any = place.module
    values = np.asarray(fp8.record[...])
    for path, role, at in operands(place):
        numbers = Statistics(*map(float, values[at]))
        if not math.isnan(numbers.amax):
            yield path, role, numbers


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
