"""MXFP8: one power-of-two scale for each block of 32 along the contraction."""

import dataclasses

from te_flax.errors import message
from te_flax.ops._bits import check_format
from te_flax.ops.mxfp8 import (
    QUANTIZE_MXFP8_COL,
    QUANTIZE_MXFP8_ROW,
    QUANTIZE_MXFP8_ROWCOL,
)
from te_flax.ops.mxfp8_values import QUANTIZE_MXFP8_VALUES
from te_flax.ops.products import products as products
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

# (copies, those of values) -> op
_OPS = {
    (("row",), ()): QUANTIZE_MXFP8_ROW,
    (("col",), ()): QUANTIZE_MXFP8_COL,
    (("row", "col"), ()): QUANTIZE_MXFP8_ROWCOL,
    **QUANTIZE_MXFP8_VALUES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Quantizer:
    """``q = cast(clip(x * 2^(127 - e)))``, ``e`` of each block rounded up.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        values: of ``"row"`` and ``"col"`` the copies that hold the values of their
            codes in bfloat16, exact, for a product that takes no MXFP8 codes.

    Raises:
        ValueError: there is no such format or copy.

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
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks both fields."""
        check_format("MXFP8Quantizer", "format", self.format)
        if self.values not in ((), ("row",), ("col",), ("row", "col")):
            rule = "be a tuple of 'row' and 'col', in that order"
            remedy = "use () for codes"
            raise ValueError(
                message("MXFP8Quantizer", "values", rule, repr(self.values), remedy)
            )

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
        copies = ("row",) * rowwise + ("col",) * colwise
        values = tuple(copy for copy in copies if copy in self.values)
        *arrays, measured = _OPS[copies, values](
            x,
            **{f"{copy}_format": self.format for copy in copies},
            k_ndim=k_ndim,
            impl=impl,
        )
        found = dict(
            zip(copies, zip(arrays[::2], arrays[1::2], strict=True), strict=True)
        )
        measured = reduce_amax(measured, amax_axes)
        return Quantized(
            self.tensor(*found.get("row", (None, None)), True, k_ndim),
            self.tensor(*found.get("col", (None, None)), False, k_ndim),
            measured,
        )

    def tensor(
        self, data: Array | None, scale: Array | None, rowwise: bool, k_ndim: int
    ) -> ScaledTensor | None:
        """Wraps the codes or values of one copy; None stays None."""
        if data is None:
            return None
        if ("row" if rowwise else "col") in self.values:
            return ScaledTensor(
                data=data, rowwise=rowwise, k_ndim=k_ndim, format=self.format
            )
        return ScaledTensor(
            data=data,
            scale=scale,
            scaling="mxfp8",
            rowwise=rowwise,
            k_ndim=k_ndim,
            format=self.format,
        )
