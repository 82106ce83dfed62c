"""Float32 block scaling."""

import dataclasses

from te_flax.quantize.block import BlockQuantizer
from te_flax.recipe.base import (
    Quantizers,
    Recipe,
    check_amax_epsilon,
    check_choice,
    check_flag,
)


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A float32 scale for each 128 elements of x and dy, each 128 x 128 of a kernel.

    scale = fp8_max / max(amax, amax_epsilon) of the block, rounded down to a power of
    two unless ``use_f32_scales``. Blocks of x and dy run along the contraction of the
    product that reads them. No statistics are needed; partial sums are accumulated in
    float32 in all three products.

    Args:
        fp8_format: ``"e4m3"``, or ``"hybrid"`` for e5m2 gradients.
        use_f32_scales: keep all bits of the scales.
        amax_epsilon: a lower bound for a block's amax, a finite float32 of at least 0.

    Raises:
        ValueError: a field is out of range or of the wrong type.

    Example:
        >>> Float8BlockScaling().split_accumulator
        (True, True, True)

    Source:
        DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section
        3.3.2.
    """

    fp8_format: str = "e4m3"
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        """Checks every field."""
        check_choice(self, "fp8_format", ("e4m3", "hybrid"))
        check_flag(self, "use_f32_scales")
        check_amax_epsilon(self)

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        x, kernel, dy = (
            BlockQuantizer(
                format=name,
                two_dimensional=is_kernel,
                power_of_2=not self.use_f32_scales,
                epsilon=self.amax_epsilon,
            )
            for name, is_kernel in zip(self.formats, (False, True, False), strict=True)
        )
        return Quantizers(x, kernel, dy)
