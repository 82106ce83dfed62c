"""Times each op's CUDA handler against its reference: ``python -m benchmarks.sizes``.

What XLA makes of the reference is the other choice ``auto`` has. GPU time is taken from
a profile, plus a microsecond for every kernel: what lies between two kernels of a
command buffer. Printed is reference / handler, so that above 1 the handler is faster.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import te_flax as te
from benchmarks.layers import GELU, NORM_OPTIONS
from benchmarks.profiles import gpu_events
from te_flax.ops import amax, block, dequantize, mxfp6, mxfp8, quantize
from te_flax.ops._fused import Variant
from te_flax.ops._op import KernelOp
from te_flax.ops.activation import ACT_BWD, ACT_FWD, QUANTIZE_DBIAS
from te_flax.ops.gemm import gemm_op
from te_flax.ops.mxfp8_values import QUANTIZE_MXFP8_VALUES
from te_flax.ops.norm import NORM_BWD, NORM_FWD

BOTH = ("row", "col")
PLAIN = (
    *(quantize.QUANTIZE_ROW, quantize.QUANTIZE_COL, quantize.QUANTIZE_ROWCOL),
    *(mxfp8.QUANTIZE_MXFP8_ROW, mxfp8.QUANTIZE_MXFP8_COL, mxfp8.QUANTIZE_MXFP8_ROWCOL),
    *(mxfp8.QUANTIZE_MXFP8_ROWCOL_SWIZZLED, QUANTIZE_MXFP8_VALUES[BOTH, BOTH]),
    *(block.QUANTIZE_BLOCK_ROW, block.QUANTIZE_BLOCK_COL, block.QUANTIZE_BLOCK_ROWCOL),
    *(block.QUANTIZE_BLOCK2D_ROWCOL, amax.AMAX),
)
SHAPES = ((64, 1024), (1024, 4096), (16384, 4096))
CALLS = 5
GAP = 1e3  # nanoseconds between two kernels


def gpu_time(call: Callable, arrays: tuple) -> float:
    """Nanoseconds of one call on the GPU."""
    for _ in range(2):
        jax.block_until_ready(call(*arrays))
    found = gpu_events(functools.partial(call, *arrays), CALLS)
    return sum(e.duration_ns + GAP for events in found for e in events) / CALLS


def cases(m: int, k: int, dtype: Any) -> Iterator[tuple[KernelOp, tuple, dict]]:
    """Each op with operands and attributes."""
    keys = jax.random.split(jax.random.key(0))
    x, dy = (jax.random.normal(key, (m, k), dtype) for key in keys)
    scale, ones, rows = jnp.float32(60), jnp.ones(k, dtype), jnp.ones(m)
    for op in PLAIN:
        yield op, (x, scale)[: len(op.dims.ins)], {}
    six = {"row_format": "e2m3", "col_format": "e2m3"}
    yield mxfp6.QUANTIZE_MXFP6_ROWCOL, (x,), six
    codes = x.astype(jnp.float8_e4m3fn)
    yield dequantize.DEQUANTIZE, (codes, scale), {}
    for op, shape, kind in (
        (dequantize.DEQUANTIZE_MXFP8_ROW, (m, k // 32), jnp.uint8),
        (dequantize.DEQUANTIZE_MXFP8_COL, (m // 32, k), jnp.uint8),
        (dequantize.DEQUANTIZE_BLOCK, (m, k // 128), jnp.float32),
    ):
        yield op, (codes, jnp.ones(shape, kind)), {}
    for scaling in ("none", "tensor", "mxfp8"):
        both = BOTH if scaling != "none" else ()
        one = (scale,) if scaling == "tensor" else ()
        variant = Variant(scaling, both, h=scaling == "none")
        yield ACT_FWD.ops[variant], (x[:, None], *one), GELU
        own = (dy, x[:, None], *one)
        yield ACT_BWD.ops[Variant(scaling, both, h=not both, dbias=True)], own, GELU
        if both:
            summed = Variant(scaling, both, h=False, dbias=True)
            yield QUANTIZE_DBIAS.ops[summed], (x, *one), {}
        for kind, parameters in (("layernorm", (ones, ones)), ("rmsnorm", (ones,))):
            norms = (x, *parameters, *one)
            yield NORM_FWD[kind].ops[variant], norms, NORM_OPTIONS
    for kind, kept in (("layernorm", (rows, rows)), ("rmsnorm", (rows,))):
        yield NORM_BWD[kind].ops[Variant()], (dy, x, ones, *kept), NORM_OPTIONS
    yield gemm_op("nt", "none", False), (x, x[: min(m, 4096)]), {}


def ratio(op: KernelOp, arrays: tuple, own: dict) -> float:
    """GPU time of the reference to that of the handler."""
    given = {"row_format": "e4m3", "col_format": "e4m3", "format": "e4m3", "k_ndim": 1}
    given |= {"out_dtype": arrays[0].dtype.name, "power_of_2": True, "epsilon": 0.0}
    if op.name.startswith("dequantize"):
        given["out_dtype"] = "bfloat16"
    given |= {
        "split_accumulator": False,
        "precision": "default",
        "keep_contraction": False,
    }
    given |= own
    attrs = {name: value for name, value in given.items() if name in op.attrs}
    found = {}
    for how in ("reference", "native"):
        with te.kernels(f"{op.name}={how}"):
            call = jax.jit(functools.partial(op, **attrs))
            found[how] = gpu_time(call, arrays)
    return found["reference"] / found["native"]


def main() -> None:
    """Prints a Markdown table, a row for each op."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many")
    options = parser.parse_args()
    print(f"| op, {options.dtype} | shape | reference / handler |\n|---|---|---|")
    for m, k in SHAPES[: options.shapes]:
        for op, arrays, own in cases(m, k, jnp.dtype(options.dtype)):
            try:
                text = f"{ratio(op, arrays, own):.2f}x"
            except Exception as error:
                text = str(error).splitlines()[0][:80]
            print(f"| {op.name} | {m} x {k} | {text} |", flush=True)


if __name__ == "__main__":
    main()
