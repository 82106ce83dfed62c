"""What a recipe's quantizers make of a matrix: the values of the codes, in float64.

Independent of the ops: scales and codes come from :mod:`te_flax.testing.oracle`. What
is quantized how comes from the recipe's quantizers, so that a pass which takes the
wrong format or scale is off. :mod:`te_flax.testing.ball` derives the bounds.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from te_flax.ops.hadamard import BLOCK, SIGNS
from te_flax.quantize.block import BlockQuantizer
from te_flax.quantize.mxfp6 import MXFP6Quantizer
from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.quantize.nvfp4 import NVFP4Quantizer
from te_flax.testing import oracle, oracle_mxfp6, oracle_nvfp4
from te_flax.testing.ball import Ball
from te_flax.testing.numerics import UNIT

# One rounding of a value to the format, and half of its smallest step as a share of the
# amax of the values with one scale; testing/ball.py derives e2m1's.
FORMATS = {
    "e4m3": (2.0**-4, 2.0**-10 / 224),
    "e5m2": (2.0**-3, 2.0**-17 / 28672),
    "e2m3": (2.0**-4, 2.0**-4 / 3.75),
    "e3m2": (2.0**-3, 2.0**-5 / 14),
    "e2m1": (2.0**-2, 17 / 384),
}
_MX = (MXFP8Quantizer, MXFP6Quantizer)
_LOST = 25 / 24 * 2.0**-10 / 448  # of the tensor's amax, by e4m3 scales near 0


class Rule(NamedTuple):
    """How the operands of one GEMM are quantized.

    Attributes:
        quantizers: of x, kernel and dy; None quantizes nothing.
        amaxes: of x, kernel and dy where earlier steps fix the scale, else None.
        noise: None follows the codes; a generator puts random noise of the format's
            size in their place.
        louder: factor of that noise.
        key: of the draws of stochastic rounding; None rounds to nearest.

    Example:
        >>> float(Rule()("x", Ball.exact([[1.5]])).value[0, 0])
        1.5
    """

    quantizers: Any = None
    amaxes: tuple[float | None, float | None, float | None] = (None, None, None)
    noise: np.random.Generator | None = None
    louder: float = 1.0
    key: jax.Array | None = None

    def __call__(self, role: str, x: Ball, *, tokens: bool = False) -> Ball:
        """The operand as the GEMM reads it, contracted over the last axis.

        Args:
            role: "x", "kernel" or "dy".
            x: ``[rows, contracted]``.
            tokens: whether the contracted axis holds the tokens.

        Returns:
            A matrix; a Hadamard transform fills the tokens up to a multiple of 16.
        """
        if self.quantizers is None:
            return x
        quantizer = getattr(self.quantizers, role)
        amax = self.amaxes[("x", "kernel", "dy").index(role)]
        if tokens and getattr(quantizer, "hadamard", False):
            x = rotated(x)
        if self.noise is not None:
            return noise(x, quantizer, self.noise, self.louder)
        random = None
        if self.key is not None and getattr(quantizer, "stochastic", False):
            key = jax.random.split(self.key)[int(tokens)]
            random = np.asarray(jax.random.bits(key, x.value.shape, jnp.uint32))
        return quantized(x, quantizer, amax, random)


def rotated(x: Ball) -> Ball:
    """The random Hadamard transform of each 16 along the last axis.

    Four additions meet each value; the factor 1/4 and the signs are exact.

    Args:
        x: ``[rows, tokens]``.

    Returns:
        ``[rows, tokens]``, the tokens filled up to a multiple of 16.

    Example:
        >>> rotated(Ball.exact(np.ones((2, 33)))).value.shape
        (2, 48)
    """
    h = oracle_nvfp4.hadamard(SIGNS)
    turn = lambda a, h: (_blocks(a, (1, BLOCK)) @ h.T).reshape(len(a), -1)
    size = turn(x.largest, np.abs(h))
    radius = turn(x.radius, np.abs(h)) + math.log2(BLOCK) * UNIT * size
    return Ball(turn(x.value, h), radius)


def quantized(
    x: Ball,
    quantizer: Any,
    amax: float | None = None,
    random: np.ndarray | None = None,
) -> Ball:
    """The values that the codes of a matrix stand for.

    Args:
        x: ``[rows, contracted]``.
        quantizer: of the recipe.
        amax: that fixes the scale under tensor scaling; None takes that of x.
        random: draws of stochastic rounding, uint32 like x; None rounds to nearest.

    Returns:
        A ball that holds them all.

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> quantized(Ball.exact([[448.0, 17.0]]), TensorQuantizer()).value.tolist()
        [[448.0, 16.0]]
    """
    shape, block = x.value.shape, _block(quantizer, x.value.shape)
    x = Ball(_blocks(x.value, block), _blocks(x.radius, block))
    if isinstance(quantizer, NVFP4Quantizer):
        draws = None if random is None else _blocks(random, block)
        y = _two_levels(x, draws)
    else:
        y = _one_level(x, quantizer, amax)
    return Ball(*(_flat(a, shape) for a in (y.value, y.radius)))


def rounding_bound(x: np.ndarray, quantizer: Any) -> np.ndarray:
    """Bounds what one rounding to the format may change in each value.

    Twice as much where a quantizer rounds stochastically.

    Args:
        x: ``[rows, contracted]``.
        quantizer: of the recipe; its scales come from x.

    Returns:
        A bound for each element.

    Example:
        >>> from te_flax.quantize.per_tensor import TensorQuantizer
        >>> rounding_bound(np.array([[16.0, -448.0]]), TensorQuantizer()).tolist()
        [[1.0, 28.0]]
    """
    unit, floor = FORMATS[getattr(quantizer, "format", "e2m1")]
    size = _blocks(np.abs(x), _block(quantizer, x.shape))
    error = np.maximum(unit * size, floor * _largest(size))
    if isinstance(quantizer, NVFP4Quantizer):
        error += _LOST * np.max(size, initial=0.0)
    return _flat(error, x.shape)


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
    if getattr(quantizer, "stochastic", False):
        louder *= 2**0.5
    error = rounding_bound(x.value, quantizer)
    return Ball.exact(x.value + error * rng.uniform(-louder, louder, error.shape))


def _block(quantizer: Any, shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    if isinstance(quantizer, _MX):
        return 1, 32
    if isinstance(quantizer, BlockQuantizer):
        return (128 if quantizer.two_dimensional else 1), 128
    if isinstance(quantizer, NVFP4Quantizer):
        return (16 if quantizer.two_dimensional else 1), 16
    return max(shape[0], 1), max(shape[1], 1)


def _blocks(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[rows, columns] as [blocks, rows, blocks, columns], filled with zeros."""
    padded = np.pad(x, [(0, -n % b) for n, b in zip(x.shape, block, strict=True)])
    rows, columns = (n // b for n, b in zip(padded.shape, block, strict=True))
    return padded.reshape(rows, block[0], columns, block[1])


def _flat(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Undoes :func:`_blocks`."""
    matrix = x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])
    return matrix[: shape[0], : shape[1]]


def _largest(x: np.ndarray) -> np.ndarray:
    """The largest magnitude in each block."""
    return x.max((1, 3), keepdims=True, initial=0)


def _amaxes(x: Ball) -> tuple[np.ndarray, ...]:
    """The amaxes of each block: the smallest one allowed, the value's, the largest."""
    size = np.abs(x.value)
    return tuple(map(_largest, (np.maximum(size - x.radius, 0), size, x.largest)))


def _around(value: np.ndarray, ends: list[np.ndarray], relative: Any) -> Ball:
    """The ball around a value that reaches all ends, and beyond by a relative error."""
    radius = np.max([np.abs(end - value) for end in ends], 0)
    return Ball(value, radius + (np.abs(value) + radius) * relative)


def _one_level(x: Ball, quantizer: Any, amax: float | None) -> Ball:
    """Codes under one scale for each block, whose amax may be fixed."""
    decode = _mx if isinstance(quantizer, _MX) else _scaled
    fixed = np.full((1, 1, 1, 1), amax, np.float64)
    low, mid, high = _amaxes(x) if amax is None else (fixed,) * 3
    value = decode(x.value, mid, quantizer)
    if not x.radius.any():
        return Ball.exact(value)
    ends = [
        decode(x.value + sign * x.radius, a, quantizer)
        for sign in (-1, 1)
        for a in (low, high)
    ]
    between = (high - low) / np.maximum(low, 1e-30)  # scales that are no power of 2
    return _around(
        value, ends, 0 if getattr(quantizer, "power_of_2", True) else between
    )


def _two_levels(x: Ball, random: np.ndarray | None) -> Ball:
    """e2m1 codes under an e4m3 scale for each block and a float32 scale for all.

    For a given block scale the codes are monotone in the value and in the scale of the
    tensor, so the ends are taken under every block scale that the ball allows.
    """
    low, mid, high = _amaxes(x)
    tensor = [np.max(a, initial=0.0) for a in (low, mid, high)]
    value = _nvfp4(x.value, _e4m3_scale(mid, tensor[1]), tensor[1], random)
    if not x.radius.any():
        return Ball.exact(value)
    first = _e4m3_scale(low, tensor[2]).astype(int)
    last = _e4m3_scale(high, tensor[0]).astype(int)
    ends = [
        _nvfp4(x.value + sign * x.radius, np.minimum(first + i, last), a, random)
        for i in range(np.max(last - first, initial=0) + 1)
        for sign in (-1, 1)
        for a in (tensor[0], tensor[2])
    ]
    return _around(value, ends, (tensor[2] - tensor[0]) / max(tensor[0], 1e-30))


def _float32(x: np.ndarray | np.float64) -> np.ndarray:
    return np.asarray(x).astype(np.float32).astype(np.float64)


def _e4m3_scale(amax: np.ndarray, tensor: float) -> np.ndarray:
    """The bytes of the scales of blocks, from their amaxes and that of the tensor."""
    scale = np.float64(oracle_nvfp4.scale(tensor)[0])
    share = _float32(scale * np.float64(np.float32(1 / 6)))
    scales = np.minimum(_float32(_float32(amax) * share), 448)
    return scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _nvfp4(x: np.ndarray, scales: np.ndarray, tensor: float, random) -> np.ndarray:
    """The values of codes under the bytes of block scales and the tensor's amax."""
    scale, inverse = map(np.float64, oracle_nvfp4.scale(tensor))
    s = scales.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = _float32(np.where(s > 0, 1 / np.where(s > 0, s, 1), 0))
    scaled = np.clip(_float32(_float32(_float32(x) * scale) * factor), -6, 6)
    if random is None:
        values = scaled.astype(ml_dtypes.float4_e2m1fn)
    else:
        codes = oracle_nvfp4.stochastic(scaled, random).astype(np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn)
    return values.astype(np.float64) * s * inverse


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


def _mx(x: np.ndarray, amax: np.ndarray, q: Any) -> np.ndarray:
    """Codes under a power of two for each block."""
    dtype, largest = (oracle.FP8 | oracle_mxfp6.FP6)[q.format]
    share = amax.astype(np.float32).astype(np.float64) * float(np.float32(1 / largest))
    mantissa, exponent = np.frexp(share.astype(np.float32).astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    power = np.ldexp(1.0, np.maximum(exponent, -127))
    scaled = np.clip(x.astype(np.float32) / power, -largest, largest)
    return scaled.astype(np.float32).astype(dtype).astype(np.float64) * power
