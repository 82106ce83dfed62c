"""MXFP6: packed codes of six bits with a power-of-two scale for each block of 32."""

import dataclasses

from te_flax.ops.fp6 import check_format, joined
from te_flax.ops.mxfp6 import (
    QUANTIZE_MXFP6_COL,
    QUANTIZE_MXFP6_ROW,
    QUANTIZE_MXFP6_ROWCOL,
)
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

_OPS = {
    ("row",): QUANTIZE_MXFP6_ROW,
    ("col",): QUANTIZE_MXFP6_COL,
    ("row", "col"): QUANTIZE_MXFP6_ROWCOL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP6Quantizer:
    """``q = cast(clip(x * 2^(127 - e)))``, ``e`` of each block rounded up.

    The codes of a row are packed four in three bytes, in both copies. FP6 has neither
    NaN nor infinities: a block with a NaN has a NaN scale, one with an infinity the
    largest scale, under which an infinity is one again.

    Args:
        format: ``"e2m3"`` or ``"e3m2"``.

    Raises:
        ValueError: there is no such format.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((4, 40))
        >>> q = MXFP6Quantizer()(x, k_ndim=1, rowwise=True, colwise=False).rowwise
        >>> q.data.shape, q.scale.shape, q.shape
        ((4, 30), (4, 2), (4, 40))

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5 and 6.
    """

    format: str = "e2m3"

    def __post_init__(self) -> None:
        """Checks the format."""
        check_format("MXFP6Quantizer", "format", self.format)

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
        check_orientations("MXFP6Quantizer", rowwise, colwise)
        copies = ("row",) * rowwise + ("col",) * colwise
        *arrays, measured = _OPS[copies](
            x,
            **{f"{copy}_format": self.format for copy in copies},
            k_ndim=k_ndim,
            impl=impl,
        )
        found = {
            copy: ScaledTensor(
                data=joined(arrays[2 * i]),
                scale=arrays[2 * i + 1],
                scaling="mxfp6",
                rowwise=copy == "row",
                k_ndim=k_ndim,
                format=self.format,
                logical_shape=x.shape,
            )
            for i, copy in enumerate(copies)
        }
        measured = reduce_amax(measured, amax_axes)
        return Quantized(found.get("row"), found.get("col"), measured)
