"""NVFP4 block scaling."""

import dataclasses

from te_flax.quantize.nvfp4 import NVFP4Quantizer
from te_flax.recipe.base import Quantizers, Recipe, check_flag


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """e2m1 codes, an e4m3 scale for each 16 of them, a float32 scale for the tensor.

    Blocks of x and dy are 1 x 16 along the contraction of the product that reads them,
    those of a kernel 16 x 16. Codes and scales are real; products are taken in float32.

    Args:
        disable_rht: no random Hadamard transform of x and dy in dkernel = x^T . dy.
        disable_stochastic_rounding: round dy to nearest.
        disable_2d_quantization: 1 x 16 blocks for kernels too; the two passes then
            read differently rounded kernels.

    Raises:
        ValueError: a field is no bool.

    Example:
        >>> NVFP4BlockScaling(disable_rht=True).quantizers().x.hadamard
        False

    Source:
        NVIDIA 2025, "Pretraining Large Language Models with NVFP4"
        (arXiv:2509.25149), sections 2 and 4.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in dataclasses.fields(self):
            check_flag(self, field.name)

    @property
    def formats(self) -> tuple[str, str, str]:
        """The element formats of x, kernel and dy."""
        return "e2m1", "e2m1", "e2m1"

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        rht = not self.disable_rht
        return Quantizers(
            NVFP4Quantizer(hadamard=rht),
            NVFP4Quantizer(two_dimensional=not self.disable_2d_quantization),
            NVFP4Quantizer(
                hadamard=rht, stochastic=not self.disable_stochastic_rounding
            ),
        )
