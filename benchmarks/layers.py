"""Times the fused layer ops against plain jnp: ``python -m benchmarks.layers``.

Each op computes a function and the row and col copies of its result in one pass; the
baseline of ``benchmarks.baselines`` does the same work in jnp, jitted. The two and a
memcpy of the same bytes are called in turn. Printed are medians.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import LAYERS
from benchmarks.quantize import Memcpy, seconds
from te_flax.ops import _extension
from te_flax.ops._fused import Family, Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD
from te_flax.ops.norm import NORM_FWD

SHAPE = (2048, 1024)
GELU = {"activation": "gelu", "limit": 7.0, "alpha": 1.702, "offset": 1.0}
NORM_OPTIONS = {"epsilon": 1e-6, "zero_centered_gamma": False}
FAMILIES: dict[str, tuple[Family, dict]] = {
    "layernorm": (NORM_FWD["layernorm"], NORM_OPTIONS),
    "gelu": (ACT_FWD, GELU),
    "dgelu_dbias": (ACT_BWD, GELU),
}


def _op(name: str, scaling: str, dtype: type) -> Callable:
    """Our op as a jitted function of the same arrays as the baseline."""
    family, attrs = FAMILIES[name]
    both = ("row", "col")
    variant = Variant(scaling, both, h=False, dbias="dbias" in name)
    out_dtype = np.dtype(dtype).name

    def fn(*arrays, scale=()):
        if "gelu" in name:
            arrays = (*arrays[:-1], arrays[-1][:, None])
        options = {"k_ndim": 1, "out_dtype": out_dtype, "format": "e4m3"}
        one = scale[0] if scale else None
        return family(variant, *arrays, scale=one, **options, **attrs)

    return jax.jit(fn)


def _arrays(name: str, dtype: type) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    x = normal(*SHAPE).astype(dtype)
    if name == "layernorm":
        return x, normal(SHAPE[1]), normal(SHAPE[1])
    return (normal(*SHAPE).astype(dtype), x) if "dgelu" in name else (x,)


def measure(name: str, scaling: str, dtype: type, repeats: int) -> dict:
    """Medians of one op, interleaved with the baseline and the memcpy."""
    arrays = _arrays(name, dtype)
    scale = (jnp.float32(3.7),) if scaling == "tensor" else ()
    ours, baseline = _op(name, scaling, dtype), LAYERS[f"{name}_{scaling}"]
    results = jax.tree.leaves(jax.block_until_ready(ours(*arrays, scale=scale)))
    moved = sum(a.nbytes for a in (*arrays, *results))
    runs = {
        "ours": lambda: ours(*arrays, scale=scale),
        "baseline": lambda: baseline(*arrays, scale=scale),
        "memcpy": Memcpy(moved),
    }
    jax.block_until_ready(runs["baseline"]())
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            times[key].append(seconds(run))
    median = {key: 1e3 * statistics.median(t) for key, t in times.items()}
    return {
        "op": f"{name}_{scaling}_rowcol",
        "dtype": np.dtype(dtype).name,
        "ours_ms": median["ours"],
        "baseline_ms": median["baseline"],
        "ratio": median["baseline"] / median["ours"],
        "memcpy_share": median["memcpy"] / median["ours"],
    }


def main() -> None:
    """Prints the table, as Markdown, and with ``--json FILE`` writes it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--ops", nargs="+", choices=list(FAMILIES), default=FAMILIES)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores {platform.machine()}, SIMD {_extension.simd_level()}, "
        f"jax {jax.__version__}, {SHAPE[0]}x{SHAPE[1]}\n"
    )
    print("| op | dtype | te_flax ms | plain jnp ms | ratio | memcpy |")
    print("|---|---|---|---|---|---|")
    table = []
    for name in options.ops:
        for scaling in ("tensor", "mxfp8"):
            row = measure(name, scaling, jnp.bfloat16, options.repeats)
            table.append(row)
            print(
                f"| {row['op']} | {row['dtype']} | {row['ours_ms']:.2f} "
                f"| {row['baseline_ms']:.2f} | {row['ratio']:.1f}x "
                f"| {row['memcpy_share']:.0%} |",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
