"""What every quantizer offers, and the one that changes nothing."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

from te_flax.errors import message
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array


class Scale(NamedTuple):
    """What tensor scaling multiplies an operand by.

    Attributes:
        scale: float32 ``[]``, the factor of the operand.
        scale_inv: float32 ``[]``, its inverse, the factor of the codes.

    Example:
        >>> Scale(2.0, 0.5).scale_inv
        0.5
    """

    scale: Array
    scale_inv: Array


class Quantized(NamedTuple):
    """The copies of one array that its GEMMs read.

    Attributes:
        rowwise: the copy to contract over ``K..``, or None when not asked for.
        colwise: the copy to contract over ``M..``, or None when not asked for.
        amax: float32 ``[2]``, largest finite magnitude and 1.0 if an element is NaN
            or Inf; None where nothing was measured.
    """

    rowwise: ScaledTensor | None
    colwise: ScaledTensor | None
    amax: Array | None = None


@runtime_checkable
class Quantizer(Protocol):
    """Turns an array into the copies that its consumers need, in one pass.

    A quantizer is a frozen dataclass: hashable, so that it can travel as a static
    argument, and without arrays; what it must know of earlier steps arrives as
    ``scale``.
    """

    def __call__(
        self,
        x: Array,
        *,
        k_ndim: int,
        rowwise: bool,
        colwise: bool,
        scale: Scale | None = None,
        amax_axes: tuple[str, ...] = (),
        key: Array | None = None,
        impl: tuple | None = None,
    ) -> Quantized:
        """Quantizes ``x``.

        Args:
            x: ``[M.., K..]`` float32, bfloat16 or float16.
            k_ndim: number of dims in ``K..``.
            rowwise: whether the copy to contract over ``K..`` is needed.
            colwise: whether the copy to contract over ``M..`` is needed.
            scale: of ``x`` under tensor scaling, where earlier steps fix it; None
                measures ``x``.
            amax_axes: manual mesh axes over which an amax is the maximum.
            key: of the draws of stochastic rounding; None rounds to nearest, and
                quantizers without it ignore the key.
            impl: kernel rules; None reads the context.

        Returns:
            The copies asked for, and the amax of ``x`` where it was measured.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Identity:
    """Keeps the array as it is: the quantizer of a layer without a recipe.

    Attributes:
        dtype: of the copies; None is that of the array.

    Example:
        >>> import jax.numpy as jnp
        >>> q = Identity()(jnp.ones((4, 8)), k_ndim=1, rowwise=True, colwise=False)
        >>> q.rowwise.scaling, q.colwise is None
        ('none', True)
    """

    dtype: str | None = None

    def __call__(
        self,
        x: Array,
        *,
        k_ndim: int,
        rowwise: bool,
        colwise: bool,
        scale: Scale | None = None,
        amax_axes: tuple[str, ...] = (),
        key: Array | None = None,
        impl: tuple | None = None,
    ) -> Quantized:
        """Returns ``x`` for both orientations; see :class:`Quantizer`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        return Quantized(
            ScaledTensor(data=x, k_ndim=k_ndim) if rowwise else None,
            ScaledTensor(data=x, k_ndim=k_ndim, rowwise=False) if colwise else None,
        )


def check_orientations(where: str, rowwise: bool, colwise: bool) -> None:
    """Raises ValueError when no copy is asked for."""
    if not (rowwise or colwise):
        rule, remedy = "be True for at least one of them", "ask for a copy"
        raise ValueError(message(where, "rowwise, colwise", rule, "False", remedy))
