"""What quantizing does to an array: amax, scale, what is lost at both ends."""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.ops import fp6
from te_flax.ops._bits import INF, MIN_NORMAL, as_float, magnitude, widen
from te_flax.ops.amax import AMAX
from te_flax.quantize.mailbox import MAILBOX_SIZE, decode, encode, reduce_amax
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

_SUMS = 5
RECORD_SIZE = 2 * MAILBOX_SIZE + _SUMS
_ABS, _LARGEST = 0x7F, {"e4m3": 0x7E, "e5m2": 0x7B}
# Half a step of the format at its largest value, as a share of that value, which is
# 1.75 times a power of two (e2m3: 1.875): what is nearer is rounded, not saturated.
_HALF_STEP = {"e4m3": 2.0**-4 / 1.75, "e5m2": 2.0**-3 / 1.75, "e2m1": 1 / 6}
_HALF_STEP |= {"e2m3": 2.0**-4 / 1.875, "e3m2": 2.0**-3 / 1.75}


class Statistics(NamedTuple):
    """The numbers of one quantized operand, float32 ``[...]`` each.

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

    def row(self) -> Array:
        """Joins the numbers: float32 ``[..., 5]``."""
        return jnp.stack([jnp.asarray(n, jnp.float32) for n in self], axis=-1)


class Counts(NamedTuple):
    """What :class:`Statistics` are made of, float32 ``[]`` but for amax.

    Attributes:
        amax: ``[2]`` as in :func:`te_flax.quantize.mailbox.encode`.
        scale_inv: the largest factor of the codes; 0 without quantization.
        elements: how many were compared with their codes.
        saturated: of those.
        flushed: of those.
        nonfinite: of all.
    """

    amax: Array
    scale_inv: Array
    elements: Array
    saturated: Array
    flushed: Array
    nonfinite: Array

    def statistics(self) -> Statistics:
        """The numbers; shares of all elements, in [0, 1]."""
        sums = [value.astype(jnp.float32) for value in self[2:]]
        return _numbers(self.amax, self.scale_inv, jnp.float32(1), *sums)

    def mail(self) -> Array:
        """As a cotangent that survives summation, float32 ``[563]``.

        Two encoded maxima, of the amax and of the inverse of the smallest scale, and
        five sums: contributions (1 here), elements that were quantized, saturated,
        flushed and non-finite ones.
        """
        inverse = jnp.stack([self.scale_inv, jnp.float32(0)])
        sums = [jnp.float32(1), *(value.astype(jnp.float32) for value in self[2:])]
        return jnp.concatenate([encode(self.amax), encode(inverse), jnp.stack(sums)])


def statistics(
    x: Array,
    tensor: ScaledTensor | None,
    amax_axes: tuple[str, ...] = (),
    impl: tuple | None = None,
) -> Statistics:
    """Compares an array with its codes.

    Args:
        x: float32, bfloat16 or float16; elements below 2^-126 count as zero.
        tensor: a copy of it that a quantizer made; None for none.
        amax_axes: manual mesh axes over which x is sharded.
        impl: kernel rules; None reads the context.

    Returns:
        The numbers; shares of all elements, in [0, 1].

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> x = jnp.array([[1e-9, 1.0, 1.5, 1000.0]])
        >>> how = {"k_ndim": 1, "rowwise": True, "colwise": False}
        >>> q = TensorQuantizer()
        >>> tensor = q(x, scale=q.scale(jnp.float32(1.75)), **how).rowwise
        >>> found = statistics(x, tensor)
        >>> [float(value) for value in found]
        [1000.0, 256.0, 0.25, 0.25, 0.0]
    """
    return count(x, tensor, amax_axes, impl).statistics()


def encode_statistics(
    x: Array,
    tensor: ScaledTensor | None,
    amax_axes: tuple[str, ...] = (),
    impl: tuple | None = None,
) -> Array:
    """The statistics of an array as a cotangent: :meth:`Counts.mail`.

    Args:
        x: as in :func:`statistics`.
        tensor: as there.
        amax_axes: as there.
        impl: as there.

    Returns:
        float32 ``[563]``.

    Example:
        >>> mail = encode_statistics(jnp.array([[3.0, jnp.inf]]), None)
        >>> [float(value) for value in decode_statistics(4 * (mail + mail))]
        [4.0, nan, nan, nan, 1.0]
    """
    return count(x, tensor, amax_axes, impl).mail()


def decode_statistics(mail: Array) -> Statistics:
    """Reads the statistics out of a sum of encoded ones.

    Whatever positive factor the sum was multiplied by: the shares are those of all
    elements together, the non-finite count is the mean of the contributions'. amax and
    scale are exact for one contribution with the factor 1; otherwise amax is the power
    of two at or above the largest and scale the one at or below the smallest.

    Args:
        mail: float32 ``[..., 563]``, a sum of results of :func:`encode_statistics`.

    Returns:
        The numbers, float32 ``[...]``; NaN if nothing arrived.

    Example:
        >>> [float(value) for value in decode_statistics(jnp.zeros(RECORD_SIZE))][0]
        nan
    """
    amax = decode(mail[..., :MAILBOX_SIZE])
    inverse = decode(mail[..., MAILBOX_SIZE : 2 * MAILBOX_SIZE])
    sums = (mail[..., 2 * MAILBOX_SIZE + i] for i in range(_SUMS))
    return _numbers(amax, inverse[..., 0], *sums)


def count_amax(amax: Array, scale_inv: Array) -> Counts:
    """Of an array that a kernel rounded without showing it.

    Args:
        amax: float32 ``[2]``; its flag counts as one non-finite element.
        scale_inv: float32 ``[]``, what undoes its scale.

    Returns:
        The counts; no element was compared with its code.

    Example:
        >>> found = count_amax(jnp.array([3.0, 1.0]), jnp.float32(0.5)).statistics()
        >>> [float(value) for value in found]
        [3.0, 2.0, nan, nan, 1.0]
    """
    none = jnp.float32(0)
    return Counts(amax, scale_inv, none, none, none, amax[1])


def count(
    x: Array,
    tensor: ScaledTensor | None,
    amax_axes: tuple[str, ...] = (),
    impl: tuple | None = None,
) -> Counts:
    """Compares an array with its codes.

    Args:
        x: as in :func:`statistics`.
        tensor: as there.
        amax_axes: as there.
        impl: as there.

    Returns:
        The counts.
    """
    bits = magnitude(widen(x))
    amax = reduce_amax(AMAX(x, impl=impl)[0], amax_axes)
    nonfinite = _total(bits >= INF, amax_axes)
    if tensor is None or tensor.scaling == "none":
        none = jnp.float32(0)
        return Counts(amax, none, none, none, none, nonfinite)
    top = _top(tensor, impl)
    half = jnp.float32(1 + _HALF_STEP[tensor.format or "e4m3"])
    finite = bits < INF
    saturated = finite & (top > 0) & (as_float(bits) > top * half)
    flushed = finite & (bits >= MIN_NORMAL) & (top == 0)
    size, scale_inv = jnp.float32(max(x.size, 1)), _largest_inverse(tensor)
    if amax_axes:
        size, scale_inv = lax.psum(size, amax_axes), lax.pmax(scale_inv, amax_axes)
    return Counts(
        amax,
        scale_inv,
        size,
        _total(saturated, amax_axes),
        _total(flushed, amax_axes),
        nonfinite,
    )


def _numbers(
    amax: Array,
    scale_inv: Array,
    contributions: Array,
    elements: Array,
    saturated: Array,
    flushed: Array,
    nonfinite: Array,
) -> Statistics:
    """Ratios of sums, so that no factor of the sums counts; NaN for 0 / 0."""
    known = lambda number, among: jnp.where(among > 0, number, jnp.nan)
    ratio = lambda a, b: known(a / jnp.where(b > 0, b, 1), b)
    # 2^-127, MXFP8's smallest inverse, is carried as 0; above 2^126 the scale is one.
    scale = 1 / jnp.where(scale_inv > 0, scale_inv, 1)
    scale = jnp.where(scale_inv > 0, scale, jnp.float32(2.0**127))
    scale = jnp.where(scale_inv > jnp.float32(2.0**126), 0, scale)
    return Statistics(
        known(amax[..., 0], contributions),
        known(scale, jnp.where(scale_inv > 0, 1, elements)),  # of NaN too
        ratio(saturated, elements),
        ratio(flushed, elements),
        ratio(nonfinite, contributions),
    )


def _largest_inverse(tensor: ScaledTensor) -> Array:
    """The largest factor of the codes, float32 ``[]``; 0 for 2^-127."""
    scale = cast(Array, tensor.scale)
    if scale.dtype == jnp.uint8:  # 2^(e - 127), written into a float's exponent
        return as_float(jnp.max(scale, initial=0).astype(jnp.int32) << 23)
    largest = jnp.max(scale.astype(jnp.float32), initial=0.0)
    if tensor.global_scale is not None:
        largest = largest * tensor.global_scale
    return largest


def _top(tensor: ScaledTensor, impl: tuple | None) -> Array:
    """The largest value that each element could have had; 0 where its code is 0."""
    codes = lax.bitcast_convert_type(tensor.data, jnp.uint8)
    if tensor.format == "e2m1":  # two to a byte
        low = jnp.where((codes & 0x07) == 0, jnp.uint8(0), jnp.uint8(0x07))
        high = jnp.where((codes & 0x70) == 0, jnp.uint8(0), jnp.uint8(0x70))
        return dataclasses.replace(tensor, data=low | high).dequantize(impl=impl)
    if tensor.scaling == "mxfp6":
        codes = fp6.unpack(codes)
        codes = jnp.where((codes & 31) == 0, jnp.uint8(0), jnp.uint8(31))
        return dataclasses.replace(tensor, data=fp6.pack(codes)).dequantize(impl=impl)
    largest = jnp.uint8(_LARGEST[tensor.format or "e4m3"])
    codes = jnp.where((codes & _ABS) == 0, jnp.uint8(0), largest)
    data = lax.bitcast_convert_type(codes, tensor.data.dtype)
    return dataclasses.replace(tensor, data=data).dequantize(impl=impl)


def _total(mask: jax.Array, axes: tuple[str, ...]) -> Array:
    count = jnp.sum(mask, dtype=jnp.int32)
    return lax.psum(count, axes) if axes else count
