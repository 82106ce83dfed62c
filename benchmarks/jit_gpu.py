"""The calls that ``python -m benchmarks.gpu --jit`` times both ways, native beside JIT.

Kernels on disk are used: with an empty ``TE_FLAX_CACHE`` the first run shows the times
of the compiler and the second those of the loader.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from te_flax.backends import registry
from te_flax.ops._choice import REGISTRY

SIZES = ((8192, 8192), (16384, 16384), (4104, 4096))
# Op -> the activation, if it has one.
KERNELS = (
    ("quantize_mxfp8_row", ""),
    ("quantize_mxfp8_col", ""),
    ("quantize_mxfp8_rowcol", ""),
    ("quantize_mxfp8_rowcol_swizzled", ""),
    ("quantize_mxfp8_rowcol_rowcolvalues", ""),
    ("quantize_dbias_mxfp8_rowcol_dbias", ""),
    ("act_fwd_mxfp8_rowcol", "gelu"),
    ("act_fwd_mxfp8_rowcol", "silu,linear"),
    ("act_bwd_mxfp8_rowcol_dbias", "gelu"),
    ("act_bwd_mxfp8_rowcol_dbias", "silu,linear"),
)


def size(text: str) -> tuple[int, int]:
    """Reads rows and columns, written "4104x4096"."""
    m, k = map(int, text.split("x"))
    return m, k


def calls(m: int, k: int, impl: tuple) -> Iterator[tuple[str, Callable, list]]:
    """Name, call and types of the operands, in bfloat16, of each kernel."""
    for name, activation in KERNELS:
        op = REGISTRY[name]
        given = {"row_format": "e4m3", "col_format": "e4m3", "k_ndim": 1}
        given |= {"out_dtype": "bfloat16", "activation": activation}
        given |= {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
        attrs = {n: given[n] for n in op.attrs}
        slices = (activation.count(",") + 1,) if activation else ()
        shapes = {"dy": (m, k), "x": (m, *slices, k)}
        types = [
            jax.ShapeDtypeStruct(shapes[a.name], jnp.bfloat16) for a in op.dims.ins
        ]
        label = f"{name} {activation}".strip()
        yield label, functools.partial(op, impl=impl, **attrs), types


def report() -> None:
    """Prints where each kernel of this process came from, and how long that took."""
    print("\n| kernel | arch | came | s |\n|---|---|---|---|")
    for key, origin, seconds in registry.made():
        name = f"{key.op} {key.attr('activation', '')}".strip()
        print(f"| {name} | {key.arch} | {origin} | {seconds:.3f} |")
