"""Times a tensor-parallel TransformerLayer: ``python -m benchmarks.tensor_parallel``.

A step of both passes on one device and on two, with tp=2 and with sp beside it. Timings
are those of benchmarks.gpu: 10 calls back to back, medians. From a profile of other
steps come the time that a device spends in NCCL's kernels, which wait for the other
device too, and how much of it no other kernel of the device covers. From the compiled
program come the bytes that a device sends (benchmarks.wire).
"""

import argparse
import concurrent.futures
import contextlib
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_flax as te
from benchmarks import gpu, wire
from benchmarks.peers import Step, Work, chained, nnx_gradients
from benchmarks.profiles import Event, gpu_events
from examples.encoder.model import AXES

P = PartitionSpec
DEVICES = 2
LAYOUTS = {  # the rules of the axis "tp", and where x lies
    "1 device": (None, P()),
    "tp=2": ({"tp": "tp"}, P()),
    "tp=2, sp": ({"tp": "tp", "sp": "tp"}, P(None, "tp")),
}
RECIPES = ("none", "delayed_scaling", "mxfp8")
SMALL = Work("TransformerLayer, small", "transformer", (2, 64, 256), 512, ("gelu",), 0)
STEPS = 3  # of a profile


class Case(NamedTuple):
    """A layout, a recipe, a step that runs it, and its compiled program's text."""

    layout: str
    recipe: str
    step: Step
    text: str


def prepare(work: Work, layout: str, recipe: str) -> Case:
    """Makes the layer and compiles its step; may run beside others."""
    rules, spec = LAYOUTS[layout]
    made = te.load_recipe(recipe)
    with contextlib.ExitStack() as on:
        place: Callable = lambda a: a
        if rules is not None:
            devices = jax.devices()[:DEVICES]
            types = (AxisType.Auto,)
            mesh = jax.make_mesh((DEVICES,), ("tp",), axis_types=types, devices=devices)
            on.enter_context(jax.set_mesh(mesh))
            on.enter_context(nnx.logical_axis_rules(te.logical_axis_rules(**rules)))
            place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
        context = lambda: te.autocast(made)
        layer = gpu.model(work, **AXES)
        step, rest, params, x, dy = nnx_gradients(
            layer, work, te.value_and_grad, context
        )
        operands = rest, params, place(x), place(dy)
        program = step.lower(*operands).compile()
        return Case(layout, recipe, chained(program, *operands), program.as_text())


def collective_times(step: Step) -> tuple[float, float] | None:
    """Milliseconds of NCCL's kernels in a step, and those that nothing covers.

    The mean over the devices; None where the profile shows no such kernel.
    """
    found = [_split(events) for events in gpu_events(step, STEPS)]
    found = [pair for pair in found if pair[0]]
    if not found:
        return None
    total, alone = np.mean(found, axis=0) / STEPS / 1e6
    return float(total), float(alone)


def _split(events: Iterable[Event]) -> tuple[float, float]:
    """Nanoseconds of the collectives, and of them those outside all other kernels."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        span = (event.start_ns, event.start_ns + event.duration_ns)
        spans["nccl" in event.name.lower()].append(span)
    waiting, working = _length(spans[True]), _length(spans[False])
    return waiting, _length(spans[True] + spans[False]) - working


def _length(spans: list[tuple[float, float]]) -> float:
    """The length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def rows(cases: list[Case], repeats: int) -> list[dict]:
    """A row for each case; ratios above 1 are faster than what they compare with."""
    runs = {f"{case.layout}, {case.recipe}": case.step for case in cases}
    seconds = {
        name: statistics.median(times)
        for name, times in gpu.timings(runs, repeats).items()
    }
    made = []
    for case in cases:
        time = seconds.get(f"{case.layout}, {case.recipe}")
        if time is None:  # it failed, and timings has said why
            continue
        sent = sum(c.sent() for c in wire.collectives(case.text, DEVICES))
        spent = collective_times(case.step) if case.layout != "1 device" else None
        total, alone = spent or (None, None)
        ratio = lambda name, time=time: seconds.get(name, float("nan")) / time
        row = {"layout": case.layout, "recipe": case.recipe, "ms": 1e3 * time}
        row |= {"to_none": ratio(f"{case.layout}, none")}
        row |= {"to_one_device": ratio(f"1 device, {case.recipe}")}
        row |= {"collective_ms": total, "uncovered_ms": alone}
        made.append(row | {"sent_mb": sent / 1e6})
    return made


HEAD = """
| devices | recipe | ms | to none there | to 1 device | collectives | uncovered | sent |
|---|---|---|---|---|---|---|---|"""


def show(row: dict) -> None:
    """One line of the Markdown table; shares are of the step's time."""
    ms, both = row["ms"], (row["collective_ms"], row["uncovered_ms"])
    shares = ["" if t is None else f"{t:.2f} ms, {t / ms:.0%}" for t in both]
    print(
        f"| {row['layout']} | {row['recipe']} | {ms:.2f} | {row['to_none']:.2f}x "
        f"| {row['to_one_device']:.2f}x | {' | '.join(shares)} "
        f"| {row['sent_mb']:.1f} MB |",
        flush=True,
    )


def main(argv: list[str] | None = None) -> None:
    """Prints the table and, with ``--json FILE``, writes its rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    small = "a layer for the CPU, to try it; JAX_NUM_CPU_DEVICES=2"
    parser.add_argument("--small", action="store_true", help=small)
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="presets")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    devices = jax.devices()
    if len(devices) < DEVICES:
        parser.error(f"needs {DEVICES} devices, and jax sees {devices}")
    work = SMALL if options.small else gpu.WORKS["transformer"]
    print(f"{devices[0].device_kind}, jax {jax.__version__}: {work.name}, {work.shape}")
    named = [(work, n, r) for n in options.layouts for r in options.recipes]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # compiling takes longest
        cases = list(pool.map(lambda names: prepare(*names), named))
    found = rows(cases, options.repeats)
    print(HEAD)
    for row in found:
        show(row)
    if options.json:
        text = "".join(json.dumps(row) + "\n" for row in found)
        Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
