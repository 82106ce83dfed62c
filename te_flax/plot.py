"""Draws what ``te.record`` wrote: ``python -m te_flax.plot FILE [-o PNG]``."""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_flax.errors import message

ROLES = ("x", "kernel", "dy")  # of a GEMM, then those of attention
ROLES += ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")
PANELS = {
    "amax": ("amax", "log"),
    "scale": ("scale", "log"),
    "saturated": ("saturated elements", "linear"),
    "flushed": ("flushed elements", "linear"),
}
LEGEND = 12  # more layers than this are told apart by the file, not by the legend


def read(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file that ``te.record`` wrote.

    Args:
        path: a ``.csv`` or ``.jsonl`` file.

    Returns:
        A dict of step, path, role and the numbers for each row; None for a number
        that is not known.

    Raises:
        ValueError: there is no such file, or it holds something else.

    Example:
        >>> read("nowhere.csv")
        Traceback (most recent call last):
        ValueError: plot: file must exist, got 'nowhere.csv'; te.record writes one
    """
    path = Path(path)
    if not path.is_file():
        raise _invalid("exist", path, "te.record writes one")
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in lines if line.strip()]
        else:
            records = list(csv.DictReader(lines))
        for record in records:
            numbers = {name: _number(record[name]) for name in (*PANELS, "nonfinite")}
            step, where, role = int(record["step"]), record["path"], record["role"]
            if role not in ROLES:
                raise ValueError(f"unknown role {role!r}")
            rows.append({"step": step, "path": where, "role": role, **numbers})
    except (ValueError, KeyError, TypeError) as error:
        what = f"{str(path)!r} ({type(error).__name__}: {error})"
        raise _invalid("be a CSV or JSONL file of te.record", what) from error
    if not rows:
        raise _invalid("hold recorded steps", path, "call step() of te.record")
    return rows


def draw(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Writes a PNG: a row for each operand, a panel for each number over the steps.

    Args:
        rows: as :func:`read` returns them.
        path: the PNG file to write.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        rule, remedy = "be installed", "pip install matplotlib"
        raise ValueError(message("plot", "matplotlib", rule, error, remedy)) from error
    roles = [role for role in ROLES if any(row["role"] == role for row in rows)]
    layers = list(dict.fromkeys(row["path"] for row in rows))
    figure = Figure(figsize=(13, 2.6 * len(roles)), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state, needed
    grid = figure.subplots(len(roles), len(PANELS), squeeze=False)
    for role, line in zip(roles, grid, strict=True):
        for axes, (name, (label, kind)) in zip(line, PANELS.items(), strict=True):
            for i, layer in enumerate(layers):
                _curve(axes, rows, role, layer, name, kind, color=f"C{i}")
            axes.set(title=f"{role}: {label}", xlabel="step")
            if axes.lines and kind == "log":
                axes.set_yscale("log")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
    if len(layers) <= LEGEND:
        curves = {line.get_label(): line for panel in grid.flat for line in panel.lines}
        lines, names = list(curves.values()), list(curves)
        figure.legend(lines, names, loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 after a one-line error."""
    parser = argparse.ArgumentParser(
        prog="python -m te_flax.plot", description="Draws what te.record wrote."
    )
    parser.add_argument("file", help="a .csv or .jsonl file that te.record wrote")
    parser.add_argument("-o", "--output", help="the PNG; by default beside the file")
    options = parser.parse_args(arguments)
    output = options.output or Path(options.file).with_suffix(".png")
    try:
        draw(read(options.file), output)
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(output)
    return 0


def _curve(
    axes: Any, rows: Any, role: str, layer: str, name: str, kind: str, color: str
) -> None:
    """One layer's known numbers; a log scale leaves zeros out."""
    points = [
        (row["step"], row[name])
        for row in rows
        if (row["role"], row["path"]) == (role, layer)
        and row[name] is not None
        and (kind == "linear" or row[name] > 0)
    ]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker=".", color=color, label=layer or "the layer")


def _number(value: Any) -> float | None:
    return None if value in (None, "") else float(value)


def _invalid(rule: str, got: Any, remedy: str = "pass its path") -> ValueError:
    shown = repr(str(got)) if isinstance(got, Path) else got
    return ValueError(message("plot", "file", rule, shown, remedy))


if __name__ == "__main__":
    sys.exit(main())
