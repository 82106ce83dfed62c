"""Arrays that are known up to an error, as a chain of operations passes it on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from te_flax.testing.numerics import (
    _TINY,
    UNIT,
    product_bound,
    sum_bound,
)


@dataclasses.dataclass(frozen=True)
class Ball:
    """A float64 array, and how far a computed array may lie from it.

    Attributes:
        value: float64.
        radius: float64 of the same shape, >= 0.

    Example:
        >>> Ball.exact([1.0, 2.0]).radius.tolist()
        [0.0, 0.0]
    """

    value: np.ndarray
    radius: np.ndarray

    @classmethod
    def exact(cls, x: Any) -> "Ball":
        """An operand that is known to the bit."""
        value = np.asarray(x).astype(np.float64)
        return cls(value, np.zeros_like(value))

    @property
    def largest(self) -> np.ndarray:
        """The largest magnitude that the computed array may have."""
        return np.abs(self.value) + self.radius

    @property
    def transposed(self) -> "Ball":
        """Both parts transposed."""
        return Ball(self.value.T, self.radius.T)

    def grown(self, by: ArrayLike) -> "Ball":
        """With a larger radius."""
        return Ball(self.value, self.radius + by)

    def times(self, factor: "Ball", roundings: float = 1) -> "Ball":
        """The elementwise product, each rounded to float32."""
        value = self.value * factor.value
        size = self.largest * factor.largest
        radius = size - np.abs(value) + roundings * UNIT * size + _TINY
        return Ball(value, radius)

    def dot(self, rhs: "Ball", bias: ArrayLike = 0.0, *, fp8: bool = True) -> "Ball":
        """The matrix product plus a bias; scales and bias add three roundings."""
        value = self.value @ rhs.value
        size = self.largest @ rhs.largest
        off = size - np.abs(self.value) @ np.abs(rhs.value)
        size = size + np.abs(bias)
        bound = product_bound(self.value.shape[-1], size, 3, fp8=fp8)
        radius = np.maximum(off, 0) + bound
        return Ball(value + bias, radius)

    def total(self) -> "Ball":
        """The sum over the first axis."""
        radius = self.radius.sum(0) + sum_bound(len(self.value), self.largest.sum(0))
        return Ball(self.value.sum(0), radius)

    def followed(self, f: Callable, bend: float, slack: ArrayLike = 0.0) -> "Ball":
        """The result of a function.

        Args:
            f: float64 to float64, elementwise.
            bend: the largest magnitude of its second derivative.
            slack: what the float32 implementation may err by, like the result.
        """
        value = f(self.value)
        points = [f(self.value + t * self.radius) for t in (-1.0, -0.5, 0.5, 1.0)]
        radius = np.max([np.abs(p - value) for p in points], 0)
        return Ball(value, radius + bend / 32 * self.radius**2 + slack + _TINY)

    def rounded(self, dtype: DTypeLike) -> "Ball":
        """The result of a rounding to a dtype; float32 is as it is."""
        if np.dtype(dtype) == np.float32:
            return self
        value, low, high = (
            (self.value + t * self.radius).astype(dtype).astype(np.float64)
            for t in (0.0, -1.0, 1.0)
        )
        return Ball(value, np.maximum(high - value, value - low))
