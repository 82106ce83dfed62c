"""e2m1 codes: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, two of them in a byte."""

import jax.numpy as jnp
from jax import lax

from te_flax.ops import _bits
from te_flax.typing import Array

MAX = 6.0
# Magnitudes from which a code is one higher. At the second, fourth and sixth the tie
# goes up, to the even code.
_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _signed(codes: Array, values: Array) -> Array:
    sign = (_bits.as_bits(values) >> 28) & 8
    return (codes | sign).astype(jnp.uint8)


def encode(values: Array) -> Array:
    """Rounds to the nearest code, ties to even, saturating.

    Args:
        values: float32 ``[..]``; a NaN becomes a zero of its sign, e2m1 has none.

    Returns:
        uint8 ``[..]``, 0 to 15: the sign in bit 3.

    Example:
        >>> encode(jnp.array([0.25, 0.75, -5.1])).tolist()
        [0, 2, 15]
    """
    a = jnp.abs(values)
    codes = jnp.zeros(values.shape, jnp.int32)
    for i, step in enumerate(_STEPS):
        above = a >= jnp.float32(step) if i % 2 else a > jnp.float32(step)
        codes = codes + above.astype(jnp.int32)
    return _signed(codes, values)


def encode_stochastic(values: Array, random: Array) -> Array:
    """Rounds up or down so that the expectation is the value, saturating.

    ``P(up) = (|v| - lower) / (upper - lower)`` in steps of 2^-23, for the two codes
    around the value.

    Args:
        values: float32 ``[..]``; a NaN becomes a zero of its sign.
        random: uint32 ``[..]``, uniform bits; the upper 23 count.

    Returns:
        uint8 ``[..]``, 0 to 15: the sign in bit 3.

    Example:
        >>> bits = jnp.array([0, 2**31, 2**32 - 1], jnp.uint32)
        >>> encode_stochastic(jnp.full(3, 5.0), bits).tolist()
        [7, 6, 6]
    """
    a = jnp.minimum(jnp.where(jnp.isnan(values), 0, jnp.abs(values)), MAX)
    # The index of the value on the grid of codes, with a fraction; all steps exact.
    index = jnp.where(a < 2, 2 * a, jnp.where(a < 4, a + 2, a * 0.5 + 4))
    lower = jnp.floor(index)
    # Midpoints: no draw is 0, so that no vanishing fraction is ever rounded up.
    drawn = 2 * lax.shift_right_logical(random, jnp.uint32(9)).astype(jnp.int32) + 1
    up = drawn.astype(jnp.float32) * jnp.float32(2.0**-24) < index - lower
    return _signed(lower.astype(jnp.int32) + up.astype(jnp.int32), values)


def decode(codes: Array) -> Array:
    """Returns the float32 values of codes.

    Args:
        codes: uint8 ``[..]``; the lower 4 bits count.

    Returns:
        float32 ``[..]``.

    Example:
        >>> decode(jnp.array([1, 5, 15], jnp.uint8)).tolist()
        [0.5, 3.0, -6.0]
    """
    index = (codes & 7).astype(jnp.int32)
    a = index.astype(jnp.float32)
    a = jnp.where(index < 4, a * 0.5, jnp.where(index < 6, a - 2, 2 * a - 8))
    return jnp.where((codes & 8) != 0, -a, a)


def pack(codes: Array) -> Array:
    """Puts pairs of codes along the last axis into bytes, the first one low.

    Args:
        codes: uint8 ``[.., n]``, 0 to 15.

    Returns:
        uint8 ``[.., ceil(n / 2)]``; the upper half of an odd end is 0.

    Example:
        >>> pack(jnp.array([1, 2, 3], jnp.uint8)).tolist()
        [33, 3]
    """
    pairs = _bits.pad_to(codes, -1, 2)
    pairs = pairs.reshape(*codes.shape[:-1], pairs.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(data: Array) -> Array:
    """Undoes :func:`pack`.

    Args:
        data: uint8 ``[.., n]``.

    Returns:
        uint8 ``[.., 2 n]``, 0 to 15.

    Example:
        >>> unpack(jnp.array([33, 3], jnp.uint8)).tolist()
        [1, 2, 3, 0]
    """
    pairs = jnp.stack([data & 15, data >> 4], -1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])
