"""FP8 attention by cuDNN's fused kernels: as the emulation, in two kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from te_flax.functional._core import Types
from te_flax.functional.attention.cudnn import by_token, grouped, laid
from te_flax.functional.attention.fp8 import (
    BACKWARD,
    FORWARD,
    AttentionConfig,
    AttentionState,
    Measured,
    Static,
    backward,
    forward,
    quantize,
)
from te_flax.functional.attention.options import Operands, Options
from te_flax.ops import attention_fp8 as ops
from te_flax.ops._op import cotangent_like
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.statistics import count_amax
from te_flax.typing import Array

Arrays = tuple[Array, Array, Array]


def attend(
    config: AttentionConfig,
    options: Options,
    axes: tuple[str, ...],
    operands: Operands,
    state: AttentionState,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """As :func:`te_flax.functional.attention.fp8.attend`, all scales in ``state``.

    The kernel may divide by the sum of the exponentials after the product with v: these
    are then rounded, up to 1, while the amax of s is that of the quotients.

    Args:
        config: quantizers.
        options: the static part of the call.
        axes: mesh axes that a surrounding shard_map of ours has made manual.
        operands: the arrays.
        state: scales and mailbox.

    Returns:
        o in the user's layout, log-sum-exp ``[B, N, T]``, and what was measured, as
        :func:`te_flax.functional.attention.fp8.forward` returns it: of what the kernel
        rounds on its own, amax and scale.
    """
    made: Any = _attend(Static(options, config, axes), operands[:3], state)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, arrays: Arrays, state: AttentionState):
    return _attend_fwd(static, arrays, state)[0]


def _attend_fwd(static: Static, arrays: Arrays, state: AttentionState):
    layout = static.options.layout
    codes = [quantize(static, state, n, a) for n, a in zip("qkv", arrays, strict=True)]
    q, k, v = (by_token(layout, c.data) for c in codes)
    q = grouped(q, k.shape[2])
    scale, inverse = _forward_factors(q.dtype, state)
    o, stats, *found = ops.forward()(
        *(q, k, v),
        *(inverse[n] for n in ("q", "k", "v", "s")),
        *(scale["s"], scale["o"]),
        impl=(),
        **_attrs(static),
    )
    pairs = zip(("s", "o"), found, strict=True)
    unseen = [_measured(static, state, a, inverse[n]) for n, a in pairs]
    measured = forward(state, [*(c.found for c in codes), *unseen])
    lse = stats.reshape(stats.shape[0], -1, stats.shape[-1])
    wide = _widened(o, inverse["o"], arrays[0].dtype)
    out = (laid(layout, wide), lse, measured)
    types = tuple(jax.typeof(a) for a in arrays)
    return out, ((q, k, v, o), stats, state, Types(types))


def _attend_bwd(static: Static, res: tuple, cotangents: tuple):
    (q, k, v, o), stats, state, types = res
    layout, factor = static.options.layout, static.options.scale
    codes = quantize(static, state, "do", cotangents[0])
    do = grouped(by_token(layout, codes.data), k.shape[2])
    scale, inverse = _forward_factors(q.dtype, state)
    back, undo = _factors(BACKWARD, state.backward)
    # The kernel's dp is times the scale of q . k, the one of the state is not.
    dq, dk, dv, *found = ops.backward()(
        *(q, k, v, o, do, stats),
        *(inverse[n] for n in ("q", "k", "v", "s", "o")),
        *(undo["do"], undo["dp"] * jnp.float32(factor), scale["s"]),
        *(back["dp"] * jnp.float32(1 / factor), back["dq"], back["dk"], back["dv"]),
        impl=(),
        **_attrs(static),
    )
    found = dict(zip(("dq", "dk", "dv", "dp"), found, strict=True))
    found["dp"] = found["dp"] * jnp.float32(abs(1 / factor))
    names = ("dp", "dq", "dk", "dv")
    unseen = [_measured(static, state, found[n], undo[n]) for n in names]
    grads = zip(("dq", "dk", "dv"), (dq, dk, dv), types, strict=True)
    made = tuple(
        cotangent_like(laid(layout, _widened(g, undo[n], t.dtype)), t)
        for n, g, t in grads
    )
    return made, backward(static, state, [codes.found, *unseen])


_attend.defvjp(_attend_fwd, _attend_bwd)


def _attrs(static: Static) -> dict[str, Any]:
    options = static.options
    memory = f"{options.layout[:3]}H"
    return {
        "scale": options.scale,
        "causal": options.right == 0,
        "layout": memory,
    }


def _factors(names: tuple[str, ...], known: Any) -> list[dict[str, Array]]:
    """The scales and their inverses by name."""
    return [dict(zip(names, a, strict=True)) for a in known]


def _forward_factors(dtype: Any, state: AttentionState) -> list[dict[str, Array]]:
    """The same, the scale of s limited so that a 1 does not saturate.

    The forward pass rounds exponentials, up to 1, whatever amax of s it has shown. The
    backward pass takes the same scale.
    """
    scale, inverse = _factors(FORWARD, state.forward)
    largest = float(jnp.finfo(dtype).max)
    scale["s"] = jnp.minimum(scale["s"], jnp.float32(largest))
    inverse["s"] = jnp.maximum(inverse["s"], jnp.float32(1 / largest))
    return [scale, inverse]


def _widened(codes: Array, scale_inv: Array, dtype: Any) -> Array:
    return (codes.astype(jnp.float32) * scale_inv).astype(dtype)


def _measured(
    static: Static, state: AttentionState, amax: Array, scale_inv: Array
) -> Measured:
    """Of what the kernel rounds, on all devices that share the scale."""
    good = jnp.isfinite(amax)
    pair = jnp.stack([jnp.where(good, amax, 0), 1 - good.astype(jnp.float32)])
    pair = reduce_amax(pair, (*static.config.amax_axes, *static.axes))
    return Measured(pair, None if state.record is None else count_amax(pair, scale_inv))
