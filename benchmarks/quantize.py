"""Times the quantize ops against plain jnp: ``python -m benchmarks.quantize``.

Every row is one run: our op under ``jax.jit``, the baseline of ``benchmarks.baselines``
and a memcpy that moves the same number of bytes (what the op reads plus what it
writes), called in turn. Printed are medians, so a busy machine disturbs all alike.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.baselines import BASELINES
from te_flax.ops import _extension, mxfp8, quantize
from te_flax.typing import Array

SHAPES = ((4096, 4096), (1000, 4104))
DTYPES = (jnp.bfloat16, jnp.float32)
TENSOR = {"row_format": "e4m3", "col_format": "e4m3", "k_ndim": 1}
ROW = {"row_format": "e4m3", "k_ndim": 1}
OURS: dict[str, Callable] = {
    "quantize_row": lambda x, s: quantize.QUANTIZE_ROW(x, s, **ROW),
    "quantize_rowcol": lambda x, s: quantize.QUANTIZE_ROWCOL(x, s, **TENSOR),
    "quantize_mxfp8_row": lambda x: mxfp8.QUANTIZE_MXFP8_ROW(x, **ROW),
    "quantize_mxfp8_rowcol": lambda x: mxfp8.QUANTIZE_MXFP8_ROWCOL(x, **TENSOR),
}


def seconds(fn: Callable, *arrays: Array) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    jax.block_until_ready(fn(*arrays))
    return time.perf_counter() - start


class Memcpy:
    """Copies between two warm buffers, one slice per core."""

    def __init__(self, moved: int) -> None:
        workers = os.cpu_count() or 1
        size = moved // 2 // workers  # a copy reads and writes each byte
        self.pairs = [
            (np.ones(size, np.uint8), np.zeros(size, np.uint8)) for _ in range(workers)
        ]
        self.pool = ThreadPoolExecutor(workers)

    def __call__(self) -> None:
        list(self.pool.map(lambda pair: np.copyto(pair[1], pair[0]), self.pairs))


def measure(op: str, shape: tuple[int, int], dtype: type, repeats: int) -> dict:
    """Medians of one op on one shape, interleaved with the baseline and the memcpy."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    arrays = (x,) if "mxfp8" in op else (x, jnp.float32(3.7))
    ours, baseline = jax.jit(OURS[op]), BASELINES[op]
    moved = sum(a.nbytes for a in (x, *jax.block_until_ready(ours(*arrays))))
    memcpy = Memcpy(moved)
    jax.block_until_ready(baseline(*arrays))
    times: dict[str, list[float]] = {"ours": [], "baseline": [], "memcpy": []}
    for _ in range(repeats):
        times["ours"].append(seconds(ours, *arrays))
        times["baseline"].append(seconds(baseline, *arrays))
        times["memcpy"].append(seconds(memcpy))
    median = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    return {
        "op": op,
        "shape": "x".join(map(str, shape)),
        "dtype": np.dtype(dtype).name,
        "ours_ms": median["ours"],
        "baseline_ms": median["baseline"],
        "ratio": median["baseline"] / median["ours"],
        "memcpy_share": median["memcpy"] / median["ours"],
        "gigabytes_per_second": moved / median["ours"] / 1e6,
    }


def rows(ops: list[str], repeats: int) -> Iterator[dict]:
    """All measurements, one after the other."""
    for op in ops:
        for shape in SHAPES:
            for dtype in DTYPES:
                yield measure(op, shape, dtype, repeats)


def main() -> None:
    """Prints the table, as Markdown, and with ``--json FILE`` writes it too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ops", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores {platform.machine()}, SIMD {_extension.simd_level()}, "
        f"jax {jax.__version__}, numpy {np.__version__}\n"
    )
    print("| op | shape | dtype | te_flax ms | plain jnp ms | ratio | GB/s | memcpy |")
    print("|---|---|---|---|---|---|---|---|")
    table = []
    for row in rows(options.ops, options.repeats):
        table.append(row)
        print(
            f"| {row['op']} | {row['shape']} | {row['dtype']} | {row['ours_ms']:.2f} "
            f"| {row['baseline_ms']:.2f} | {row['ratio']:.1f}x "
            f"| {row['gigabytes_per_second']:.1f} | {row['memcpy_share']:.0%} |",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=1)


if __name__ == "__main__":
    main()
