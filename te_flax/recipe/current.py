"""Current scaling."""

import dataclasses

from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.recipe.base import (
    Quantizers,
    Recipe,
    check_amax_epsilon,
    check_choice,
    check_flag,
    check_split_accumulator,
)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One float32 scale per tensor, from the tensor's own amax.

    scale = clamp(fp8_max / max(amax, amax_epsilon), 2^-126, 2^126). Needs one more
    pass over the tensor than delayed scaling, and no statistics.

    Args:
        fp8_format: ``"hybrid"`` (e4m3 forward, e5m2 for gradients) or ``"e4m3"``.
        use_power_2_scales: round scales down to a power of two.
        amax_epsilon: a lower bound for amax, a finite float32 of at least 0.
        split_accumulator: float32 accumulation of partial sums in the (forward,
            dgrad, wgrad) GEMMs on hardware that otherwise keeps fewer bits.

    Raises:
        ValueError: a field is out of range or of the wrong type.

    Example:
        >>> Float8CurrentScaling(use_power_2_scales=True).fp8_format
        'hybrid'
    """

    fp8_format: str = "hybrid"
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)

    def __post_init__(self) -> None:
        """Checks every field."""
        check_choice(self, "fp8_format", ("hybrid", "e4m3"))
        check_flag(self, "use_power_2_scales")
        check_amax_epsilon(self)
        check_split_accumulator(self)

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        return Quantizers(
            *(
                TensorQuantizer(
                    format=name,
                    power_of_2=self.use_power_2_scales,
                    epsilon=self.amax_epsilon,
                )
                for name in self.formats
            )
        )
