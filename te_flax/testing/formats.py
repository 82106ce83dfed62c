"""What a recipe's quantizers make of a matrix: the values of the codes, in float64.

Independent of the ops: scales and codes come from :mod:`te_flax.testing.oracle`. What
is quantized how comes from the recipe's quantizers, so that a pass which takes the
wrong format or scale is off. :mod:`te_flax.testing.numerics` derives the bounds.
"""

from typing import Any, NamedTuple

import numpy as np

from te_flax.quantize.block import BlockQuantizer
from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.testing import oracle
from te_flax.testing.numerics import Ball

# One rounding of a value to the format, and half of its smallest step at amax = max.
FORMATS = {"e4m3": (2.0**-4, 2.0**-10 / 224), "e5m2": (2.0**-3, 2.0**-17 / 28672)}


class Rule(NamedTuple):
    """How the operands of one GEMM are quantized.

    Attributes:
        quantizers: of x, kernel and dy; None quantizes nothing.
        amaxes: of x, kernel and dy where earlier steps fix the scale, else None.
        noise: None follows the codes; a generator puts random noise of the format's
            size in their place.
        louder: factor of that noise.

    Example:
        >>> float(Rule()("x", Ball.exact([[1.5]])).value[0, 0])
        1.5
    """

    quantizers: Any = None
    amaxes: tuple[float | None, float | None, float | None] = (None, None, None)
    noise: np.random.Generator | None = None
    louder: float = 1.0

    def __call__(self, role: str, x: Ball) -> Ball:
        """The operand as the GEMM reads it, contracted over the last axis."""
        if self.quantizers is None:
            return x
        quantizer = getattr(self.quantizers, role)
        amax = self.amaxes[("x", "kernel", "dy").index(role)]
        if self.noise is not None:
            return noise(x, quantizer, self.noise, self.louder)
        return quantized(x, quantizer, amax)


def quantized(x: Ball, quantizer: Any, amax: float | None = None) -> Ball:
    """The values that the codes of a matrix stand for.

    Args:
        x: ``[rows, contracted]``.
        quantizer: of the recipe.
        amax: that fixes the scale under tensor scaling; None takes that of x.

    Returns:
        A ball that holds them all.

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> quantized(Ball.exact([[448.0, 17.0]]), TensorQuantizer()).value.tolist()
        [[448.0, 16.0]]
    """
    decode = _mxfp8 if isinstance(quantizer, MXFP8Quantizer) else _scaled
    shape, block = x.value.shape, _block(quantizer, x.value.shape)
    x = Ball(_blocks(x.value, block), _blocks(x.radius, block))
    fixed = None if amax is None else np.full((1, 1, 1, 1), amax)
    largest = lambda a: (
        a.max((1, 3), keepdims=True, initial=0) if fixed is None else fixed
    )
    size = np.abs(x.value)
    low, mid, high = map(largest, (np.maximum(size - x.radius, 0), size, x.largest))
    value = decode(x.value, mid, quantizer)
    ends = [
        decode(x.value + sign * x.radius, a, quantizer)
        for sign in (-1, 1)
        for a in (low, high)
    ]
    radius = np.max([np.abs(end - value) for end in ends], 0)
    if not getattr(quantizer, "power_of_2", True):  # the scales between the two
        radius += np.abs(value) * (high - low) / np.maximum(low, 1e-30)
    rows, columns = value.shape[0] * block[0], value.shape[2] * block[1]
    flat = lambda a: a.reshape(rows, columns)[: shape[0], : shape[1]]
    return Ball(flat(value), flat(radius))


def noise(
    x: Ball, quantizer: Any, rng: np.random.Generator, louder: float = 1.0
) -> Ball:
    """The values, each with random noise as large as one rounding of the format.

    Args:
        x: ``[rows, contracted]``.
        quantizer: of the recipe.
        rng: of the noise.
        louder: factor of the noise.

    Returns:
        A ball of radius 0.

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> rng = np.random.default_rng(0)
        >>> x = noise(Ball.exact([[1.0]]), TensorQuantizer(), rng).value
        >>> bool(0 < abs(x[0, 0] - 1) < 0.07)
        True
    """
    unit, floor = FORMATS[quantizer.format]
    size = np.abs(x.value)
    error = unit * size + floor * np.max(size, initial=0.0)
    return Ball.exact(x.value + error * rng.uniform(-louder, louder, size.shape))


def _block(quantizer: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    if isinstance(quantizer, MXFP8Quantizer):
        return 1, 32
    if isinstance(quantizer, BlockQuantizer):
        return (128 if quantizer.two_dimensional else 1), 128
    return max(shape[0], 1), max(shape[1], 1)


def _blocks(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[rows, columns] as [blocks, rows, blocks, columns], filled with zeros."""
    padded = np.pad(x, [(0, -n % b) for n, b in zip(x.shape, block, strict=True)])
    rows, columns = (n // b for n, b in zip(padded.shape, block, strict=True))
    return padded.reshape(rows, block[0], columns, block[1])


def _scaled(x: np.ndarray, amax: np.ndarray, q: Any) -> np.ndarray:
    """Codes under a float32 scale for each block, or for all."""
    scale, scale_inv = oracle.amax_to_scale(
        amax.astype(np.float32),
        format=q.format,
        margin=getattr(q, "margin", 0),
        power_of_2=q.power_of_2,
        epsilon=q.epsilon,
    )
    dtype, largest = oracle.FP8[q.format]
    product = (x.astype(np.float32).astype(np.float64) * scale).astype(np.float32)
    codes = np.clip(product, -largest, largest).astype(dtype)
    return codes.astype(np.float64) * scale_inv.astype(np.float64)


def _mxfp8(x: np.ndarray, amax: np.ndarray, q: MXFP8Quantizer) -> np.ndarray:
    dtype, largest = oracle.FP8[q.format]
    share = amax.astype(np.float32).astype(np.float64) * float(np.float32(1 / largest))
    mantissa, exponent = np.frexp(share.astype(np.float32).astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    power = np.ldexp(1.0, np.maximum(exponent, -127))
    scaled = np.clip(x.astype(np.float32) / power, -largest, largest)
    return scaled.astype(np.float32).astype(dtype).astype(np.float64) * power
