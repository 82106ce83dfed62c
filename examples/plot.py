"""Draws the course of a training run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def save(history: Sequence[dict[str, float]], path: str | Path, title: str) -> None:
    """Writes a PNG with the loss on the left and the accuracy on the right.

    Args:
        history: the metrics of each epoch, as ``training.fit`` yields them.
        path: the PNG file to write.
        title: a line above both panels.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state, needed
    figure.suptitle(title)
    epochs = [entry["epoch"] for entry in history]
    for axes, name, factor, label in zip(
        figure.subplots(1, 2),
        ("loss", "accuracy"),
        (1, 100),
        ("cross entropy", "accuracy in %"),
        strict=True,
    ):
        for part, style in (("train", "--"), ("test", "-")):
            values = [factor * entry[f"{part}_{name}"] for entry in history]
            axes.plot(epochs, values, style, marker="o", markersize=3, label=part)
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
