"""Times layers and kernels on a GPU: ``python -m benchmarks.gpu [--peer flax,te]``.

Everything of one row runs in one process in turns of random order, as what ran before
decides the GPU's clock. A timing is 10 to 200 calls back to back, about 30 ms by the
time of the first call; the medians of ``--repeats`` timings are printed, and the ratio
is to XLA's bfloat16 of the same row. Kernels are given as TB/s of necessary traffic,
inputs and outputs once, and as a share of what a device copy reaches in the same run;
products as TFLOP/s and as a share of a square product of 8192.
"""

import argparse
import functools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import te_flax as te
from benchmarks import attention_gpu, jit_gpu
from benchmarks.baselines import BASELINES, LAYERS
from benchmarks.layers import FAMILIES
from benchmarks.peers import HEAD_DIM, PEERS, Step, Work, nnx_step, plain
from te_flax.ops import mxfp8, quantize
from te_flax.ops._choice import parse
from te_flax.ops._fused import Variant

CALLS = (10, 200)  # at least, at most
SECONDS = 0.03
PARTS = ("layers", "products", "kernels", "attention")
RECIPES = "delayed_scaling,current_scaling,float8_block_scaling,mxfp8"


def _dense(tokens: int, k: int, n: int) -> Work:
    name = f"dense {tokens} x {k} -> {n}"
    return Work(name, "dense", (tokens, k), n, (), 6.0 * tokens * k * n)


def _mlp(name: str, activations: tuple[str, ...]) -> Work:
    batch, sequence, hidden, mid = 8, 2048, 4096, 16384
    flops = 6.0 * batch * sequence * hidden * mid * (1 + len(activations))
    shape = (batch, sequence, hidden)
    return Work(f"LayerNormMLP {name}", "mlp", shape, mid, activations, flops)


def _transformer() -> Work:
    batch, sequence, hidden, mid = 8, 2048, 4096, 16384
    products = 4 * hidden * hidden + 2 * hidden * mid
    # Half of the scores; their two products forward, five backward.
    attention = 2 * sequence * hidden * 3.5 / 2
    flops = batch * sequence * (6.0 * products + 2 * attention)
    shape = (batch, sequence, hidden)
    return Work("TransformerLayer gelu", "transformer", shape, mid, ("gelu",), flops)


WORKS = {
    "dense_wide": _dense(16384, 4096, 16384),
    "dense_square": _dense(16384, 4096, 4096),
    "dense_small": _dense(4096, 4096, 4096),
    "mlp_gelu": _mlp("gelu", ("gelu",)),
    "mlp_swiglu": _mlp("silu x linear", ("silu", "linear")),
    "transformer": _transformer(),
}
PRODUCTS = (  # m, n, k
    (16384, 16384, 4096),
    (4096, 16384, 16384),
    (16384, 4096, 16384),
    (4096, 4096, 4096),
    (4096, 16384, 4096),
)


def model(work: Work, **axes: Any) -> Any:
    """Our layer; a transformer layer takes the names of its axes."""
    hidden = work.shape[-1]
    common = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    if work.kind == "dense":
        return te.DenseGeneral(hidden, work.features, use_bias=False, **common)
    if work.kind == "transformer":
        return te.TransformerLayer(
            hidden,
            work.features,
            hidden // HEAD_DIM,
            mlp_activations=work.activations,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            enable_relative_embedding=False,
            scale_attn_logits=True,
            **axes,
            **common,
        )
    return te.LayerNormMLP(
        hidden,
        work.features,
        activations=work.activations,
        use_bias=len(work.activations) == 1,
        **common,
    )


def ours(work: Work, recipe: Any) -> Step:
    """Our layer under a recipe."""

    def context():
        return te.autocast(recipe, enabled=recipe is not None)

    return nnx_step(model(work), work, te.value_and_grad, context)


