"""What all recipes share."""

import dataclasses
import math
from typing import Any, NamedTuple

from te_flax.errors import message
from te_flax.quantize.per_tensor import FLOAT32_MAX
from te_flax.quantize.quantizer import Identity, Quantizer


class Quantizers(NamedTuple):
    """The quantizer of each operand of a GEMM layer."""

    x: Quantizer
    kernel: Quantizer
    dy: Quantizer


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the GEMMs of a layer represent their operands.

    Recipes are frozen and hashable: the active one is part of JAX's jit cache key.
    A subclass declares its fields with defaults and checks them in `__post_init__`.

    Attributes:
        fp8_format: ``"e4m3"``, or ``"hybrid"``: e4m3 for x and the kernel, e5m2 for dy.
        split_accumulator: (forward, dgrad, wgrad), True where partial sums are moved
            to float32 registers.

    Example:
        >>> import te_flax as te
        >>> te.DelayedScaling(margin=1) == te.DelayedScaling(margin=1)
        True
    """

    # Without annotations: an annotated name would come before a subclass's fields.
    fp8_format = "e4m3"
    split_accumulator = (True, True, True)

    @property
    def formats(self) -> tuple[str, str, str]:
        """The element formats of x, kernel and dy."""
        return "e4m3", "e4m3", "e5m2" if self.fp8_format == "hybrid" else "e4m3"

    def quantizers(self) -> Quantizers:
        """The quantizers of x, kernel and dy."""
        return Quantizers(Identity(), Identity(), Identity())

    def operands(self) -> Quantizers:
        """The quantizers as this machine's products read their copies.

        Read once, where a layer is called: both passes then agree.
        """
        return self.quantizers()


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """Never quantize; the recipe behind ``te.HIGH_PRECISION``.

    As a layer's ``recipe=`` it keeps that layer in high precision under any
    context; in ``te.autocast`` it is the context of no recipe.
    """


HIGH_PRECISION = HighPrecision()


def check(recipe: Recipe, field: str, ok: bool, rule: str, remedy: str) -> None:
    """Raises ValueError in the one error format unless `ok`."""
    if not ok:
        got = repr(getattr(recipe, field))
        raise ValueError(message(type(recipe).__name__, field, rule, got, remedy))


def check_choice(recipe: Recipe, field: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the field is one of the strings `choices`."""
    names = ", ".join(repr(name) for name in choices)
    value = getattr(recipe, field)
    ok = isinstance(value, str) and value in choices
    check(recipe, field, ok, f"be one of {names}", "choose one of these")


def check_flag(recipe: Recipe, field: str) -> None:
    """Raises ValueError unless the field is a bool."""
    ok = isinstance(getattr(recipe, field), bool)
    check(recipe, field, ok, "be True or False", "write a Python or TOML boolean")


def check_integer(
    recipe: Recipe, field: str, low: int, high: int | None, remedy: str
) -> None:
    """Raises ValueError unless the field is an int of [low, high]."""
    value = getattr(recipe, field)
    ok = isinstance(value, int) and not isinstance(value, bool)
    ok = ok and low <= value and (high is None or value <= high)
    rule = f"be an integer >= {low}" + ("" if high is None else f" and <= {high}")
    check(recipe, field, ok, rule, remedy)


def check_amax_epsilon(recipe: Any) -> None:
    """Makes amax_epsilon a float; ValueError unless it is one, finite and >= 0."""
    epsilon = recipe.amax_epsilon
    ok = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    ok = ok and math.isfinite(epsilon) and epsilon >= 0
    check(recipe, "amax_epsilon", ok, "be a finite number >= 0", "use 0.0 for none")
    fits = epsilon <= FLOAT32_MAX
    check(recipe, "amax_epsilon", fits, f"be <= {FLOAT32_MAX}", "use 0.0 for none")
    object.__setattr__(recipe, "amax_epsilon", float(epsilon))


def check_split_accumulator(recipe: Recipe) -> None:
    """Raises ValueError unless split_accumulator is a tuple of three bools."""
    value = recipe.split_accumulator
    ok = isinstance(value, tuple) and len(value) == 3
    ok = ok and all(isinstance(entry, bool) for entry in value)
    rule = "be a tuple of three booleans (forward, dgrad, wgrad)"
    check(recipe, "split_accumulator", ok, rule, "use (False, True, True)")
