"""The devices of a run, and how the model and its batches are spread over them."""

import argparse
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import te_flax as te
from examples.errors import invalid
from examples.training import Batch

AXES = {
    "dp": "data parallel: each device has a part of the batch",
    "fsdp": "the same, and a part of each kernel",
    "tp": "tensor parallel: each device has some of the heads and hidden units",
}


class Layout(NamedTuple):
    """A mesh, and what the logical axes of the layers mean on it."""

    mesh: Mesh
    rules: tuple

    def place(self, batch: Batch) -> Batch:
        """Shares the rows of a batch out; each process keeps those of its devices."""
        sharding = NamedSharding(self.mesh, PartitionSpec(dict(self.rules)["batch"]))
        make = lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__)
        inputs, labels = batch
        return make(inputs), make(labels)


def parse(text: str) -> dict[str, int]:
    """Reads ``"dp=4,tp=2"``.

    Example:
        >>> parse("dp=4,tp=2")
        {'dp': 4, 'tp': 2}
    """
    remedy = f"write --mesh dp=4,tp=2; axes are {', '.join(AXES)}"
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES:
            rule = f"name axes of {', '.join(AXES)}"
            raise invalid("--mesh", rule, f"'{name}'", remedy)
        if not equals or not size.isdecimal() or int(size) < 1:
            rule = "give each axis a size of at least 1"
            raise invalid("--mesh", rule, f"'{part}'", remedy)
        if name in sizes:
            raise invalid("--mesh", "name each axis once", f"'{text}'", remedy)
        sizes[name] = int(size)
    return sizes


def join_processes() -> None:
    """Finds the other processes of this job; before any device is used.

    Raises:
        InputError: this is no job of a kind that jax.distributed knows.
    """
    try:
        jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        rule = "be used in a job that jax.distributed knows"
        remedy = "start it with srun, mpirun or in Kubernetes; on one machine use "
        remedy += "python -m examples.encoder.launch"
        raise invalid("--distributed", rule, error, remedy) from error


def layout(options: argparse.Namespace) -> Layout:
    """Makes the mesh of a run.

    Args:
        options: ``mesh``, the text, where None is one device, or data parallel over
            all devices of all processes where there are several; ``sp``, whether the
            sequence is split over tp between the layers' products; and the sizes
            ``batch_size``, ``hidden``, ``heads``, ``length``.

    Returns:
        The mesh and the rules.

    Raises:
        InputError: the text is malformed, or does not fit the devices or the sizes.
    """
    alone = jax.process_count() == 1
    text = options.mesh or f"dp={1 if alone else jax.device_count()}"
    sizes, devices = parse(text), np.array(jax.devices())
    if options.sp and "tp" not in sizes:
        raise invalid("--sp", "come with a tp axis in --mesh", f"'{text}'", "add tp=2")
    count = math.prod(sizes.values())
    if count > len(devices) or (count < len(devices) and not alone):
        rule = f"fit the {len(devices)} devices of this run"
        remedy = f"change it; on a CPU, JAX_NUM_CPU_DEVICES={count} makes that many"
        raise invalid("--mesh", rule, f"'{text}', {count} devices", remedy)
    _check_sizes(options, text, **sizes)
    grid = devices[:count].reshape(tuple(sizes.values()))
    mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    named = {name: name for name in sizes}
    return Layout(mesh, te.logical_axis_rules(**named, sp="tp" if options.sp else None))


def _check_sizes(
    options: argparse.Namespace, text: str, dp: int = 1, fsdp: int = 1, tp: int = 1
) -> None:
    """Raises InputError unless each device gets an equal part."""
    shared = [
        ("--batch-size", options.batch_size, dp * fsdp),
        ("--hidden", options.hidden, fsdp),
        ("--heads", options.heads, tp),
    ]
    if options.sp:
        shared.append(("--length", options.length, tp))
    for option, value, parts in shared:
        if value % parts:
            rule = f"be a multiple of {parts}, for the mesh '{text}'"
            raise invalid(option, rule, value, "change it or the mesh")
