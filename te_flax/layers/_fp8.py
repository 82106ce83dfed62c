"""From a recipe and a layer's FP8 state to the arguments of a functional, and back."""

from typing import Any

from te_flax.functional.dense import Amaxes
from te_flax.recipe.base import Recipe
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.state import Fp8State, amax_axes
from te_flax.typing import Array


def static_fields(recipe: Recipe, fp8: Fp8State) -> dict[str, Any]:
    """The fields of a ``DenseConfig`` that a recipe decides, read at the call."""
    delayed = isinstance(recipe, DelayedScaling)
    return {
        **recipe.quantizers()._asdict(),
        "split_accumulator": recipe.split_accumulator,
        "amax_axes": amax_axes(fp8),
        "report_dy": delayed and not fp8.use_running_average,
    }


def read(recipe: Recipe, fp8: Fp8State) -> tuple[Amaxes | None, Array | None]:
    """The amaxes that fix the scales and the mailbox; None without delayed scaling."""
    if not isinstance(recipe, DelayedScaling):
        return None, None
    # Without somebody who fills its history dy must measure itself.
    dy = fp8.amax("dy", recipe) if fp8.tracked else None
    amaxes = Amaxes(fp8.amax("x", recipe), fp8.amax("kernel", recipe), dy)
    return amaxes, fp8.mailbox[...]
