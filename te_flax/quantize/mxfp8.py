"""MXFP8: one power-of-two scale for each block of 32 along the contraction."""

import dataclasses

from te_flax.ops._bits import check_format
from te_flax.ops.mxfp8 import (
    QUANTIZE_MXFP8_COL,
    QUANTIZE_MXFP8_ROW,
    QUANTIZE_MXFP8_ROWCOL,
)
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer:
    """``q = cast(clip(x * 2^(127 - e)))``, ``e`` of each block rounded up.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.

    Raises:
        ValueError: there is no such format.

    Example:
        >>> import jax.numpy as jnp
        >>> q = MXFP8Quantizer()(
        ...     jnp.ones((4, 64)), k_ndim=1, rowwise=True, colwise=False
        ... )
        >>> q.rowwise.scale.shape
        (4, 2)

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6; scales
    rounded up as in Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8"
    (arXiv:2506.08027).
    """

    format: str = "e4m3"

    def __post_init__(self) -> None:
        """Checks the format."""
        check_format("MXFP8Quantizer", "format", self.format)

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
        """Quantizes ``x``; see :class:`te_flax.quantize.quantizer.Quantizer`."""
        check_orientations("MXFP8Quantizer", rowwise, colwise)
        row = col = row_scale = col_scale = None
        if rowwise and colwise:
            row, row_scale, col, col_scale, measured = QUANTIZE_MXFP8_ROWCOL(
                x,
                row_format=self.format,
                col_format=self.format,
                k_ndim=k_ndim,
                impl=impl,
            )
        elif rowwise:
            row, row_scale, measured = QUANTIZE_MXFP8_ROW(
                x, row_format=self.format, k_ndim=k_ndim, impl=impl
            )
        else:
            col, col_scale, measured = QUANTIZE_MXFP8_COL(
                x, col_format=self.format, k_ndim=k_ndim, impl=impl
            )

        measured = reduce_amax(measured, amax_axes)
        return Quantized(
            self.tensor(row, row_scale, True, k_ndim),
            self.tensor(col, col_scale, False, k_ndim),
            measured,
        )

    def tensor(
        self, data: Array | None, scale: Array | None, rowwise: bool, k_ndim: int
    ) -> ScaledTensor | None:
        """Wraps the codes of one copy; None stays None."""
        if data is None:
            return None
        return ScaledTensor(
            data=data,
            scale=scale,
            scaling="mxfp8",
            rowwise=rowwise,
            k_ndim=k_ndim,
            format=self.format,
        )
