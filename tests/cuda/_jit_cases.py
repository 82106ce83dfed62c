"""The calls on which generated kernels are compared with compiled ones: every op that
has them, and every choice that makes another kernel at least once."""

import fnmatch
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from te_flax.backends.cutedsl import OPS
from te_flax.ops._choice import REGISTRY, parse
from te_flax.ops._op import KernelOp
from te_flax.ops.activation import ACTIVATIONS
from te_flax.testing.patterns import patterns

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
JIT, NATIVE = parse("*=jit"), parse("*=native")
PARAMETERS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
M, K = 544, 160  # 17 and 5 blocks: no whole tiles of 64 or 128


class JitCase(NamedTuple):
    """A call; ``attrs`` are all static attributes."""

    op: KernelOp
    dtype: np.dtype
    attrs: dict[str, Any]
    m: int = M
    k: int = K

    def __str__(self) -> str:
        words = [self.op.name, self.dtype.name, self.attrs.get("activation", "")]
        formats = [v for n, v in self.attrs.items() if n.endswith("_format")]
        shape = f"{self.m}x{self.k}" if (self.m, self.k) != (M, K) else ""
        return "-".join(w for w in (*words, *formats, shape) if w)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the operands, without the previous results."""
        slices = self.attrs.get("activation", "").count(",") + 1
        middle = (slices,) if "activation" in self.attrs else ()
        found = {"noop": (1,), "dy": (self.m, self.k), "x": (self.m, *middle, self.k)}
        return {a.name: found[a.name] for a in self.op.dims.ins if a.name in found}

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Of all operands."""
        own = {n: F32 if n == "noop" else self.dtype for n in self.shapes()}
        found = [jax.ShapeDtypeStruct(s, own[n]) for n, s in self.shapes().items()]
        if "noop" in own:
            plain = REGISTRY[self.op.name.removesuffix("_noop")]
            reference = lambda *arrays: plain.reference(*arrays, **self.attrs)
            found += jax.eval_shape(reference, *found[1:])
        return found

    def draw(self) -> list[np.ndarray]:
        """Operands: every pattern, in runs of like ones and mixed."""
        rng = np.random.default_rng(3)
        found = []
        for t, name in zip(
            self.types(), [a.name for a in self.op.dims.ins], strict=True
        ):
            if name == "noop":
                found.append(np.zeros(1, np.float32))
            elif name.startswith("prev_"):
                raw = rng.integers(1, 100, t.shape).astype(np.uint8)
                found.append(raw.astype(np.float32).astype(t.dtype))
            else:
                every = patterns(t.dtype)
                normal = (30 * rng.standard_normal(every.size // 8)).astype(t.dtype)
                mixed = rng.permutation(every)[: every.size // 8]
                every = every[:: 1 + every.size // 50000]
                found.append(np.resize(np.concatenate([normal, mixed, every]), t.shape))
        return found


def attributes(
    op: KernelOp, dtype: np.dtype, activation="gelu", formats=("e4m3", "e4m3")
):
    given = dict(zip(("row_format", "col_format"), formats, strict=True))
    given |= {"k_ndim": 1, "out_dtype": dtype.name, "activation": activation}
    return {name: (given | PARAMETERS)[name] for name in op.attrs}


def ops() -> list[KernelOp]:
    """Those that the backend serves."""
    served = [n for n in REGISTRY if any(fnmatch.fnmatchcase(n, g) for g in OPS)]
    return [REGISTRY[name] for name in sorted(served)]


def cases() -> list[JitCase]:
    """Every op in bfloat16, every dtype, format and activation."""
    found = []
    for op in ops():
        m = M if "col" in op.name else 45
        found.append(JitCase(op, BF16, attributes(op, BF16), m))
    both = REGISTRY["quantize_mxfp8_rowcol"]
    values = REGISTRY["quantize_mxfp8_rowcol_rowcolvalues"]
    swizzled = REGISTRY["quantize_mxfp8_rowcol_swizzled"]
    sums = REGISTRY["quantize_dbias_mxfp8_rowcol_dbias"]
    fwd, bwd = (
        REGISTRY["act_fwd_mxfp8_rowcol_h"],
        REGISTRY["act_bwd_mxfp8_rowcol_h_dbias"],
    )
    for op, dtype in itertools.product((both, values, swizzled, sums), (F32, F16)):
        found.append(
            JitCase(op, dtype, attributes(op, dtype, formats=("e5m2", "e4m3")))
        )
    for op, dtype in itertools.product((fwd, bwd), (F32, F16)):
        found.append(JitCase(op, dtype, attributes(op, dtype)))
    for op, name in itertools.product((fwd, bwd), ACTIVATIONS):
        if name != "gelu" and "clamped" not in name:
            found.append(JitCase(op, BF16, attributes(op, BF16, name)))
    return found


def shape_cases() -> list[JitCase]:
    """No key of their own: shapes at the edges."""
    found = []
    for name in ("row", "row_swizzled"):
        op = REGISTRY[f"quantize_mxfp8_{name}"]
        for shape in ((1, 32), (7, 64), (129, 4096), (300, 224)):
            found.append(JitCase(op, BF16, attributes(op, BF16), *shape))
    names = ("quantize_mxfp8_rowcol", "quantize_mxfp8_rowcol_swizzled")
    for name in (*names, "quantize_dbias_mxfp8_rowcol_dbias"):
        op = REGISTRY[name]
        for shape in ((32, 32), (256, 256), (64, 4064), (1056, 96)):
            found.append(JitCase(op, BF16, attributes(op, BF16), *shape))
    return found


def both_ways(case: JitCase):
    """``(*arrays) -> (results of the generated kernel, of the compiled one)``."""

    def call(*arrays):
        generated = case.op(*arrays, impl=JIT, **case.attrs)
        return generated, case.op(*arrays, impl=NATIVE, **case.attrs)

    return jax.jit(call)


def large() -> jnp.ndarray:
    """More than 2^31 elements."""
    rows = jax.random.normal(jax.random.key(0), (32, 65568), jnp.bfloat16)
    return jnp.tile(rows, (1025, 1)) * jnp.arange(32800, dtype=jnp.bfloat16)[:, None]
