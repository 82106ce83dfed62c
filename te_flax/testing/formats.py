"""What a recipe's quantizers make of a matrix: the values of the codes, in float64.

Independent of the ops: scales and codes come from :mod:`te_flax.testing.oracle`. What
is quantized how comes from the recipe's quantizers, so that a pass which takes the
wrong format or scale is off. :mod:`te_flax.testing.numerics` derives the bounds.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.testing import oracle
from te_flax.testing.numerics import Ball

# One rounding of a value to the format, and half of its smallest step at amax = max.
FORMATS = {"e4m3": (2.0**-4, 2.0**-10 / 224), "e5m2": (2.0**-3, 2.0**-17 / 28672)}
_BLOCK = 32


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
        >>> quantized(Ball.exact([[448.0, 17.0]]), TensorQuantizer()).value.tolist()
        [[448.0, 16.0]]
    """
    decode = {TensorQuantizer: _tensor, MXFP8Quantizer: _mxfp8}[type(quantizer)]
    width = x.value.shape[-1]
    if isinstance(quantizer, MXFP8Quantizer):
        x = Ball(_blocks(x.value), _blocks(x.radius))
        largest = lambda a: a.max(-1, keepdims=True, initial=0)
    else:
        largest = lambda a: np.max(a, initial=0.0) if amax is None else amax
    size = np.abs(x.value)
    low, mid, high = map(largest, (np.maximum(size - x.radius, 0), size, x.largest))
    value = decode(x.value, mid, quantizer)
    ends = [
        decode(x.value + sign * x.radius, a, quantizer)
        for sign in (-1, 1)
        for a in (low, high)
    ]
    radius = np.max([np.abs(end - value) for end in ends], 0)
    if isinstance(quantizer, TensorQuantizer):  # scales between the two, step by step
        radius += np.abs(value) * (high - low) / max(low, 1e-30)
        return Ball(value, radius)
    flat = lambda a: a.reshape(len(a), -1)[:, :width]
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
        >>> rng = np.random.default_rng(0)
        >>> x = noise(Ball.exact([[1.0]]), TensorQuantizer(), rng).value
        >>> bool(0 < abs(x[0, 0] - 1) < 0.07)
        True
    """
    unit, floor = FORMATS[quantizer.format]
    size = np.abs(x.value)
    error = unit * size + floor * np.max(size, initial=0.0)
    return Ball.exact(x.value + error * rng.uniform(-louder, louder, size.shape))


def _blocks(x: np.ndarray) -> np.ndarray:
    """[rows, columns] as [rows, blocks, 32], the last block filled with zeros."""
    rest = -x.shape[-1] % _BLOCK
    return np.pad(x, ((0, 0), (0, rest))).reshape(len(x), -1, _BLOCK)


def _tensor(x: np.ndarray, amax: ArrayLike, q: TensorQuantizer) -> np.ndarray:
    options = {"margin": q.margin, "power_of_2": q.power_of_2, "epsilon": q.epsilon}
    scale, scale_inv = oracle.amax_to_scale(
        np.float32(amax), format=q.format, **options
    )
    codes, _ = oracle.quantize(x, scale, k_ndim=1, row_format=q.format)
    return codes.astype(np.float64) * np.float64(scale_inv)


def _mxfp8(x: np.ndarray, amax: np.ndarray, q: MXFP8Quantizer) -> np.ndarray:
    dtype, largest = oracle.FP8[q.format]
    share = amax.astype(np.float32).astype(np.float64) * float(np.float32(1 / largest))
    mantissa, exponent = np.frexp(share.astype(np.float32).astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    power = np.ldexp(1.0, np.maximum(exponent, -127))
    scaled = np.clip(x.astype(np.float32) / power, -largest, largest)
    return scaled.astype(np.float32).astype(dtype).astype(np.float64) * power
