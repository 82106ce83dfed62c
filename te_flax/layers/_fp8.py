"""From a recipe and a layer's FP8 state to the arguments of a functional, and back."""

from typing import Any

from te_flax.functional.config import Amaxes, DenseConfig, GemmState
from te_flax.recipe.base import Recipe
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.state import Fp8State, amax_axes
from te_flax.typing import Array


def gemm_config(recipe: Recipe | None, fp8: Fp8State, **common: Any) -> DenseConfig:
    """The static configuration of a GEMM under a recipe, read at the call."""
    if recipe is None:
        return DenseConfig(**common)
    delayed = isinstance(recipe, DelayedScaling)
    return DenseConfig(
        **recipe.quantizers()._asdict(),
        split_accumulator=recipe.split_accumulator,
        amax_axes=amax_axes(fp8),
        report_dy=delayed and not fp8.use_running_average,
        **common,
    )


def gemm_state(recipe: Recipe | None, fp8: Fp8State) -> GemmState:
    """The arrays that a recipe asks for: amaxes and mailbox under delayed scaling."""
    if not isinstance(recipe, DelayedScaling):
        return GemmState()
    # Without somebody who fills its history dy must measure itself.
    dy = fp8.amax("dy", recipe) if fp8.tracked else None
    amaxes = Amaxes(fp8.amax("x", recipe), fp8.amax("kernel", recipe), dy)
    return GemmState(amaxes, fp8.mailbox[...])


def record(
    recipe: Recipe | None, fp8: Fp8State, amaxes: tuple[Array | None, Array | None]
) -> None:
    """Pushes the amaxes of a forward call; only delayed scaling keeps them."""
    x, kernel = amaxes
    if isinstance(recipe, DelayedScaling) and x is not None and kernel is not None:
        fp8.push(x, kernel)
