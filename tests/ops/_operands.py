"""Operands of a KernelOp from its signature, and the float64 oracle of the GEMMs."""

import functools

import jax
import numpy as np
from _meshes import FAST

from te_flax.ops._op import KernelOp
from te_flax.typing import FP8

BLOCK = 32
_FILL = {"scale": 3.0, "scale_inv": 0.25, "lhs_scale_inv": 0.5, "rhs_scale_inv": 0.125}
_FILL |= {"global_scale": 0.3, "lhs_global_scale": 0.7, "rhs_global_scale": 5.0}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def shape_of(array, sizes):
    """The shape of an operand or result; ``sizes`` maps dims and groups to tuples."""
    shape = []
    for e in array.entries:
        dims = (e.literal,) if e.literal is not None else sizes[e.name]
        dims = (*sizes[e.before], *dims) if e.before else dims
        shape += [-(-int(np.prod(dims)) // e.block)] if e.block else dims
    return tuple(shape)


def attributes(op, index=0, k_ndim=1):
    """The attributes of a case, with every format and output dtype in turn."""
    attrs = dict(op.cases[index % len(op.cases)].attrs)
    if "k_ndim" in attrs:
        attrs["k_ndim"] = k_ndim
    six = "fp6" in op.name
    formats = ("e2m3", "e3m2") if six else ("e4m3", "e5m2")
    for key, values in {
        "row_format": formats,
        "col_format": formats[::-1],
        "format": formats if six else (attrs.get("format"),),
        "out_dtype": ("float32", "bfloat16", "float16"),
    }.items():
        if key in attrs:
            attrs[key] = values[index % len(values)]
    return attrs


def groups(m, k, n=(7,)):
    """Sizes of the groups that the ops use."""
    return {"B": m, "D": m, "H": (40,), "M": m, "K": k, "N": n}


def main_operand(op: KernelOp) -> int:
    """The index of the first operand that is data."""
    return int(op.dims.ins[0].name == "noop")


def operands(op: KernelOp, sizes, dtype=None, attrs=None, seed=0):
    """Numpy operands: the first one (and rhs) of ``dtype``, the others of their first.

    Previous results take the types in ``attrs``, A is the number of activations.
    Floats spread over many decades.
    """
    rng = np.random.default_rng(seed)
    if "activation" in (attrs or {}):
        sizes = {**sizes, "A": (len(attrs["activation"].split(",")),)}
    arrays, main = [], main_operand(op)
    for i, array in enumerate(op.dims.ins):
        shape = shape_of(array, sizes)
        allowed = op.dtypes.get(array.name, (np.float32,))
        kind = np.dtype(dtype if dtype is not None and i == main else allowed[0])
        if array.name in ("prev_row", "prev_col") and kind != np.uint8:
            format = (attrs or {}).get("format")
            kind = np.dtype(FP8[format or (attrs or {})[f"{array.name[5:]}_format"]])
        if array.name == "prev_h":
            kind = np.dtype((attrs or {})["out_dtype"])
        if array.name == "rhs":  # the other FP8 format, or the same float
            codes = tuple(np.dtype(t) for t in FP8.values())
            same = np.dtype(arrays[0].dtype)
            kind = codes[1 - codes.index(same)] if same in codes[1:] else same
        if array.name == "noop":
            value = np.zeros(shape)
        elif array.name in _FILL and kind == np.float32:
            value = np.full(shape, _FILL[array.name])
        elif kind in (np.uint8, np.uint32):
            value = rng.integers(*(117, 137) if kind == np.uint8 else (0, 2**32), shape)
        else:
            value = rng.standard_normal(shape)
            if kind.itemsize > 1 and not op.name.startswith("gemm"):
                value = value * 10.0 ** rng.uniform(-4, 4, shape)
        arrays.append(value.astype(kind))
    return arrays


def same(got, want):
    """Shapes, dtypes and bits agree."""
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def gemm_oracle(orientation, arrays, *, k_ndim, scaling="none", bias=False):
    """The product in float64 and ``sum |a| |b|``, both ``[B.., N..]``."""
    lhs, rhs = (np.asarray(a) for a in arrays[:2])
    scales = [np.asarray(s) for s in arrays[2:4]] if scaling != "none" else [None, None]
    b_shape = lhs.shape[:-k_ndim] if orientation[0] == "n" else lhs.shape[k_ndim:]
    n_shape = rhs.shape[k_ndim:] if orientation[1] == "n" else rhs.shape[:-k_ndim]
    rows = {"block_2d": 128, "nvfp4_2d": 16}.get(scaling, 1)
    left = _matrix(lhs, scales[0], k_ndim, last=orientation[0] == "n")
    right = _matrix(rhs, scales[1], k_ndim, last=orientation[1] == "t", rows=rows).T
    if scaling.startswith("nvfp4"):
        left = left * np.float64(arrays[4])
        right = right * np.float64(arrays[5])
    exact, size = left @ right, np.abs(left) @ np.abs(right)
    exact, size = (a.reshape(*b_shape, *n_shape) for a in (exact, size))
    if bias:
        extra = np.asarray(arrays[-1]).astype(np.float64)
        exact, size = exact + extra, size + np.abs(extra)
    return exact, size


def _matrix(data, scale, k_ndim, *, last, rows=1):
    """``[rest, K]`` float64 values with the scales multiplied in."""
    k_dims = data.shape[data.ndim - k_ndim :] if last else data.shape[:k_ndim]
    k, block = int(np.prod(k_dims)), 128
    if data.dtype == np.uint8:
        pairs = np.stack([data & 15, data >> 4], -1)
        values = _E2M1[pairs].reshape(-1, 2 * k)
        k, block = 2 * k, 16
    else:
        values = data.astype(np.float64).reshape((-1, k) if last else (k, -1))
    if scale is not None and scale.dtype == np.uint8:
        blocks = -(-k // BLOCK)
        factor = 2.0 ** (scale.astype(np.float64) - 127)
        factor = factor.reshape((-1, blocks) if last else (blocks, -1))
        factor = np.repeat(factor, BLOCK, axis=int(last))
        values = values * (factor[:, :k] if last else factor[:k])
    elif scale is not None and scale.ndim:
        grid = -(-len(values) // rows), -(-k // block)
        factor = scale.astype(np.float64).reshape(grid)
        factor = np.repeat(np.repeat(factor, rows, 0), block, 1)
        values = values * factor[: len(values), :k]
    elif scale is not None:
        values = values * np.float64(scale)
    return values if last else values.T


compiled = functools.partial(jax.jit, compiler_options=FAST)
PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


@functools.cache
def reference(op, attrs):
    """On the CPU, where XLA divides as IEEE 754 says."""
    call = compiled(functools.partial(op.reference, **dict(attrs)))

    def on_cpu(*arrays):
        with jax.default_device(jax.devices("cpu")[0]):
            return call(*arrays)

    return on_cpu


def reductions(op, plan):
    """Kind and mesh axes of each all-reduce: XLA combines those that agree in both."""
    axes = [plan.summed(j) for j in range(len(op.reduce))]
    return {(how, over) for how, over in zip(op.reduce, axes, strict=True) if over}
