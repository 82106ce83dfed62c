"""Error bounds that are carried through a chain of passes.

The bound is the radius of a :class:`Ball`: the float64 value of an intermediate result,
and how far the computed one may lie from it. :mod:`te_flax.testing.numerics` bounds the
single passes.

* A sum of K products of balls (a, r) and (b, s) errs by at most
  ``|a| s + r |b| + r s`` for what its terms may be off, and by the
  :func:`~te_flax.testing.numerics.product_bound` for its own roundings.
* Rounding to a narrower dtype and, for a fixed scale, quantizing are monotone. So what
  the pass made of some value in [v - r, v + r] lies between what they make of the ends,
  and the radius behind them is the larger distance to these two. It is 0 where no
  decision of the rounding lies within r of v, and a whole step where one does: nothing
  is said about how often that happens. Where a scale comes from the values themselves,
  the ends are taken with the smallest and the largest amax that the balls allow.
* A function f is followed by its values at five points of [z - r, z + r]; between
  them it leaves their chord by at most ``r^2 max|f''| / 32``.
* Norms: LayerNorm errs by ``(8 + log2 H) 2^-24 |gamma| max|x| / std``, RMSNorm by
  ``(8 + log2 H) 2^-24 |h|``; activations by ``4 2^-24 |f(z)| (1 + 2 |u|)``, u the
  argument of the exponential.

Such a ball follows the codes of the format to the bit but where float32 roundings may
decide otherwise, which takes most of the format's own error out of the comparison. That
error, the distance to the unquantized result, is bounded in the Frobenius norm
(:func:`te_flax.testing.formats.noise`). One rounding is off by at most half a step, a
share between ``unit / 2`` and ``unit`` of the value, spread evenly over the step: its
root mean square is at most ``unit / sqrt(3)`` of the value, and 0.74 times that over
values spread over whole binades. A run of the exact chain in which every operand gets
noise that is uniform in +-``unit`` of the value thus has the error of each operand at
its largest, and all later passes carry both on alike. The norms of thousands of
independent roundings concentrate: measured, a pass has 0.6 to 0.75 of that error. The
slope of relu and of the clamped activations jumps. There an error decides how many
slopes are wrong, and the norm grows with its square root only: such chains get noise
that is sqrt(3) as large, the root mean square of an error of ``unit`` everywhere.

NVFP4 has one bit of mantissa and three levels, each of which adds to that error:

* e2m1 rounds a scaled magnitude v by at most ``max(v, 1) / 4``: half a step of 1/2 up
  to 2, of 1 up to 4, of 2 up to 6. So ``unit`` is 2^-2, and the floor is what 1/4 means
  under the scale s of the block, ``s / 4``. With u the amax of the block as a share of
  6 of its codes, e4m3 rounds u to s <= ``(1 + 2^-4) u``: the floor is
  ``17/16 / 24 = 17/384`` of the block's amax. The error is the larger of both.
* Where e4m3 rounds a scale down, values saturate at 6 and lose at most ``1 - s / u``
  <= 2^-4 of themselves, less than ``unit``.
* Below 2^-6 the steps of e4m3 are 2^-9 wide: s is off by up to 2^-10, which saturation
  turns into 6 2^-10 and a step into 1/4 of it. The tensor's amax has the scale 448, so
  that is ``25/24 2^-10 / 448`` of it, added to every value.
* The float32 scale of the tensor adds roundings only. A kernel has one scale for each
  16 x 16, anything else for each 1 x 16: the amax is taken over these.
* dkernel contracts Hadamard transforms: x^T dy = (H x)^T (H dy) for an orthogonal H. An
  error of a transformed block is carried back with the same 2-norm, spread over its 16
  tokens, so the noise is added behind the transform. Its own float32 error is that of
  four additions, ``4 2^-24 sum|x| / 4``; the signs and 1/4 are exact.
* Rounded stochastically, dy is off by at most a whole step, twice as much. A value at
  the share f of its step goes up with the probability f: the mean square of the error
  is ``f (1 - f)`` steps^2, over an even f 1/6 where the nearest code has 1/12. The
  noise of dy is sqrt(2) as large. For given draws the codes are monotone in the value
  too, with the draw in place of the middle of the step, so balls follow these codes.

Measured, a pass has 0.6 to 0.71 of the error, with both ways to round.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from te_flax.testing.numerics import UNIT, product_bound, product_mode, sum_bound

_TINY = 2.0**-126  # below it float32 kernels may return zero


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
        bound = product_bound(self.value.shape[-1], size, 3, mode=product_mode(fp8=fp8))
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
