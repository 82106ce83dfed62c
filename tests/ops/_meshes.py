"""Eight CPU devices as meshes of every kind, and the collectives of a program."""

import contextlib
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

A, E = AxisType.Auto, AxisType.Explicit
FAST = {"xla_backend_optimization_level": 0}  # halves the time to compile
_WORDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def mesh(*types, shape=(4, 2), names=("dp", "tp")):
    return jax.make_mesh(shape, names, axis_types=types)


def collectives(executable) -> dict[str, int]:
    """How many of each collective the compiled program holds."""
    text = executable.as_text()
    found = {w: len(re.findall(rf" {w}(?:-start)?\(", text)) for w in _WORDS}
    return {w: n for w, n in found.items() if n}


def placed(on, specs, args):
    return [
        jax.device_put(a, NamedSharding(on, s))
        for a, s in zip(args, specs, strict=True)
    ]


def run(f, on, specs, *args, oracle=None, context=True, tolerance=2e-4):
    """Runs f on sharded operands; returns its collectives and results.

    The results equal ``oracle`` (f itself by default) on one device: codes exactly.
    """
    want = jax.jit(oracle or f, compiler_options=FAST)(*args)
    with jax.set_mesh(on) if context else contextlib.nullcontext():
        operands = placed(on, specs, args)
        executable = jax.jit(f).lower(*operands).compile(FAST)
        got = executable(*operands)
    close(got, want, tolerance)
    return collectives(executable), got


def close(got, want, tolerance=2e-4):
    def one(a, b):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        limit = 0 if a.dtype.itemsize == 1 else tolerance
        np.testing.assert_allclose(
            np.asarray(a).astype(np.float32),
            np.asarray(b).astype(np.float32),
            rtol=limit,
            atol=limit,
        )

    jax.tree.map(one, got, want)


def sharded_as(array, on, spec: P) -> bool:
    return array.sharding.is_equivalent_to(NamedSharding(on, spec), array.ndim)
