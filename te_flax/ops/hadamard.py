"""The random Hadamard transform of 16 tokens, for the operands of dkernel."""

import math

import jax.numpy as jnp
import numpy as np

from te_flax.ops import _bits
from te_flax.ops._op import Case, KernelOp
from te_flax.typing import FLOATS, Array

BLOCK = 16
# Any fixed signs do, as both operands get the same ones; these are those that
# TransformerEngine fixes (transformer_engine/jax/quantize/hadamard.py), which likewise
# multiplies by them before the Sylvester matrix.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_LARGEST = 2.0**125  # sums of 16 values, divided by 4, then stay finite
_SMALLEST = 2.0**-100  # sums and differences of larger values are never subnormal


def _butterflies(x: Array) -> Array:
    """Sums with the signs of the Sylvester-Hadamard matrix along the last axis."""
    for half in (1, 2, 4, 8):
        pairs = x.reshape(*x.shape[:-1], BLOCK // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], -2).reshape(x.shape)
    return x


def _rotate(x: Array, *, k_ndim: int) -> tuple[Array]:
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    bits = _bits.widen(x).reshape(math.prod(m_dims), math.prod(k_dims))
    bits = _bits.pad_to(bits, 0, BLOCK).T
    bits = bits.reshape(bits.shape[0], bits.shape[1] // BLOCK, BLOCK)
    a = _bits.magnitude(bits)
    smallest, largest = (
        int(np.float32(v).view(np.int32)) for v in (_SMALLEST, _LARGEST)
    )
    a = jnp.where(a < smallest, 0, jnp.minimum(a, largest))
    values = _bits.as_float(a | (bits & _bits.SIGN))
    signs = jnp.array(SIGNS, jnp.float32)
    y = _butterflies(values * (signs * jnp.float32(0.25)))
    bad = jnp.max(_bits.magnitude(bits), axis=-1, keepdims=True, initial=0) >= _bits.INF
    y = jnp.where(bad, _bits.as_float(jnp.int32(_bits.QUIET_NAN)), y)
    return (y.reshape(*k_dims, *y.shape[1:]),)


def rotate_back(y: Array) -> Array:
    """Undoes the transform, up to float32 rounding.

    Args:
        y: float32 ``[.., blocks, 16]``.

    Returns:
        float32 ``[.., blocks * 16]``.

    Example:
        >>> x = jnp.arange(16.0).reshape(16, 1)
        >>> y = HADAMARD(x, k_ndim=1)[0]
        >>> bool(jnp.allclose(rotate_back(y), x.T))
        True
    """
    signs = jnp.array(SIGNS, jnp.float32) * jnp.float32(0.25)
    return (_butterflies(y) * signs).reshape(*y.shape[:-2], y.shape[-2] * BLOCK)


HADAMARD = KernelOp(
    name="hadamard",
    signature=f"x: M.. K.. -> y: K.. M../{BLOCK} {BLOCK}",
    reference=_rotate,
    attrs={"k_ndim": int},
    groups={"K": "k_ndim"},
    dtypes={"x": FLOATS},
    batch_group="M",
    cases=tuple(
        Case(np.dtype(t).name, ((250, 328),), (t,), {"k_ndim": 1}) for t in FLOATS
    ),
)
