"""The one format of every error that te_flax raises, and the checks that use it."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import jax
import numpy as np

# The layers whose parts are being built, the outermost first.
_WHOLES: contextvars.ContextVar[tuple[tuple[str, Mapping[str, str]], ...]]
_WHOLES = contextvars.ContextVar("te_flax_wholes", default=())


@contextlib.contextmanager
def part_of(where: str, **names: str) -> Iterator[None]:
    """Makes the errors of a layer's parts name the layer and the argument it was given.

    Args:
        where: the layer that builds its parts inside.
        **names: argument of a part -> the layer's argument that it comes from, where
            the two differ.

    Yields:
        Nothing.

    Example:
        >>> with part_of("LayerNormMLP", kernel_axes="kernel_axes_1"):
        ...     message("DenseGeneral", "kernel_axes", "be None", 3, "leave it out")
        'LayerNormMLP: kernel_axes_1 must be None, got 3; leave it out'
    """
    token = _WHOLES.set((*_WHOLES.get(), (where, names)))
    try:
        yield
    finally:
        _WHOLES.reset(token)


def message(where: str, argument: str, rule: str, got: object, remedy: str) -> str:
    """Returns ``<where>: <argument> must <rule>, got <got>; <remedy>``.

    Args:
        where: layer, op or function that received the argument.
        argument: name of the argument as the user wrote it.
        rule: what the argument must do or be, without "must".
        got: the value that arrived.
        remedy: what the user can do about it.

    Returns:
        The text of the error.

    Example:
        >>> message("DelayedScaling", "margin", "be >= 0", -1, "use 0 for no margin")
        'DelayedScaling: margin must be >= 0, got -1; use 0 for no margin'
    """
    for whole, names in reversed(_WHOLES.get()):
        where, argument = whole, names.get(argument, argument)
    return f"{where}: {argument} must {rule}, got {got}; {remedy}"


def check_float64(where: str, **arrays: object) -> None:
    """Refuses 64-bit host arrays that JAX would silently narrow.

    Args:
        where: layer, op or function that received the arrays.
        **arrays: the operands by name, before any conversion to a JAX array.

    Raises:
        TypeError: an operand is float64 while ``jax_enable_x64`` is off.

    Example:
        >>> check_float64("dense", x=np.ones(3, np.float32))
    """
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return
    for name, array in arrays.items():
        if getattr(array, "dtype", None) == np.float64:
            raise TypeError(
                message(
                    where,
                    name,
                    "be float32, bfloat16 or float16 while jax_enable_x64 is off",
                    "float64",
                    "cast it with astype(np.float32) or set jax_enable_x64",
                )
            )
