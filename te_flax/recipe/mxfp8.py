"""MXFP8 block scaling."""

import dataclasses

from te_flax.quantize.mxfp8 import MXFP8Quantizer, products
from te_flax.recipe.base import Quantizers, Recipe, check_choice


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for each 32 elements along the GEMM's contraction.

    The scale is the e8m0 byte at or above amax / fp8_max of the block. No
    statistics are needed; partial sums are accumulated in float32.

    Args:
        fp8_format: ``"e4m3"``, or ``"hybrid"`` for e5m2 gradients.

    Raises:
        ValueError: the format is unknown.

    Example:
        >>> MXFP8BlockScaling().formats
        ('e4m3', 'e4m3', 'e4m3')

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 5.
    """

    fp8_format: str = "e4m3"

    def __post_init__(self) -> None:
        """Checks every field."""
        check_choice(self, "fp8_format", ("e4m3", "hybrid"))

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        return Quantizers(*(MXFP8Quantizer(format=name) for name in self.formats))

    def operands(self) -> Quantizers:
        """As quantizers(), with values for products that take no codes.

        What a pass keeps for the other one is codes: the colwise copy of x, the
        rowwise copy of the kernel.
        """
        if products("mxfp8") == "codes":
            return self.quantizers()
        values = ("row",), ("col",), ("row", "col")
        return Quantizers(
            *(
                MXFP8Quantizer(format=name, values=copies)
                for name, copies in zip(self.formats, values, strict=True)
            )
        )
