"""What delayed scaling does to the amax histories of one GEMM, a kernel for each step.

On a GPU these few numbers cost as much as their launches; so the scales of all three
operands come from one op, and so do both pushes of a forward call.
"""

import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.ops._op import Case, KernelOp
from te_flax.ops.amax import _amax_to_scale
from te_flax.typing import Array

EXPONENTS = 255
MANTISSA = 23
LETTER_SIZE = EXPONENTS + MANTISSA + 1
_FLOAT32_MAX_BITS = 0x7F7FFFFF
_OPERANDS = ("x", "kernel", "dy")


def _history_to_scale(
    *histories: Array,
    window: int,
    margin: int,
    x_format: str,
    kernel_format: str,
    dy_format: str,
) -> tuple[Array, ...]:
    """Scale and its inverse of each operand, from the newest entries."""
    length = histories[0].shape[-1]
    if not 1 <= window <= length:
        rule, remedy = f"be in 1..{length}", "use a history of that length"
        raise ValueError(message("history_to_scale", "window", rule, window, remedy))
    found: list[Array] = []
    formats = (x_format, kernel_format, dy_format)
    for history, format in zip(histories, formats, strict=True):
        amax = jnp.max(history[..., :window], axis=-1)
        rule = {"margin": margin, "power_of_2": False, "epsilon": 0.0}
        found += _amax_to_scale(amax, format=format, **rule)
    return tuple(found)


def _push(history: Array, amax: Array) -> Array:
    """The amax in front, the oldest entry dropped; an amax of 0 changes nothing."""
    amax = amax[..., None]
    return jnp.where(amax > 0, jnp.concatenate([amax, history[..., :-1]], -1), history)


def _count(nonfinite: Array, flag: Array) -> Array:
    return nonfinite + (flag > 0).astype(jnp.int32)


def _push_amaxes(
    x: Array, kernel: Array, nonfinite: Array, x_amax: Array, kernel_amax: Array
) -> tuple[Array, ...]:
    nonfinite = _count(_count(nonfinite, x_amax[..., 1]), kernel_amax[..., 1])
    return _push(x, x_amax[..., 0]), _push(kernel, kernel_amax[..., 0]), nonfinite


def decode(letter: Array) -> Array:
    """Reads the largest amax out of a sum of encoded ones.

    Exact if one exponent slot alone is occupied, holds 1 and every mantissa slot
    holds 0 or 1: one contribution, or a mean of equal ones. Otherwise the power of
    two at or above the largest contribution (float32's maximum where that power is
    2^128). Never below the largest contribution, for a sum with any positive weights.

    Args:
        letter: float32 [..., 279], a sum of results of
            :func:`te_flax.quantize.mailbox.encode`.

    Returns:
        float32 [..., 2]: the amax (0.0 if nothing arrived) and the non-finite flag.

    Example:
        >>> decode(jnp.zeros(279)).tolist()
        [0.0, 0.0]
    """
    slots, digits = letter[..., :EXPONENTS], letter[..., EXPONENTS:-1]
    occupied = slots > 0
    top = jnp.max(
        jnp.where(occupied, jnp.arange(EXPONENTS, dtype=jnp.int32), -1), axis=-1
    )
    alone = jnp.sum(occupied, axis=-1, dtype=jnp.int32) == 1
    single = alone & (jnp.max(slots, axis=-1) == 1)
    single &= jnp.all((digits == 0) | (digits == 1), axis=-1)
    ones = jnp.where(digits == 1, 1, 0).astype(jnp.int32)
    mantissa = jnp.sum(
        ones << jnp.arange(MANTISSA, dtype=jnp.int32), axis=-1, dtype=jnp.int32
    )
    exact = ((top + 1 - (mantissa != 0).astype(jnp.int32)) << MANTISSA) | mantissa
    bound = jnp.where(top == EXPONENTS - 1, _FLOAT32_MAX_BITS, (top + 1) << MANTISSA)
    bits = jnp.where(top < 0, 0, jnp.where(single, exact, bound)).astype(jnp.int32)
    flag = (letter[..., -1] > 0).astype(jnp.float32)
    return jnp.stack([lax.bitcast_convert_type(bits, jnp.float32), flag], -1)


def _push_letter(letter: Array, history: Array, nonfinite: Array) -> tuple[Array, ...]:
    amax = decode(letter)
    return _push(history, amax[..., 0]), _count(nonfinite, amax[..., 1])


_F32, _I32 = (jnp.float32,), (jnp.int32,)
_SCALES = ", ".join(f"{name}_scale: B.., {name}_scale_inv: B.." for name in _OPERANDS)

HISTORY_TO_SCALE = KernelOp(
    name="history_to_scale",
    signature=f"x: B.. H, kernel: B.. H, dy: B.. H -> {_SCALES}",
    reference=_history_to_scale,
    attrs={
        "window": int,
        "margin": int,
        **dict.fromkeys((f"{name}_format" for name in _OPERANDS), str),
    },
    dtypes=dict.fromkeys(_OPERANDS, _F32),
    replicated=("H",),
    batch_group="B",
    handler="history_to_scale",
    cases=(
        Case(
            "hybrid",
            ((3, 40),) * 3,
            _F32 * 3,
            {
                "window": 17,
                "margin": 1,
                "x_format": "e4m3",
                "kernel_format": "e4m3",
                "dy_format": "e5m2",
            },
        ),
    ),
)

PUSH_AMAXES = KernelOp(
    name="push_amaxes",
    signature="x: B.. H, kernel: B.. H, nonfinite: B.., x_amax: B.. 2, "
    "kernel_amax: B.. 2 -> new_x: B.. H, new_kernel: B.. H, new_nonfinite: B..",
    reference=_push_amaxes,
    dtypes={
        **dict.fromkeys(("x", "kernel", "x_amax", "kernel_amax"), _F32),
        "nonfinite": _I32,
    },
    replicated=("H",),
    batch_group="B",
    handler="push_amaxes",
    aliases={name: f"new_{name}" for name in ("x", "kernel", "nonfinite")},
    cases=(
        Case(
            "batch",
            ((3, 1100), (3, 1100), (3,), (3, 2), (3, 2)),
            (*_F32 * 2, *_I32, *_F32 * 2),
        ),
    ),
)

PUSH_LETTER = KernelOp(
    name="push_letter",
    signature=f"letter: B.. {LETTER_SIZE}, history: B.. H, nonfinite: B.. "
    "-> new_history: B.. H, new_nonfinite: B..",
    reference=_push_letter,
    dtypes={"letter": _F32, "history": _F32, "nonfinite": _I32},
    replicated=("H",),
    batch_group="B",
    handler="push_letter",
    aliases={"history": "new_history", "nonfinite": "new_nonfinite"},
    cases=(Case("batch", ((3, LETTER_SIZE), (3, 1100), (3,)), (*_F32 * 2, *_I32)),),
)
