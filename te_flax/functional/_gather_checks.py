"""Checks of what :func:`te_flax.allgather_rms_norm` is given."""

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from te_flax.errors import check_float64, message
from te_flax.functional._row_gather import RowGather
from te_flax.functional.config import NormConfig
from te_flax.ops import _choice
from te_flax.ops._gather_order import OUTPUTS
from te_flax.typing import FLOATS

WHERE = "allgather_rms_norm"
BLOCK = 32


def refuse(argument: str, rule: str, got: object, remedy: str) -> ValueError:
    """The error of a value that does not fit."""
    return ValueError(message(WHERE, argument, rule, got, remedy))


def arrays(x: Any, gamma: Any) -> None:
    """Refuses what is no matrix of rows with a factor for each feature."""
    check_float64(WHERE, x=x, gamma=gamma)
    for name, array in (("x", x), ("gamma", gamma)):
        dtype = getattr(array, "dtype", None)
        if dtype not in FLOATS:
            rule, remedy = "be float32, bfloat16 or float16", "cast it first"
            got = type(array).__name__ if dtype is None else dtype
            raise TypeError(message(WHERE, name, rule, got, remedy))
    if x.ndim < 2 or x.shape[-1] == 0:
        rule, remedy = "have dims [rows, .., features >= 1]", "reshape it"
        raise refuse("x", rule, f"shape {x.shape}", remedy)
    if gamma.shape != x.shape[-1:]:
        rule, remedy = f"have shape {x.shape[-1:]}", "one entry for each feature of x"
        raise refuse("gamma", rule, f"shape {gamma.shape}", remedy)


def norm(epsilon: float, weight_offset: float) -> NormConfig:
    """Refuses numbers that float32 does not hold, and reads the kernel rules."""
    for name, value in (("epsilon", epsilon), ("weight_offset", weight_offset)):
        if not isinstance(value, numbers.Real):
            rule, remedy = "be a number known while tracing", "pass a float"
            raise TypeError(message(WHERE, name, rule, repr(value), remedy))
    largest = float(np.finfo(np.float32).max)
    if not 0 <= epsilon <= largest:
        rule = "be finite in float32 and >= 0"
        raise refuse("epsilon", rule, epsilon, "use 1e-6")
    if not abs(weight_offset) <= largest:
        rule, remedy = "be finite in float32", "use 1 for a zero-centered gamma"
        raise refuse("weight_offset", rule, weight_offset, remedy)
    return NormConfig(
        kind="rmsnorm",
        epsilon=float(epsilon),
        zero_centered_gamma=weight_offset == 1,
        impl=_choice.current(),
    )


def outputs(
    features: int,
    quantize: str | None,
    wanted: Sequence[str] | None,
    formats: Iterable[str],
) -> tuple[str, ...]:
    """Returns the results asked for, in their order; refuses unknown ones."""
    if quantize is not None and quantize not in tuple(formats):
        rule = f"be None or one of {', '.join(map(repr, formats))}"
        raise refuse("quantize", rule, repr(quantize), "choose one")
    if wanted is None:
        wanted = [name for name in OUTPUTS if name != "quantized" or quantize]
    several = isinstance(wanted, Iterable) and not isinstance(wanted, str)
    named = tuple(wanted) if several else ()
    if not named or any(name not in OUTPUTS for name in named):
        rule = f"be some of {OUTPUTS}"
        raise refuse("outputs", rule, repr(wanted), "name what you use")
    if "quantized" in named and quantize is None:
        rule = "leave out 'quantized' without quantize="
        raise refuse("outputs", rule, named, "choose quantize='mxfp8'")
    if "quantized" in named and features % BLOCK:
        rule, remedy = f"have features in whole blocks of {BLOCK}", "pad the features"
        raise refuse("x", rule, f"{features} features", remedy)
    return tuple(name for name in OUTPUTS if name in named)


def rows(
    axis: str,
    size: int,
    shard: int,
    group_size: int | None,
    counts: Sequence[int] | None,
) -> RowGather:
    """Refuses groups and row counts that do not fit the axis.

    Args:
        axis: the mesh axis.
        size: its number of devices.
        shard: rows of each device's array.
        group_size: as the user gave it.
        counts: as the user gave them.
    """
    group = size if group_size is None else group_size
    if isinstance(group, bool) or not isinstance(group, int | np.integer):
        rule, remedy = "be an int or None", "use None for the whole axis"
        raise TypeError(message(WHERE, "group_size", rule, repr(group), remedy))
    if group < 1 or size % group:
        rule = f"divide the {size} devices of {axis!r}"
        raise refuse("group_size", rule, group, "choose a divisor, or None for all")
    if counts is not None:
        counts = _counts(axis, size, shard, int(group), counts)
    return RowGather(axis=axis, size=size, group=int(group), shard=shard, rows=counts)


def _counts(axis: str, size: int, shard: int, group: int, given) -> tuple[int, ...]:
    remedy = "give the number of valid rows of each device"
    try:
        found = tuple(map(operator.index, given))
    except TypeError as error:  # traced numbers too: they decide the shape
        rule = "be ints known while tracing"
        raise TypeError(message(WHERE, "rows", rule, repr(given), remedy)) from error
    if len(found) != size or not all(0 <= n <= shard for n in found):
        rule = f"be {size} numbers, one for each device of {axis!r}, of 0 to {shard}"
        raise refuse("rows", rule, found, remedy)
    sums = [sum(found[i : i + group]) for i in range(0, size, group)]
    if len(set(sums)) > 1:
        rule = f"add up to the same in each group of {group}"
        remedy = "pad the groups to one number of rows"
        raise refuse("rows", rule, f"{found}, sums {sums}", remedy)
    return found


def shard_rows(x: Any, cuts: int, size: int, counts: Any) -> int:
    """Returns the number of rows on a device; refuses what is not cut evenly.

    Args:
        x: all rows.
        cuts: in how many parts they are.
        size: how many of them are along the axis.
        counts: of valid rows, as the user gave them.
    """
    if x.shape[0] % cuts:
        rule = f"have rows that {cuts} devices divide"
        remedy = "pad the shards to one length and pass rows="
        raise refuse("x", rule, f"shape {x.shape}", remedy)
    if counts is not None and cuts > size:
        rule = "be None where other mesh axes cut the rows too"
        raise refuse("rows", rule, counts, "call it inside jax.shard_map over them")
    return x.shape[0] // cuts
