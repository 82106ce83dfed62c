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

import jax
import jax.numpy as jnp

from te_flax.typing import Array

_EXPONENTS = 255
_MANTISSA = 23
_MANTISSA_MASK = (1 << _MANTISSA) - 1
_BIAS = 127
_FLOAT32_MAX_BITS = 0x7F7FFFFF

MAILBOX_SIZE = _EXPONENTS + _MANTISSA + 1


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
    exponent, mantissa = bits >> _MANTISSA, bits & _MANTISSA_MASK
    present = exponent > 0
    # f in (0.5, 1]: a power of two is its own upper bound, all else the next one.
    slot = exponent - 1 + (mantissa != 0).astype(jnp.int32)
    one_hot = present & (slot == jnp.arange(_EXPONENTS, dtype=jnp.int32))
    digits = (mantissa >> jnp.arange(_MANTISSA, dtype=jnp.int32)) & 1
    digits = jnp.where(present, digits, 0)
    return jnp.concatenate(
        [one_hot.astype(jnp.float32), digits.astype(jnp.float32), amax[..., 1:]], -1
    )


def decode(mailbox: Array) -> Array:
    """Reads the largest amax out of a sum of encoded ones.

    Exact if one exponent slot alone is occupied, holds 1 and every mantissa slot
    holds 0 or 1: one contribution, or a mean of equal ones. Otherwise the power of
    two at or above the largest contribution (float32's maximum where that power is
    2^128). Never below the largest contribution, for a sum with any positive weights.

    Args:
        mailbox: float32 [..., 279], a sum of results of :func:`encode`.

    Returns:
        float32 [..., 2]: the amax (0.0 if nothing arrived) and the non-finite flag.

    Example:
        >>> both = encode(jnp.array([[3.0, 0.0], [5.0, 1.0]], jnp.float32)).sum(0)
        >>> decode(both).tolist()
        [8.0, 1.0]
    """
    slots, digits = (
        mailbox[..., :_EXPONENTS],
        mailbox[..., _EXPONENTS : _EXPONENTS + _MANTISSA],
    )
    occupied = slots > 0
    top = jnp.max(
        jnp.where(occupied, jnp.arange(_EXPONENTS, dtype=jnp.int32), -1), axis=-1
    )
    alone = jnp.sum(occupied, axis=-1, dtype=jnp.int32) == 1
    single = alone & (jnp.max(slots, axis=-1) == 1)
    single &= jnp.all((digits == 0) | (digits == 1), axis=-1)
    ones = jnp.where(digits == 1, 1, 0).astype(jnp.int32)
    mantissa = jnp.sum(
        ones << jnp.arange(_MANTISSA, dtype=jnp.int32), axis=-1, dtype=jnp.int32
    )
    exact = ((top + 1 - (mantissa != 0).astype(jnp.int32)) << _MANTISSA) | mantissa
    bound = jnp.where(top == _EXPONENTS - 1, _FLOAT32_MAX_BITS, (top + 1) << _MANTISSA)
    bits = jnp.where(top < 0, 0, jnp.where(single, exact, bound)).astype(jnp.int32)
    flag = (mailbox[..., -1] > 0).astype(jnp.float32)
    return jnp.stack([jax.lax.bitcast_convert_type(bits, jnp.float32), flag], -1)


def push(history: Array, amax: Array) -> Array:
    """Puts an amax in front of a history and drops the oldest entry.

    Args:
        history: float32 [..., H], newest entry at index 0.
        amax: float32 [...]; entries that are 0 leave their history as it is.

    Returns:
        float32 [..., H].

    Example:
        >>> push(jnp.array([2.0, 1.0]), jnp.float32(3.0)).tolist()
        [3.0, 2.0]
    """
    amax = amax[..., None]
    return jnp.where(amax > 0, jnp.concatenate([amax, history[..., :-1]], -1), history)


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
