"""What a training run shows and writes: progress bar, lines, metrics and plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from examples import plot
from examples.training import Metrics


class Report:
    """Shows the progress of a run and writes its metrics; a context manager.

    Args:
        title: in front of the progress bar.
        steps: training steps of the whole run.
        done: those of them that an earlier run did.
        metrics: file for a JSON line per epoch, or None.
        earlier: metrics of the epochs before this run, of one that it resumes.
        quiet: whether to show and write nothing, as all processes but one should.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        done: int = 0,
        metrics: Path | None,
        earlier: Sequence[Metrics] = (),
        quiet: bool = False,
    ):
        self.console = Console(quiet=quiet)
        columns = "{task.description}", BarColumn(), MofNCompleteColumn()
        self.progress = Progress(*columns, TimeElapsedColumn(), console=self.console)
        self.task = self.progress.add_task(title, total=steps, completed=done)
        self.metrics = None if quiet else metrics
        self.history: list[Metrics] = list(earlier)
        if self.metrics is not None:
            self.metrics.write_text("".join(map(_line, self.history)))

    def __enter__(self) -> "Report":
        """Starts the progress bar."""
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops the progress bar."""
        self.progress.stop()

    def step(self, result: Any = None) -> None:
        """Counts a training step."""
        self.progress.advance(self.task)

    def epoch(self, entry: Metrics) -> None:
        """Prints and writes the metrics of an epoch."""
        self.history.append(entry)
        loss, accuracy = entry["test_loss"], entry["test_accuracy"]
        start = f"epoch {entry['epoch']:>3}   test loss {loss:.4f}"
        end = f"test accuracy {accuracy:.2%}   {entry['seconds']:.1f} s"
        self.console.print(f"{start}   {end}", highlight=False)
        if self.metrics is not None:
            with self.metrics.open("a") as file:
                file.write(_line(entry))

    def plot(self, path: Path, title: str) -> None:
        """Draws the course of the run."""
        if not self.console.quiet:
            plot.save(self.history, path, title)
        self.console.print(f"plot: {path}", highlight=False)


def _line(entry: Metrics) -> str:
    return json.dumps(entry) + "\n"
