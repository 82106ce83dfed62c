"""How amax(dy) leaves the backward pass: as a cotangent that survives summation.

A backward rule cannot write state. It returns the amax as the cotangent of the
layer's mailbox variable instead, and JAX then sums that cotangent over every use of
the layer, averages it over devices, or scales it. An amax must come out of this as a
maximum, so it is sent as a sum of unit vectors: one slot per power of two, one slot
per mantissa bit and one slot that flags non-finite elements. Whatever positive
weights the contributions are summed with, the highest occupied slot still names the
largest one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from te_flax.ops.history import (
    EXPONENTS,
    HISTORY_TO_SCALE,
    LETTER_SIZE,
    MANTISSA,
    PUSH_AMAXES,
    PUSH_LETTER,
)
from te_flax.ops.history import decode as decode
from te_flax.quantize.quantizer import Scale
from te_flax.typing import Array

MAILBOX_SIZE = LETTER_SIZE
_MANTISSA_MASK = (1 << MANTISSA) - 1


def encode(amax: Array) -> Array:
    """Turns an amax into the cotangent that carries it.

    With amax = f * 2^k and f in (0.5, 1], the slots are a one-hot of k for k = -126
    to 128 (255 slots), the 23 mantissa bits of amax (lowest first) and the
    non-finite flag. All of it is read from the bits of the number, not from a
    logarithm. An amax of zero (or below 2^-126) leaves only the flag.

    Args:
        amax: float32 [..., 2], the largest finite magnitude and a flag that is 1.0
            if any element was NaN or infinite.

    Returns:
        float32 [..., 279].

    Example:
        >>> decode(encode(jnp.array([3.0, 0.0], jnp.float32))).tolist()
        [3.0, 0.0]
    """
    bits = jax.lax.bitcast_convert_type(amax[..., :1], jnp.int32)
    exponent, mantissa = bits >> MANTISSA, bits & _MANTISSA_MASK
    present = exponent > 0
    # f in (0.5, 1]: a power of two is its own upper bound, all else the next one.
    slot = exponent - 1 + (mantissa != 0).astype(jnp.int32)
    one_hot = present & (slot == jnp.arange(EXPONENTS, dtype=jnp.int32))
    digits = (mantissa >> jnp.arange(MANTISSA, dtype=jnp.int32)) & 1
    digits = jnp.where(present, digits, 0)
    return jnp.concatenate(
        [one_hot.astype(jnp.float32), digits.astype(jnp.float32), amax[..., 1:]], -1
    )


def push(
    x: Array, kernel: Array, nonfinite: Array, x_amax: Array, kernel_amax: Array
) -> tuple[Array, Array, Array]:
    """Puts the amaxes of a forward call in front of their histories.

    Args:
        x: float32 [..., H], newest entry at index 0.
        kernel: as `x`.
        nonfinite: int32 [...], how many pushes saw a NaN or an infinity.
        x_amax: float32 [..., 2] as in :func:`encode`; an amax of 0 leaves its history.
        kernel_amax: as `x_amax`.

    Returns:
        Both histories, their oldest entry dropped, and the count.

    Example:
        >>> one, flags = jnp.array([2.0, 1.0]), jnp.int32(0)
        >>> old, new = jnp.array([0.0, 1.0]), jnp.array([3.0, 0.0])
        >>> [a.tolist() for a in push(one, one, flags, new, old)]
        [[3.0, 2.0], [2.0, 1.0], 1]
    """
    x, kernel, nonfinite = PUSH_AMAXES(x, kernel, nonfinite, x_amax, kernel_amax)
    return x, kernel, nonfinite


def push_letter(letter: Array, history: Array, nonfinite: Array) -> tuple[Array, Array]:
    """Puts the amax that a mailbox's cotangent names in front of a history.

    Args:
        letter: float32 [..., 279], a sum of results of :func:`encode`.
        history: float32 [..., H].
        nonfinite: int32 [...].

    Returns:
        The history and the count, as :func:`push` returns them.

    Example:
        >>> letter = encode(jnp.array([3.0, 1.0]))
        >>> new, count = push_letter(letter, jnp.array([2.0, 1.0]), jnp.int32(0))
        >>> new.tolist(), int(count)
        ([3.0, 2.0], 1)
    """
    history, nonfinite = PUSH_LETTER(letter, history, nonfinite)
    return history, nonfinite


def scales(
    x: Array, kernel: Array, dy: Array, *, window: int, quantizers: Any
) -> tuple[Scale, Scale, Scale]:
    """The scales of the three operands of a GEMM, from their histories.

    Args:
        x: float32 [..., H].
        kernel: as `x`.
        dy: as `x`.
        window: how many of the newest entries count, in [1, H].
        quantizers: the TensorQuantizers ``x``, ``kernel`` and ``dy`` of delayed
            scaling, with one margin.

    Returns:
        The scales of x, kernel and dy; 1 where nothing was pushed.

    Example:
        >>> from te_flax.recipe.delayed import DelayedScaling
        >>> one = jnp.array([448.0, 1.0])
        >>> found = scales(
        ...     one, one, 0 * one, window=2, quantizers=DelayedScaling().quantizers()
        ... )
        >>> [float(pair.scale) for pair in found]
        [1.0, 1.0, 1.0]
    """
    found = HISTORY_TO_SCALE(
        x,
        kernel,
        dy,
        window=window,
        margin=quantizers.x.margin,
        x_format=quantizers.x.format,
        kernel_format=quantizers.kernel.format,
        dy_format=quantizers.dy.format,
    )
    return Scale(*found[:2]), Scale(*found[2:4]), Scale(*found[4:])


def reduce_amax(amax: Array, axes: Sequence[str]) -> Array:
    """Takes the maximum over manual mesh axes, inside ``jax.shard_map``.

    Args:
        amax: float32 [..., 2] as in :func:`encode`.
        axes: names of the axes; none leaves `amax` as it is.

    Returns:
        float32 [..., 2], the same on every device along `axes`.

    Example:
        >>> reduce_amax(jnp.ones(2, jnp.float32), ()).tolist()
        [1.0, 1.0]
    """
    return jax.lax.pmax(amax, tuple(axes)) if axes else amax
