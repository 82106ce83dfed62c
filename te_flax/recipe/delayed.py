"""Delayed scaling."""

import dataclasses

from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.recipe.base import (
    Quantizers,
    Recipe,
    check_choice,
    check_flag,
    check_integer,
    check_split_accumulator,
)


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One float32 scale per tensor, from the amax of earlier steps.

    scale = clamp(fp8_max / amax * 2^-margin, 2^-126, 2^126), where amax is the
    largest (or the most recent) entry of the history. A tensor is quantized with
    the scale known before the step; its own amax is pushed afterwards.

    Args:
        margin: powers of two kept free below the format's maximum, 0 to 126.
        fp8_format: ``"hybrid"`` (e4m3 forward, e5m2 for gradients) or ``"e4m3"``.
        amax_history_len: how many of the newest entries count, at least 1.
        amax_compute_algo: ``"max"`` over these entries, or ``"most_recent"``.
        fp8_attention: also quantize the products inside attention.
        split_accumulator: float32 accumulation of partial sums in the (forward,
            dgrad, wgrad) GEMMs on hardware that otherwise keeps fewer bits.

    Raises:
        ValueError: a field is out of range or of the wrong type.

    Example:
        >>> DelayedScaling(amax_history_len=16).amax_compute_algo
        'max'

    Source:
        Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433,
        section 2.
    """

    margin: int = 0
    fp8_format: str = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    fp8_attention: bool = False
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)

    def __post_init__(self) -> None:
        """Checks every field."""
        check_integer(self, "margin", 0, 126, "use 0 for no margin")
        check_choice(self, "fp8_format", ("hybrid", "e4m3"))
        check_integer(
            self, "amax_history_len", 1, None, "use 1 to look at one step only"
        )
        check_choice(self, "amax_compute_algo", ("max", "most_recent"))
        check_flag(self, "fp8_attention")
        check_split_accumulator(self)

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        return Quantizers(
            *(TensorQuantizer(format=name, margin=self.margin) for name in self.formats)
        )
