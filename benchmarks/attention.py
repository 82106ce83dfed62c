"""Times attention against jax.nn's XLA code: ``python -m benchmarks.attention``.

Forward and backward pass, jitted, called in turn; printed are medians, and the memory
that the compiled program allocates beside its arguments and results.
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

import te_flax as te
from benchmarks.quantize import seconds

HEADS, DIM = 8, 64
TIMED, MEASURED = 512, 4096  # lengths
MASKS = {"full": "no_mask", "causal": "causal"}


def _ours(implementation: str, mask: str) -> Callable:
    def attend(q, k, v):
        return te.dot_product_attention(
            q, k, v, mask_type=MASKS[mask], implementation=implementation
        )

    return attend


def _peer(mask: str) -> Callable:
    def attend(q, k, v):
        causal = mask == "causal"
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation="xla"
        )

    return attend


def _pass(attend: Callable, backward: bool) -> Callable:
    if not backward:
        return jax.jit(attend)

    def loss(q, k, v, do):
        return jnp.sum(attend(q, k, v) * do, dtype=jnp.float32)

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def _arrays(length: int, batch: int, dtype: type, backward: bool) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shape = (batch, length, HEADS, DIM)
    return [
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        for _ in range(4 if backward else 3)
    ]


def _temporary(run: Callable, arrays: list[jax.Array]) -> int:
    analysis = run.lower(*arrays).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def measure(mask: str, dtype: type, backward: bool, repeats: int) -> dict:
    """Medians at T = 512 and bytes at T = 4096, of ours and of jax.nn's."""
    runs = {
        "chunked": _pass(_ours("chunked", mask), backward),
        "reference": _pass(_ours("reference", mask), backward),
        "jax.nn": _pass(_peer(mask), backward),
    }
    arrays = _arrays(TIMED, 4, dtype, backward)
    for run in runs.values():
        jax.block_until_ready(run(*arrays))
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            times[key].append(seconds(lambda run=run: run(*arrays)))
    median = {key: 1e3 * statistics.median(t) for key, t in times.items()}
    long = _arrays(MEASURED, 1, dtype, backward)
    memory = {key: _temporary(run, long) / 2**20 for key, run in runs.items()}
    return {
        "mask": mask,
        "dtype": np.dtype(dtype).name,
        "passes": "fwd+bwd" if backward else "fwd",
        **{f"{key}_ms": value for key, value in median.items()},
        "time_ratio": median["chunked"] / median["jax.nn"],
        **{f"{key}_mib": value for key, value in memory.items()},
        "memory_ratio": memory["chunked"] / memory["jax.nn"],
    }


def main() -> None:
    """Prints the table, as Markdown, and with ``--json FILE`` writes it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores {platform.machine()}, jax {jax.__version__}, "
        f"{HEADS} heads of {DIM}; time at B 4, T {TIMED}, memory at B 1, T {MEASURED}\n"
    )
    heads = ["mask", "dtype", "passes"]
    for unit in ("ms", "MiB"):
        heads += ["chunked " + unit, "reference " + unit, "jax.nn " + unit, "ratio"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    table = []
    for mask in MASKS:
        for dtype in (jnp.float32, jnp.bfloat16):
            for backward in (False, True):
                row = measure(mask, dtype, backward, options.repeats)
                table.append(row)
                cells = [x if isinstance(x, str) else f"{x:.2f}" for x in row.values()]
                print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
