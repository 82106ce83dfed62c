"""Eight CPU devices as meshes of every kind, and the collectives of a program."""

import contextlib
import math
import re

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.testing.numerics import trees_close

A, E = AxisType.Auto, AxisType.Explicit
FAST = {"xla_backend_optimization_level": 0}  # halves the time to compile
_WORDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def mesh(*types, shape=(4, 2), names=("dp", "tp"), devices=None):
    # Of the CPU by default, also where the tests of the GPU import this.
    devices = devices or jax.devices("cpu")
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


MESHES = {
    "auto": mesh(A, A),
    "explicit": mesh(E, E),
    "mixed_ea": mesh(E, A),
    "mixed_ae": mesh(A, E),
    "auto_1": mesh(A, A, shape=(8, 1)),
    "explicit_1": mesh(E, E, shape=(8, 1)),
    "mixed_ea_1": mesh(E, A, shape=(8, 1)),
    "mixed_ae_1": mesh(A, E, shape=(8, 1)),
    "mixed_ea_1_first": mesh(E, A, shape=(1, 8)),
}
SOME = ("explicit", "mixed_ea", "mixed_ae_1")


def collectives(executable) -> dict[str, int]:
    """How many of each collective the compiled program holds."""
    text = executable.as_text()
    found = {w: len(re.findall(rf" {w}(?:-start)?\(", text)) for w in _WORDS}
    return {w: n for w, n in found.items() if n}


def gathered(executable) -> list[int]:
    """The number of elements of every array that the program gathers, on a device."""
    results = re.findall(r" = (.*?) all-gather(?:-start)?\(", executable.as_text())
    return [
        math.prod(int(n) for n in dims.split(",") if n)
        for result in results
        for dims in re.findall(r"\w+\[([\d,]*)\]", result)
    ]


def placed(on, specs, args):
    return [
        jax.device_put(a, NamedSharding(on, s))
        for a, s in zip(args, specs, strict=True)
    ]


def run(f, on, specs, *args, oracle=None, context=True, bounds=None):
    """Runs f on sharded operands; returns its collectives and results.

    The results equal those of ``oracle`` (f itself by default) on one device: within
    ``bounds``, a tree or a function of the one-device results, or to the bit.
    """
    want = jax.jit(oracle or f, compiler_options=FAST)(*args)
    with jax.set_mesh(on) if context else contextlib.nullcontext():
        operands = placed(on, specs, args)
        executable = jax.jit(f).lower(*operands).compile(FAST)
        got = executable(*operands)
    trees_close(got, want, bounds(want) if callable(bounds) else bounds)
    return collectives(executable), got


def sharded_as(array, on, spec: P) -> bool:
    return array.sharding.is_equivalent_to(NamedSharding(on, spec), array.ndim)
