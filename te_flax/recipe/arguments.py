"""Checks and binding of the arguments of the gradient transforms."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from te_flax.errors import message

Argnum = int | nnx.DiffState


def check_arguments(where: str, f: Any, argnums: Any) -> None:
    """Refuses what is no function and what are no positions."""
    if f is not None and not callable(f):
        rule, remedy = "be a function", "pass the loss, then call the result"
        raise TypeError(message(where, "f", rule, repr(f), remedy))
    single = not isinstance(argnums, Sequence) or isinstance(argnums, str)
    entries = [argnums] if single else argnums
    if not all(isinstance(entry, int | nnx.DiffState) for entry in entries):
        rule = "be an int, an nnx.DiffState or a sequence of these"
        remedy = "give the position of the model among the arguments"
        raise TypeError(message(where, "argnums", rule, repr(argnums), remedy))


def positional_arguments(f: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Moves keywords that name positional parameters to their positions."""
    if not kwargs:
        return args, kwargs
    bound = inspect.signature(f).bind(*args, **kwargs)
    return bound.args, bound.kwargs
