"""Evaluates the references with numpy, whose float32 keeps subnormals.

XLA's CPU threads flush them, so compiled references cannot show what they would do
where nothing is flushed, as on a GPU without a handler.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from te_flax.ops._op import KernelOp


def evaluate(op: KernelOp, *arrays: Any, **attrs: Any) -> tuple[np.ndarray, ...]:
    """The op's reference on numpy arrays, one numpy call per jaxpr equation."""
    closed = jax.make_jaxpr(lambda *a: op.reference(*a, **attrs))(*arrays)
    with np.errstate(all="ignore"):
        return tuple(_run(closed.jaxpr, closed.consts, *arrays))


def _run(jaxpr: Any, consts: Any, *args: Any) -> list[np.ndarray]:
    values = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
    values |= dict(zip(jaxpr.invars, map(np.asarray, args), strict=True))

    def read(atom: Any) -> np.ndarray:
        literal = hasattr(atom, "val")
        return np.asarray(atom.val, atom.aval.dtype) if literal else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(a) for a in eqn.invars]
        name, p = eqn.primitive.name, eqn.params
        if name in ("jit", "pjit"):
            results = _run(p["jaxpr"].jaxpr, p["jaxpr"].consts, *operands)
        else:
            results = [_RULES[name](*operands, **p)]
        for var, result in zip(eqn.outvars, results, strict=True):
            assert result.shape == var.aval.shape, name
            values[var] = np.asarray(result, var.aval.dtype)
    return [read(a) for a in jaxpr.outvars]


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    dims = [1] * len(shape)
    for n, at in zip(x.shape, broadcast_dimensions, strict=True):
        dims[at] = n
    return np.broadcast_to(x.reshape(dims), shape)


def _slice(x, *, start_indices, limit_indices, strides):
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _elementwise(fn: Callable) -> Callable:
    return lambda *operands, **_: fn(*operands)


_RULES: dict[str, Callable] = {
    "bitcast_convert_type": lambda x, *, new_dtype: x.view(new_dtype),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "reduce_max": lambda x, *, axes, **_: np.max(
        x, axis=axes, initial=0 if x.dtype.kind == "i" else -np.inf
    ),
    "pad": lambda x, zero, *, padding_config: np.pad(
        x, [(low, high) for low, high, _ in padding_config], constant_values=zero
    ),
}
_RULES |= {
    name: _elementwise(fn)
    for name, fn in {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "abs": np.abs},
        **{"neg": np.negative},
        **{"min": np.minimum, "max": np.maximum, "sqrt": np.sqrt},
        **{"lt": np.less, "le": np.less_equal, "gt": np.greater},
        **{"ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal},
        **{"shift_right_logical": np.right_shift, "floor": np.floor},
        **{"gather": lambda table, at: table[at[..., 0]], "not": np.logical_not},
        **{"shift_left": np.left_shift, "shift_right_arithmetic": np.right_shift},
    }.items()
}
