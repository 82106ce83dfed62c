"""cuDNN's FP8 attention as ops, as :mod:`te_flax.ops.attention` has the others.

Every scale multiplies what is rounded to FP8, and every inverse undoes it: of q, k, v,
the probabilities s, o, and in the backward pass of do, of the scores' gradient dp times
``scale``, and of dq, dk and dv.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from te_flax.ops._op import KernelOp
from te_flax.ops.attention import ATTRS, KEYS, QUERIES, Shapes
from te_flax.ops.cudnn_call import call, target
from te_flax.ops.quantize import signature
from te_flax.typing import Array

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_INVERSES = ("q_inv", "k_inv", "v_inv")
_FORWARD = (*_INVERSES, "s_inv", "s_scale", "o_scale")
# In XLA's order, which is not that of jax's own caller.
_BACKWARD = (*_INVERSES, "s_inv", "o_inv", "do_inv", "dp_inv", "s_scale")
_BACKWARD += ("dp_scale", "dq_scale", "dk_scale", "dv_scale")

_AMAX = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)


def _scalars(arrays: tuple[Array, ...]) -> list[tuple[Array, None]]:
    return [(a.reshape(1, 1, 1, 1), None) for a in arrays]


def _text(at: Shapes, *, backward: bool, causal: bool, scale: float, layout: str):
    # The dtype is that of no array: the scores stay in float32.
    options = {"causal": causal, "scale": scale, "layout": layout}
    return at.text(jnp.bfloat16, "", 1, backward=backward, **options)


def _forward(q: Array, k: Array, v: Array, *scalars: Array, **attrs: Any) -> tuple:
    at, layout = Shapes.of(q, k), attrs["layout"]
    o = (at.examples, at.queries, at.heads, v.shape[-1])
    o, amax_s, amax_o, stats = call(
        target(backward=False, fp8=True),
        [*((at.whole(a), layout) for a in (q, k, v)), *_scalars(scalars)],
        [
            (jax.ShapeDtypeStruct(o, q.dtype), layout),
            (_AMAX, None),
            (_AMAX, None),
            (jax.ShapeDtypeStruct(at.scores()[:3], jnp.float32), None),
        ],
        _text(at, backward=False, **attrs),
    )
    split = (at.groups, at.each)
    return (
        o.reshape(*at.outer, at.queries, *split, v.shape[-1]),
        stats.reshape(*at.outer, *split, at.queries),
        amax_s.reshape(()),
        amax_o.reshape(()),
    )


def _backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    do: Array,
    stats: Array,
    *scalars: Array,
    **attrs: Any,
) -> tuple:
    at, layout = Shapes.of(q, k), attrs["layout"]
    arrays = [(at.whole(a), layout) for a in (q, k, v, o, do)]
    made = call(
        target(backward=True, fp8=True),
        [*arrays, (stats.reshape(at.scores()[:3]), None), *_scalars(scalars)],
        [
            *((jax.ShapeDtypeStruct(a.shape, do.dtype), layout) for a, _ in arrays[:3]),
            *[(_AMAX, None)] * 4,
        ],
        _text(at, backward=True, **attrs),
    )
    pairs = zip(made, (q, k, v), strict=False)
    return (*(a.reshape(b.shape) for a, b in pairs), *(a.reshape(()) for a in made[3:]))


def _declare(
    direction: str,
    compute: Callable,
    operands: dict[str, str],
    results: dict[str, str],
) -> KernelOp:
    return KernelOp(
        name=f"cudnn_attention_fp8_{direction}",
        signature=signature(operands, results),
        reference=compute,
        attrs=ATTRS,
        dtypes=dict.fromkeys("qkv", (E4M3, E5M2)),
        reduce=tuple("max" if n.startswith("amax") else None for n in results),
        # Codes of shared heads cannot be added up.
        replicated=("T", "S", "G", "H", "D"),
        batch_group="B",
        listed=False,
    )


@functools.cache
def forward() -> KernelOp:
    """The op ``(q, k, v, scales) -> (o, stats, amax_s, amax_o)`` of FP8 codes."""
    operands = {"q": QUERIES, "k": KEYS, "v": "B.. S K D"} | dict.fromkeys(_FORWARD, "")
    results = {"o": "B.. T K G D", "stats": "B.. K G T", "amax_s": "", "amax_o": ""}
    return _declare("fwd", _forward, operands, results)


@functools.cache
def backward() -> KernelOp:
    """The op ``(q, k, v, o, do, stats, scales) -> (dq, dk, dv, amaxes)``.

    The gradients are in the format of do. The amaxes are those of dq, dk, dv and dp.
    """
    operands = {"q": QUERIES, "k": KEYS, "v": "B.. S K D"}
    operands |= {"o": "B.. T K G D", "do": "B.. T K G D", "stats": "B.. K G T"}
    operands |= dict.fromkeys(_BACKWARD, "")
    results = {"dq": QUERIES, "dk": KEYS, "dv": "B.. S K D"}
    results |= dict.fromkeys(("amax_dq", "amax_dk", "amax_dv", "amax_dp"), "")
    return _declare("bwd", _backward, operands, results)
