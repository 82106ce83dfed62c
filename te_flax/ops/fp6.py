"""FP6 codes, e2m3 and e3m2: six bits with a sign, four of them in three bytes.

e2m3 has steps of 1/8 up to 2 and goes to 7.5, e3m2 steps of 1/16 up to 1/2 and goes to
28. Neither has infinities or NaN. The ops keep the three bytes of a group apart, as a
dim of their own: ``[.., ceil(n / 4), 3]`` is ``[.., 3 ceil(n / 4)]`` in memory.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits
from te_flax.ops._op import Case, KernelOp, check_arrays, check_dtype
from te_flax.typing import FLOATS, Array

MAX = {"e2m3": 7.5, "e3m2": 28.0}
_BYTES = (jnp.uint8,)
_SHAPE = {"e2m3": (3, 1), "e3m2": (2, 3)}  # mantissa bits, exponent bias


def check_format(where: str, argument: str, format: str) -> None:
    """Raises ValueError unless format names an FP6 format."""
    if format not in MAX:
        rule = f"be {' or '.join(MAX)}"
        remedy = "e3m2 has the wider range, e2m3 the finer steps"
        raise ValueError(message(where, argument, rule, repr(format), remedy))


def _check(where: str, argument: str, array: Any, dtypes: tuple, ndim: int = 0) -> None:
    """Refuses what is no array of these dtypes with at least so many dims."""
    check_arrays(where, **{argument: array})
    check_dtype(where, argument, array, dtypes)
    if array.ndim < ndim:
        rule, remedy = f"have rank {ndim} or more", "reshape it"
        got = f"shape {array.shape}"
        raise ValueError(message(where, argument, rule, got, remedy))


def encode(values: Array, format: str) -> Array:
    """Rounds to the nearest code, ties to even, saturating.

    Args:
        values: float32, bfloat16 or float16 ``[..]``; a NaN becomes 0, FP6 has none.
        format: ``"e2m3"`` or ``"e3m2"``.

    Returns:
        uint8 ``[..]``, 0 to 63: the sign in bit 5.

    Raises:
        ValueError: there is no such format.
        TypeError: the operand is no array of such a dtype.

    Example:
        >>> encode(jnp.array([0.125, -1.0, 9.0]), "e2m3").tolist()
        [1, 40, 31]
    """
    check_format("fp6_encode", "format", format)
    _check("fp6_encode", "values", values, FLOATS)
    bits = _bits.widen(values)
    a = _bits.magnitude(bits)
    largest = int(np.float32(MAX[format]).view(np.int32))
    codes = _bits.round_to(jnp.minimum(a, largest), *_SHAPE[format])
    codes = codes | ((bits >> 26) & 0x20)
    return jnp.where(a > _bits.INF, 0, codes).astype(jnp.uint8)


def decode(codes: Array, format: str) -> Array:
    """Returns the float32 values of codes.

    Args:
        codes: uint8 ``[..]``; the lower 6 bits count.
        format: ``"e2m3"`` or ``"e3m2"``.

    Returns:
        float32 ``[..]``.

    Raises:
        ValueError: there is no such format.
        TypeError: the operand is no array of such a dtype.

    Example:
        >>> decode(jnp.array([1, 40, 31], jnp.uint8), "e2m3").tolist()
        [0.125, -1.0, 7.5]
    """
    check_format("fp6_decode", "format", format)
    _check("fp6_decode", "codes", codes, _BYTES)
    a = _bits.expand(codes.astype(jnp.int32) & 31, *_SHAPE[format])
    return _bits.as_float(a | ((codes.astype(jnp.int32) & 32) << 26))


def pack(codes: Array) -> Array:
    """Puts four codes along the last axis into three bytes, the first one lowest.

    Args:
        codes: uint8 ``[.., n]``, 0 to 63.

    Returns:
        uint8 ``[.., 3 ceil(n / 4)]``; codes missing at the end count as 0.

    Raises:
        ValueError: there is no axis.
        TypeError: the operand is no uint8 array.

    Example:
        >>> pack(jnp.array([1, 2, 3, 4, 63], jnp.uint8)).tolist()
        [129, 48, 16, 63, 0, 0]
    """
    _check("fp6_pack", "codes", codes, _BYTES, ndim=1)
    return joined(_pack(codes)[0])


def unpack(data: Array) -> Array:
    """Undoes :func:`pack`.

    Args:
        data: uint8 ``[.., 3 n]``.

    Returns:
        uint8 ``[.., 4 n]``, 0 to 63.

    Raises:
        ValueError: the last axis holds no whole groups of three bytes.
        TypeError: the operand is no uint8 array.

    Example:
        >>> unpack(jnp.array([129, 48, 16], jnp.uint8)).tolist()
        [1, 2, 3, 4]
    """
    _check("fp6_unpack", "data", data, _BYTES, ndim=1)
    if data.shape[-1] % 3:
        rule, remedy = "have three bytes for each four codes", "pass what pack returned"
        got = f"shape {data.shape}"
        raise ValueError(message("fp6_unpack", "data", rule, got, remedy))
    codes = _unpack(split(data))[0]
    return codes.reshape(*codes.shape[:-2], 4 * codes.shape[-2])


def joined(data: Array) -> Array:
    """Groups ``[.., n, 3]`` as the bytes ``[.., 3 n]``."""
    return data.reshape(*data.shape[:-2], 3 * data.shape[-2])


def split(data: Array) -> Array:
    """Bytes ``[.., 3 n]`` as the groups ``[.., n, 3]``."""
    return data.reshape(*data.shape[:-1], data.shape[-1] // 3, 3)


def _encode(x: Array, *, format: str) -> tuple[Array]:
    return (encode(x, format),)


def _decode(codes: Array, *, format: str) -> tuple[Array]:
    return (decode(codes, format),)


def _pack(codes: Array, *, k_ndim: int = 1) -> tuple[Array]:
    m_dims, k_dims = (
        codes.shape[: codes.ndim - k_ndim],
        codes.shape[codes.ndim - k_ndim :],
    )
    rows = codes.reshape(*m_dims, math.prod(k_dims))
    padded = _bits.pad_to(rows, -1, 4).astype(jnp.int32) & 63
    groups = padded.reshape(*m_dims, padded.shape[-1] // 4, 4)
    word = sum(groups[..., i] << (6 * i) for i in range(4))
    data = jnp.stack([(word >> (8 * i)) & 255 for i in range(3)], -1)
    return (data.astype(jnp.uint8),)


def _unpack(data: Array, *, k_ndim: int = 1) -> tuple[Array]:
    del k_ndim  # groups stay groups
    wide = data.astype(jnp.int32)
    word = sum(wide[..., i] << (8 * i) for i in range(3))
    codes = jnp.stack([(word >> (6 * i)) & 63 for i in range(4)], -1)
    return (codes.astype(jnp.uint8),)


def _op(
    signature: str, reference: Any, size: tuple[int, ...], allowed: tuple, **attrs: Any
) -> KernelOp:
    operand, group = signature.partition("..")[0].split(": ")
    name = f"fp6{reference.__name__}"
    return KernelOp(
        name=name,
        signature=signature,
        reference=reference,
        attrs={attr: type(value) for attr, value in attrs.items()},
        groups={"K": "k_ndim"} if "k_ndim" in attrs else {},
        dtypes={operand: allowed},
        batch_group=group,
        handler=name,
        cases=tuple(Case(np.dtype(t).name, (size,), (t,), attrs) for t in allowed),
    )


FP6_ENCODE = _op("x: D.. -> codes: D..", _encode, (250, 19), FLOATS, format="e2m3")
FP6_DECODE = _op("codes: D.. -> x: D..", _decode, (250, 19), _BYTES, format="e2m3")
FP6_PACK = _op(
    "codes: M.. K.. -> data: M.. K../4 3", _pack, (250, 19), _BYTES, k_ndim=1
)
FP6_UNPACK = _op(
    "data: M.. K.. 3 -> codes: M.. K.. 4", _unpack, (250, 5, 3), _BYTES, k_ndim=1
)
