"""MXFP6 block scaling."""

import dataclasses

from te_flax.quantize.mxfp6 import MXFP6Quantizer
from te_flax.recipe.base import Quantizers, Recipe, check_choice


@dataclasses.dataclass(frozen=True)
class MXFP6BlockScaling(Recipe):
    """Codes of six bits, a power-of-two scale for each 32 along the contraction.

    The scale is the e8m0 byte at or above amax / fp6_max of the block, 7.5 or 28. Codes
    and scales are real and are what the backward pass keeps; the products multiply
    their values, which bfloat16 holds exactly.

    Args:
        fp6_format: ``"e2m3"``, ``"e3m2"``, or ``"hybrid"``: e2m3 for x and the kernel,
            e3m2 for dy.

    Raises:
        ValueError: the format is unknown.

    Example:
        >>> MXFP6BlockScaling("hybrid").formats
        ('e2m3', 'e2m3', 'e3m2')

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 5.
    """

    fp6_format: str = "e2m3"

    def __post_init__(self) -> None:
        """Checks every field."""
        check_choice(self, "fp6_format", ("e2m3", "e3m2", "hybrid"))

    @property
    def formats(self) -> tuple[str, str, str]:
        """The element formats of x, kernel and dy."""
        if self.fp6_format == "hybrid":
            return "e2m3", "e2m3", "e3m2"
        return self.fp6_format, self.fp6_format, self.fp6_format

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        return Quantizers(*(MXFP6Quantizer(format=name) for name in self.formats))
