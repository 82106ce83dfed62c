"""The one format of every error that te_flax raises, and the checks that use it."""

import jax
import numpy as np


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
