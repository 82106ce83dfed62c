"""Which recipe is active: a context that is part of the jit cache key."""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Sequence

import jax

from te_flax.errors import message
from te_flax.recipe.base import HIGH_PRECISION, HighPrecision, Recipe
from te_flax.recipe.presets import presets

__all__ = [
    "HIGH_PRECISION",
    "autocast",
    "check_recipe",
    "current_recipe",
    "is_recipe_supported",
    "local_amax_axes",
    "resolve",
]


@dataclasses.dataclass(frozen=True)
class _Scope:
    """What one ``with te.autocast(...)`` decides."""

    recipe: Recipe | None = None
    disabled: bool = False
    local_amax_axes: tuple[str, ...] = ()


class _Outer(enum.Enum):
    """The default of autocast's `recipe`: the recipe of the context around it."""

    RECIPE = enum.auto()


_SCOPE = jax.make_user_context(_Scope())


@contextlib.contextmanager
def autocast(
    recipe: Recipe | _Outer | None = _Outer.RECIPE,
    enabled: bool = True,
    *,
    local_amax_axes: Sequence[str] = (),
) -> Iterator[None]:
    """Runs the layers called inside under a recipe.

    What counts is the context around the *call* of a layer (for jitted code: while it
    is traced; the context is part of JAX's jit cache key, so a jitted function
    retraces under another recipe). Contexts nest and the innermost wins, except that
    nothing inside ``enabled=False`` is ever quantized. A layer built with
    ``recipe=`` follows its own recipe instead of the context.

    Args:
        recipe: a recipe, or None or ``te.HIGH_PRECISION`` for no recipe. Left out,
            the recipe of the context around this one goes on.
        enabled: False turns low precision off for everything inside.
        local_amax_axes: manual mesh axes (inside ``jax.shard_map``) whose devices
            hold different layers, so that amax is not maximised over them. Nested
            contexts add theirs.

    Yields:
        Nothing.

    Raises:
        TypeError: `recipe` is not a recipe.
        ValueError: `enabled` or `local_amax_axes` has the wrong type.

    Example:
        >>> import te_flax as te
        >>> with te.autocast(te.MXFP8BlockScaling()):
        ...     te.current_recipe()
        MXFP8BlockScaling(fp8_format='e4m3')
    """
    outer = _SCOPE.value
    chosen = outer.recipe if isinstance(recipe, _Outer) else recipe
    check_recipe("autocast", chosen)
    _check_arguments(enabled, local_amax_axes)
    axes = outer.local_amax_axes + tuple(
        axis for axis in local_amax_axes if axis not in outer.local_amax_axes
    )
    with _SCOPE(_Scope(chosen, outer.disabled or not enabled, axes)):
        yield


def current_recipe() -> Recipe | None:
    """Returns the recipe that a layer without ``recipe=`` would follow here.

    Returns:
        The recipe, or None where nothing is quantized.

    Example:
        >>> import te_flax as te
        >>> te.current_recipe() is None
        True
    """
    return resolve(None)


def resolve(layer_recipe: Recipe | None) -> Recipe | None:
    """Decides what a layer does: disabled, then its own recipe, then the context.

    Args:
        layer_recipe: the layer's ``recipe=``; None follows the context.

    Returns:
        The recipe to use, or None for high precision.

    Example:
        >>> resolve(HIGH_PRECISION) is None
        True
    """
    scope = _SCOPE.value
    if scope.disabled:
        return None
    recipe = scope.recipe if layer_recipe is None else layer_recipe
    return None if isinstance(recipe, HighPrecision) else recipe


def check_recipe(where: str, recipe: object) -> None:
    """Refuses anything but a recipe, None and ``te.HIGH_PRECISION``.

    Args:
        where: layer or function that received it as ``recipe=``.
        recipe: what arrived.

    Raises:
        TypeError: it is something else, the name or the class of a recipe say.

    Example:
        >>> check_recipe("DenseGeneral", None)
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        remedy = 'pass te.DelayedScaling(), or te.load_recipe("mxfp8") for a preset'
        rule = "be a recipe, None or te.HIGH_PRECISION"
        raise TypeError(message(where, "recipe", rule, repr(recipe), remedy))


def local_amax_axes() -> tuple[str, ...]:
    """The mesh axes over which amax is not maximised here."""
    return _SCOPE.value.local_amax_axes


def is_recipe_supported(name: str | Recipe) -> tuple[bool, str]:
    """Tells whether a recipe can run, and why or why not.

    Args:
        name: a preset's name, or a recipe.

    Returns:
        (True, how it runs) or (False, what is missing).

    Example:
        >>> is_recipe_supported("mxfp8")[0]
        True
    """
    if name == "none" or isinstance(name, HighPrecision):
        return True, "runs unquantized on every platform"
    if isinstance(name, Recipe) or name in presets():
        return True, (
            "runs on every platform: compiled kernels where they are built, the JAX "
            "reference elsewhere (te.kernel_report() tells which)"
        )
    return False, f"no such recipe: {name!r}; presets are {', '.join(presets())}"


def _check_arguments(enabled: object, axes: object) -> None:
    """Refuses anything but a bool and a sequence of axis names."""
    if not isinstance(enabled, bool):
        rule, remedy = "be True or False", "pass the recipe first, then enabled="
        raise ValueError(message("autocast", "enabled", rule, repr(enabled), remedy))
    names = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else [None]
    if not all(isinstance(axis, str) for axis in names):
        rule, remedy = "be a sequence of mesh axis names", 'write ("pp",)'
        raise ValueError(
            message("autocast", "local_amax_axes", rule, repr(axes), remedy)
        )
