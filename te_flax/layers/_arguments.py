"""Checks of what layers are constructed with."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.typing import FLOATS


def features(where: str, **named: int | Sequence[int]) -> list[tuple[int, ...]]:
    """Returns sizes of axes as tuples, or raises ValueError."""
    found = []
    for name, value in named.items():
        sizes = _ints(value)
        if not sizes or min(sizes) < 1:
            rule = "be a positive int or a tuple of them"
            remedy = "give the size of each axis"
            raise ValueError(message(where, name, rule, repr(value), remedy))
        found.append(sizes)
    return found


def axes(where: str, value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Returns ``count`` axes as a tuple, or raises ValueError."""
    found = _ints(value)
    if found is None or len(found) != count:
        rule = f"name {count} axes, one for each of in_features"
        remedy = "give both the same length"
        raise ValueError(message(where, "axis", rule, repr(value), remedy))
    return found


def check_float_dtypes(where: str, **dtypes: Any) -> None:
    """Raises TypeError unless each is None or names a float dtype."""
    for name, value in dtypes.items():
        try:
            ok = value is None or jnp.dtype(value) in (*FLOATS, jnp.float64)
        except TypeError:
            ok = False
        if not ok:
            rule = "be None or one of float32, bfloat16 and float16"
            remedy = "choose a recipe for lower precision"
            raise TypeError(message(where, name, rule, repr(value), remedy))


def precision(where: str, value: Any) -> str:
    """Returns the name of a jax precision; None is the backend's default."""
    name = "default" if value is None else str(value).lower().split(".")[-1]
    if name not in ("default", "high", "highest"):
        rule = "be None, 'default', 'high' or 'highest'"
        remedy = "use one of them, or jax.lax.Precision"
        raise ValueError(message(where, "precision", rule, repr(value), remedy))
    return name


def _ints(value: Any) -> tuple[int, ...] | None:
    """A tuple of ints, or None for anything else."""
    values = (value,) if isinstance(value, (int, np.integer)) else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    ok = all(isinstance(v, (int, np.integer)) for v in values)
    if not ok or any(isinstance(v, (bool, np.bool_)) for v in values):
        return None
    return tuple(int(v) for v in values)
