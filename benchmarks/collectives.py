"""Times gathered RMSNorm against XLA: ``python -m benchmarks.collectives``.

Every device has ``--rows`` rows of ``--features`` bfloat16, inside ``jax.shard_map``
over one axis of all devices. What te_flax chooses, its other orders (``--orders``), the
same in plain jnp, and an all-gather of the rows alone are called in turn: a timing is
10 calls back to back, printed are medians. Ratios are of one run: to the first row of
plain jnp, which gathers first, and to the all-gather.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from benchmarks.baselines import mxfp8_row
from benchmarks.gpu import timings
from benchmarks.peers import Step
from te_flax.ops._gather_order import ORDERS, Order
from te_flax.typing import Array

AXIS = "tp"
CASES = {
    "normed + residual": ("normed", "residual"),
    "codes + scales": ("quantized",),
    "normed + codes + scales": ("normed", "quantized"),
    "codes + scales + residual": ("quantized", "residual"),
    "all four": ("normed", "quantized", "residual"),
}


def rms_norm(x: Array, gamma: Array) -> Array:
    """RMSNorm in float32, rounded to the dtype of x."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(mean + 1e-6) * gamma.astype(jnp.float32)
    return normed.astype(x.dtype)


def gather(x: Array) -> Array:
    """All rows on every device."""
    return lax.all_gather(x, AXIS, tiled=True)


def gather_first(outputs: tuple[str, ...], x: Array, gamma: Array) -> dict:
    """Plain jnp: gather, norm, quantize."""
    residual = gather(x)
    normed = rms_norm(residual, gamma)
    made: dict[str, Any] = {"normed": normed, "residual": residual}
    if "quantized" in outputs:
        made["quantized"] = mxfp8_row(normed)[:2]
    return {name: made[name] for name in outputs}


def gather_last(outputs: tuple[str, ...], x: Array, gamma: Array) -> dict:
    """Plain jnp: norm and quantize own rows, gather what is asked for."""
    normed = rms_norm(x, gamma)
    made: dict[str, Any] = {"normed": normed, "residual": x}
    if "quantized" in outputs:
        made["quantized"] = mxfp8_row(normed)[:2]
    return jax.tree.map(gather, {name: made[name] for name in outputs})


def ours(outputs: tuple[str, ...], order: Order, x: Array, gamma: Array):
    """te_flax's, in the order given."""
    quantize = "mxfp8" if "quantized" in outputs else None
    with mock.patch.dict(ORDERS, {outputs: order}):
        return te.allgather_rms_norm(
            x, gamma, axis=AXIS, quantize=quantize, outputs=outputs
        )


def versions(outputs: tuple[str, ...], orders: bool) -> dict[str, Callable]:
    """The functions of one device's rows to time."""
    bind = functools.partial
    chosen = ORDERS[outputs]
    others = [o for o in dict.fromkeys(ORDERS.values()) if o.makes(outputs)]
    tried = dict.fromkeys((chosen, *others) if orders else (chosen,))
    found: dict[str, Callable] = {
        f"te_flax: {order}": bind(ours, outputs, order) for order in tried
    }
    found["XLA, gather first"] = bind(gather_first, outputs)
    found["XLA, gather last"] = bind(gather_last, outputs)
    found["all-gather of x alone"] = lambda x, gamma: gather(x)
    return found


def steps(mesh: Mesh, outputs: tuple[str, ...], rows: int, features: int, orders: bool):
    """What to time, on arrays of its own."""
    key, shape = jax.random.key(0), (rows * mesh.size, features)
    rows_cut, whole = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    make = jax.jit(
        lambda: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=rows_cut
    )
    x, gamma = make(), jax.device_put(jnp.ones(features, jnp.bfloat16), whole)
    found: dict[str, Step] = {}
    for name, fn in versions(outputs, orders).items():
        mapped = jax.shard_map(
            fn, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
        )
        found[name] = functools.partial(jax.jit(mapped), x, gamma)
    return found


def rows_of(mesh: Mesh, rows: int, options: argparse.Namespace) -> Iterator[dict]:
    """A row for each case and version."""
    for case in options.cases:
        runs = steps(mesh, CASES[case], rows, options.features, options.orders)
        seconds = timings(runs, options.repeats)
        medians = {name: statistics.median(t) for name, t in seconds.items()}
        for name, times in seconds.items():
            median = medians[name]
            yield {
                "case": f"{case}, {rows} x {options.features} a device",
                "run": name,
                "devices": mesh.size,
                "ms": 1e3 * median,
                "spread": (max(times) - min(times)) / median,
                "ratio": medians["XLA, gather first"] / median,
                "all_gathers": median / medians["all-gather of x alone"],
            }


def show(row: dict) -> None:
    """One line of the Markdown table."""
    print(
        f"| {row['case']} | {row['run']} | {row['ms']:.4f} | {row['spread']:.1%} "
        f"| {row['ratio']:.2f}x | {row['all_gathers']:.2f} |",
        flush=True,
    )


def main() -> None:
    """Prints the table and, with ``--json FILE``, writes its rows as JSON lines."""
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, help="how many; all by default")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[8192 if gpu else 512, 64]
    )
    parser.add_argument("--features", type=int, default=8192 if gpu else 1024)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--orders", action="store_true", help="time the others too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    devices = jax.devices()[: options.devices]
    mesh = jax.make_mesh(
        (len(devices),), (AXIS,), (jax.sharding.AxisType.Auto,), devices=devices
    )
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}\n")
    print("| case | run | ms | spread | to XLA's first | all-gathers |")
    print("|---|---|---|---|---|---|")
    table = []
    for rows in options.rows:
        for row in rows_of(mesh, rows, options):
            show(row)
            table.append(row)
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in table)


if __name__ == "__main__":
    main()