def timings(runs: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds of a call, each run ``repeats`` times in turn."""
    seconds: dict[str, list[float]] = {}
    calls = {}
    for name, run in runs.items():
        start = time.perf_counter()
        try:
            for _ in range(3):
                began = time.perf_counter()
                jax.block_until_ready(run())
            seconds[name], now = [], time.perf_counter()
            fewest, most = CALLS
            calls[name] = min(max(fewest, math.ceil(SECONDS / (now - began))), most)
            ready = now - start
            print(f"{name}: compiled in {ready:.0f} s", file=sys.stderr)
        except Exception as error:
            print(f"{name}: {str(error).splitlines()[0][:160]}")
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(seconds), len(seconds)):
            start = time.perf_counter()
            for _ in range(calls[name]):
                last = runs[name]()
            jax.block_until_ready(last)
            seconds[name].append((time.perf_counter() - start) / calls[name])
            del last
    return seconds


def _row(case: str, run: str, times: list[float], base: float, **more: Any) -> dict:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median
    row = {"case": case, "run": run, "ms": 1e3 * median, "spread": spread}
    return row | {"ratio": base / median} | {k: v / median for k, v in more.items()}


def layer_rows(names: list[str], recipes: list[str], peers: list[str], repeats: int):
    """A row for each layer and library; the ratio is to XLA's bfloat16."""
    for name in names:
        work = WORKS[name]
        runs = {"XLA bfloat16": plain(work), "te_flax none": ours(work, None)}
        for recipe in recipes:
            made = te.load_recipe(recipe)
            runs[f"te_flax {recipe}"] = ours(work, made)
            if recipe == "delayed_scaling":
                fast = te.DelayedScaling(split_accumulator=(False, False, False))
                runs["te_flax delayed_scaling, fast sums"] = ours(work, fast)
        for peer in peers:
            for label, make in PEERS[peer].items():
                try:
                    runs[label] = make(work)
                except (ImportError, NotImplementedError) as error:
                    print(f"{name}, {label}: left out, {error}")
        seconds = timings(runs, repeats)
        base = statistics.median(seconds["XLA bfloat16"])
        for run, times in seconds.items():
            yield _row(work.name, run, times, base, tflops=work.flops / 1e12)


def product_rows(repeats: int) -> Iterator[dict]:
    """A row for each product, shape and way to scale."""
    for m, n, k in PRODUCTS:
        keys = jax.random.split(jax.random.key(0))
        lhs = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
        rhs = jax.random.normal(keys[1], (n, k), jnp.bfloat16)
        runs: dict[str, Step] = {}
        dims = ((1,), (1,))
        dot = jax.jit(functools.partial(te.gemm, contracting_dims=dims))
        runs["XLA bfloat16"] = functools.partial(dot, lhs, rhs)
        with te.kernels("gemm=native"):
            call = jax.jit(functools.partial(te.gemm, contracting_dims=dims))
            runs["bfloat16"] = functools.partial(call, lhs, rhs)
            call(lhs, rhs)
        one, two = te.TensorQuantizer(), te.BlockQuantizer()
        flat = te.BlockQuantizer(two_dimensional=True)
        pairs = {
            "FP8 fast": (one, one, False),
            "FP8 split": (one, one, True),
            "1x128 . 128x128": (two, flat, True),
            "1x128 . 1x128": (two, two, True),
            "MXFP8": (te.MXFP8Quantizer(), te.MXFP8Quantizer(), True),
        }
        for label, (left, right, split) in pairs.items():
            how = {"k_ndim": 1, "rowwise": True, "colwise": False}
            operands = (left(lhs, **how).rowwise, right(rhs, **how).rowwise)
            call = jax.jit(
                functools.partial(
                    te.gemm,
                    contracting_dims=dims,
                    out_dtype=jnp.bfloat16,
                    split_accumulator=split,
                )
            )
            runs[label] = functools.partial(call, *operands)
        seconds = timings(runs, repeats)
        base = statistics.median(seconds["XLA bfloat16"])
        for run, times in seconds.items():
            flops = 2e-12 * m * n * k
            yield _row(f"product {m} x {n} x {k}", run, times, base, tflops=flops)


def _kernels(n: int) -> Iterator[tuple[str, Callable, Callable, tuple]]:
    """Name, our op, the plain jnp version and the operands of each kernel."""
    x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    scale, ones = jnp.float32(60), jnp.ones(n, jnp.bfloat16)
    formats = {"row_format": "e4m3", "col_format": "e4m3", "k_ndim": 1}
    ops = {
        "quantize_row": (quantize.QUANTIZE_ROW, (x, scale)),
        "quantize_rowcol": (quantize.QUANTIZE_ROWCOL, (x, scale)),
        "quantize_mxfp8_row": (mxfp8.QUANTIZE_MXFP8_ROW, (x,)),
        "quantize_mxfp8_rowcol": (mxfp8.QUANTIZE_MXFP8_ROWCOL, (x,)),
    }
    for name, (op, operands) in ops.items():
        attrs = {k: v for k, v in formats.items() if k in op.attrs}
        yield name, functools.partial(op, **attrs), BASELINES[name], operands
    for name, (family, attrs) in FAMILIES.items():
        inputs = {"layernorm": (x, ones, ones), "gelu": (x,), "dgelu_dbias": (x, x)}
        for scaling in ("tensor", "mxfp8"):
            variant = Variant(scaling, ("row", "col"), h=False, dbias="dbias" in name)
            operands = inputs[name]
            if "gelu" in name:
                operands = (*operands[:-1], operands[-1][:, None])
            call = functools.partial(
                family,
                variant,
                k_ndim=1,
                out_dtype="bfloat16",
                format="e4m3",
                scale=scale if scaling == "tensor" else None,
                **attrs,
            )
            given = {"scale": (scale,)} if scaling == "tensor" else {}
            base = functools.partial(LAYERS[f"{name}_{scaling}"], **given)
            yield f"{name}_{scaling}", call, base, (operands, inputs[name])


def kernel_rows(n: int, repeats: int) -> Iterator[dict]:
    """A row for each kernel: traffic and the share of a device copy."""
    for name, op, baseline, operands in _kernels(n):
        mine, theirs = operands if isinstance(operands[0], tuple) else (operands,) * 2
        call = jax.jit(op)
        moved = jax.tree.leaves((mine, jax.eval_shape(call, *mine)))
        traffic = sum(math.prod(a.shape) * a.dtype.itemsize for a in moved)
        block = jax.random.bits(jax.random.key(1), (n, n), jnp.uint16)
        runs: dict[str, Step] = {
            "te_flax": functools.partial(call, *mine),
            "XLA plain jnp": functools.partial(jax.jit(baseline), *theirs),
            "device copy": functools.partial(jax.jit(jnp.copy), block),
        }
        seconds = timings(runs, repeats)
        copy = 2 * block.nbytes / statistics.median(seconds.pop("device copy")) / 1e12
        base = statistics.median(seconds["XLA plain jnp"])
        for run, times in seconds.items():
            row = _row(f"{name} {n} x {n}", run, times, base, tbs=traffic / 1e12)
            yield row | {"share": row["tbs"] / copy}


def jit_rows(sizes: Iterable[tuple[int, int]], repeats: int) -> Iterator[dict]:
    """A row for each kernel both ways; the ratio is to the compiled one."""
    for m, k in sizes:
        block = jax.random.bits(jax.random.key(1), (m, k), jnp.uint16)
        copy = functools.partial(jax.jit(jnp.copy), block)
        native = jit_gpu.calls(m, k, parse("*=native"))
        generated = jit_gpu.calls(m, k, parse("*=jit"))
        for (name, left, types), (_, right, _) in zip(native, generated, strict=True):
            keys = jax.random.split(jax.random.key(0), len(types))
            operands = [
                jax.random.normal(key, t.shape, t.dtype)
                for key, t in zip(keys, types, strict=True)
            ]
            moved = jax.tree.leaves((operands, jax.eval_shape(left, *operands)))
            traffic = sum(math.prod(a.shape) * a.dtype.itemsize for a in moved)
            runs: dict[str, Step] = {
                "native": functools.partial(jax.jit(left), *operands),
                "jit": functools.partial(jax.jit(right), *operands),
                "device copy": copy,
            }
            seconds = timings(runs, repeats)
            best = 2 * block.nbytes / statistics.median(seconds.pop("device copy"))
            base = statistics.median(seconds["native"])
            for run, times in seconds.items():
                row = _row(f"{name} {m} x {k}", run, times, base, tbs=traffic / 1e12)
                yield row | {"share": 1e12 * row["tbs"] / best}
    jit_gpu.report()


def attention_rows(repeats: int) -> Iterator[dict]:
    """A row for each case, pass and library; the ratio is to jax.nn's cuDNN."""
    for case, backward, tflop in attention_gpu.cases():
        runs = attention_gpu.runs(case, backward=backward)
        seconds = timings(runs, repeats)
        base = statistics.median(next(iter(seconds.values())))
        name = f"attention {case}, {'fwd+bwd' if backward else 'fwd'}"
        for run, times in seconds.items():
            yield _row(name, run, times, base, tflops=tflop)


@functools.cache
def ceilings(n: int, repeats: int) -> dict[str, float]:
    """TFLOP/s of a product of n x n matrices in bfloat16 and in FP8."""
    x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    codes = te.TensorQuantizer()(x, k_ndim=1, rowwise=True, colwise=False).rowwise
    how = {"contracting_dims": ((1,), (1,)), "out_dtype": jnp.bfloat16}
    dot = jax.jit(functools.partial(te.gemm, split_accumulator=False, **how))
    operands = {"bfloat16": x, "FP8": codes}
    runs = {name: functools.partial(dot, a, a) for name, a in operands.items()}
    seconds = timings(runs, repeats)
    return {k: 2e-12 * n**3 / statistics.median(t) for k, t in seconds.items()}


def ceiling(run: str) -> str:
    """Whose products a run has: those of MXFP8 are bfloat16 before sm_100."""
    wide = ("bfloat16", "none", "mxfp8", "cudnn", "te_flax")
    return "bfloat16" if run.lower().endswith(wide) else "FP8"


def show(row: dict) -> None:
    """One line of the Markdown table."""
    rate = ""
    if "tflops" in row:
        rate = f"{row['tflops']:.0f} TFLOP/s, {row['share']:.0%} of a product"
    if "tbs" in row:
        rate = f"{row['tbs']:.2f} TB/s, {row['share']:.0%} of a copy"
    print(
        f"| {row['case']} | {row['run']} | {row['ms']:.4f} | {row['spread']:.1%} "
        f"| {row['ratio']:.2f}x | {rate} |",
        flush=True,
    )


def main() -> None:
    """Prints the table and, with ``--json FILE``, writes its rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default="", help="comma list of flax and te")
    parser.add_argument("--recipes", default=RECIPES, help="comma list of presets")
    parser.add_argument("--layers", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument("--size", type=int, default=16384, help="of the kernels' x")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument(
        "--jit",
        nargs="*",
        type=jit_gpu.size,
        metavar="MxK",
        help="generated kernels only, at these sizes, as 16384x16384",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.error(f"needs a GPU, and jax's default device is {device}")
    print(f"{device.device_kind}, jax {jax.__version__}\n")
    print("| case | run | ms | spread | ratio | rate |\n|---|---|---|---|---|---|")
    peers = [p for p in options.peer.split(",") if p]
    parts = {
        "layers": lambda: layer_rows(
            options.layers, options.recipes.split(","), peers, options.repeats
        ),
        "products": lambda: product_rows(options.repeats),
        "kernels": lambda: kernel_rows(options.size, options.repeats),
        "attention": lambda: attention_rows(options.repeats),
    }
    if options.jit is not None:
        sizes = options.jit or jit_gpu.SIZES
        parts = {"jit": lambda: jit_rows(sizes, options.repeats)}
    rows = []
    for name, part in parts.items():
        if options.only in (None, name):
            for row in part():
                if "tflops" in row:
                    best = ceilings(8192, options.repeats)[ceiling(row["run"])]
                    row["share"] = row["tflops"] / best
                show(row)
                rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
