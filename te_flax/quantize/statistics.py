"""What quantizing does to an array: amax, scale, what is lost at both ends."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.ops._bits import INF, MIN_NORMAL, as_float, magnitude, widen
from te_flax.ops.amax import AMAX
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

_ABS, _LARGEST = 0x7F, {"e4m3": 0x7E, "e5m2": 0x7B}
# Half a step of the format at its largest value, as a share of that value (1.75 times
# a power of two in both formats): what is nearer than that is rounded, not saturated.
_HALF_STEP = {"e4m3": 2.0**-4 / 1.75, "e5m2": 2.0**-3 / 1.75, "e2m1": 1 / 6}


class Statistics(NamedTuple):
    """The numbers of one quantized operand, float32 ``[]`` each.

    NaN stands for what is not known: without quantization all but amax and nonfinite.

    Attributes:
        amax: the largest finite magnitude.
        scale: what x is multiplied by, as the inverse of what the codes are, to three
            roundings; the smallest of all blocks. 0 where that is below 2^-126.
        saturated: share of the elements that lie beyond the format's range by more
            than its rounding, infinities apart.
        flushed: share of the elements that are not zero and whose code is.
        nonfinite: number of NaN and infinite elements.
    """

    amax: Array | float = float("nan")
    scale: Array | float = float("nan")
    saturated: Array | float = float("nan")
    flushed: Array | float = float("nan")
    nonfinite: Array | float = float("nan")


def statistics(
    x: Array, tensor: ScaledTensor | None, amax_axes: tuple[str, ...] = ()
) -> Statistics:
    """Compares an array with its codes.

    Args:
        x: float32, bfloat16 or float16; elements below 2^-126 count as zero.
        tensor: a copy of it that a quantizer made; None for none.
        amax_axes: manual mesh axes over which x is sharded.

    Returns:
        The numbers; shares of all elements, in [0, 1].

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> x = jnp.array([[1e-9, 1.0, 1.5, 1000.0]])
        >>> how = {"k_ndim": 1, "rowwise": True, "colwise": False}
        >>> q = TensorQuantizer()(x, amax=jnp.float32(1.75), **how).rowwise
        >>> found = statistics(x, q)
        >>> [float(value) for value in found]
        [1000.0, 256.0, 0.25, 0.25, 0.0]
    """
    bits = magnitude(widen(x))
    amax = reduce_amax(AMAX(x)[0], amax_axes)[0]
    nonfinite = _total(bits >= INF, amax_axes)
    if tensor is None or tensor.scaling == "none":
        return Statistics(amax=amax, nonfinite=nonfinite.astype(jnp.float32))
    top = _top(tensor)
    half = jnp.float32(1 + _HALF_STEP[tensor.format or "e4m3"])
    finite = bits < INF
    saturated = finite & (top > 0) & (as_float(bits) > top * half)
    flushed = finite & (bits >= MIN_NORMAL) & (top == 0)
    size, scale = jnp.float32(max(x.size, 1)), smallest_scale(tensor)
    if amax_axes:
        size, scale = lax.psum(size, amax_axes), lax.pmin(scale, amax_axes)
    share = lambda mask: _total(mask, amax_axes).astype(jnp.float32) / size
    return Statistics(
        amax,
        scale,
        share(saturated),
        share(flushed),
        nonfinite.astype(jnp.float32),
    )


def smallest_scale(tensor: ScaledTensor | None) -> Array:
    """The smallest factor by which a quantizer multiplied, float32 ``[]``."""
    scale = None if tensor is None else tensor.scale
    if scale is None:
        return jnp.float32(jnp.nan)
    if scale.dtype == jnp.uint8:  # 2^(127 - e), written into a float's exponent
        exponent = 254 - jnp.max(scale, initial=0).astype(jnp.int32)
        return as_float(jnp.maximum(exponent, 0) << 23)
    largest = jnp.max(scale.astype(jnp.float32), initial=0.0)
    if (outer := getattr(tensor, "global_scale", None)) is not None:
        largest = largest * outer
    return 1 / largest


def _top(tensor: ScaledTensor) -> Array:
    """The largest value that each element could have had; 0 where its code is 0."""
    codes = lax.bitcast_convert_type(tensor.data, jnp.uint8)
    if tensor.format == "e2m1":  # two to a byte
        low = jnp.where((codes & 0x07) == 0, jnp.uint8(0), jnp.uint8(0x07))
        high = jnp.where((codes & 0x70) == 0, jnp.uint8(0), jnp.uint8(0x70))
        return dataclasses.replace(tensor, data=low | high).dequantize()
    largest = jnp.uint8(_LARGEST[tensor.format or "e4m3"])
    codes = jnp.where((codes & _ABS) == 0, jnp.uint8(0), largest)
    data = lax.bitcast_convert_type(codes, tensor.data.dtype)
    return dataclasses.replace(tensor, data=data).dequantize()


def _total(mask: jax.Array, axes: tuple[str, ...]) -> Array:
    count = jnp.sum(mask, dtype=jnp.int32)
    return lax.psum(count, axes) if axes else count
