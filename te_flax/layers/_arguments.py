"""Checks of what layers are constructed with."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from te_flax.errors import check_float64, message
from te_flax.typing import FLOATS, Axes


class _Kind(NamedTuple):
    """What the type of an option must be."""

    rule: str
    remedy: str
    accepts: Callable[[Any], bool]


def _are_axes(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str) or not isinstance(value, Sequence | PartitionSpec):
        return False
    return all(axis is None or isinstance(axis, str | tuple) for axis in value)


_FLAG = _Kind(
    "be True or False",
    "pass a bool",
    lambda value: isinstance(value, bool | np.bool_),
)
_NAME = _Kind("be a str", "give it a name", lambda value: isinstance(value, str))
_NAME_OR_NONE = _Kind(
    "be a str or None",
    "use None for the usual name",
    lambda value: value is None or isinstance(value, str),
)
_AXES = _Kind(
    "be None or a tuple with a logical axis, or None, for each dim",
    'write ("embed",) for one dim',
    _are_axes,
)
_FLAGS = (
    "apply_residual_connection_post_layernorm",
    "decode",
    "enable_layernorm",
    "enable_low_rank_adaptation",
    "enable_relative_embedding",
    "enable_rotary_pos_emb",
    "float32_attention_logits",
    "float32_logits",
    "fuse_qkv_params",
    "input_layernorm",
    "normalize_qk",
    "output_layernorm",
    "return_layernorm_output",
    "scale_attn_logits",
    "scaled_query_init",
    "transpose_batch_sequence",
    "use_bias",
    "use_scale",
    "zero_centered_gamma",
)
_NAMES = (
    "context_checkpoint_name",
    "dropout_rng_name",
    "ffn1_ckpt_name",
    "ffn2_ckpt_name",
    "intermediate_dropout_rng_name",
)
_KINDS = dict.fromkeys(_FLAGS, _FLAG) | dict.fromkeys(_NAMES, _NAME)
_KINDS["quantization_checkpoint_name"] = _NAME_OR_NONE


def check_options(where: str, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for a flag, a name or logical axes of another type.

    Args:
        where: the layer.
        arguments: all that its constructor got, ``locals()`` at its start; the kind
            of an option follows from its name.
    """
    for name, value in arguments.items():
        kind = _AXES if "_axes" in name else _KINDS.get(name)
        if kind is not None and not kind.accepts(value):
            raise TypeError(message(where, name, kind.rule, repr(value), kind.remedy))


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


def sizes(where: str, **named: int) -> list[int]:
    """Returns the size of one axis each, or raises ValueError."""
    for name, value in named.items():
        found = _ints(value)
        if found is None or isinstance(value, Sequence) or found[0] < 1:
            rule, remedy = "be a positive int", "give the size of one axis"
            raise ValueError(message(where, name, rule, repr(value), remedy))
    return [int(value) for value in named.values()]


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


def number(
    where: str, name: str, value: Any, low: float, high: float, remedy: str
) -> float:
    """Returns a float of [low, high), or raises ValueError."""
    ok = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not ok or not low <= value < high:
        rule = f"be a finite number >= {low:g}" + (
            "" if high == math.inf else f" and < {high:g}"
        )
        raise ValueError(message(where, name, rule, repr(value), remedy))
    return float(value)


def epsilon(where: str, value: Any) -> float:
    """Returns the epsilon of a norm, or raises ValueError."""
    return number(where, "epsilon", value, 0, math.inf, "use 1e-6")


def choice(where: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """Returns one of the strings, or raises ValueError."""
    if value not in choices:
        rule = f"be one of {', '.join(map(repr, choices))}"
        raise ValueError(message(where, name, rule, repr(value), "choose one of these"))
    return value


def float_array(where: str, x: Any) -> Any:
    """Returns x as a JAX array, or raises TypeError unless it holds floats."""
    check_float64(where, x=x)
    dtype = getattr(x, "dtype", None)
    if dtype not in (*FLOATS, jnp.float64):
        got = type(x).__name__ if dtype is None else dtype
        rule = "be a float32, bfloat16 or float16 array"
        raise TypeError(message(where, "x", rule, got, "cast it first"))
    return jnp.asarray(x)


def unpromoted(x: Any, px: Any) -> Any:
    """What a norm reads: x as it came, which it widens itself; no op has float64."""
    return px if px.dtype == jnp.float64 else x


def check_last(where: str, x: Any, features: int, name: str) -> None:
    """Raises ValueError unless the last axis of x holds the features."""
    if x.ndim < 1 or x.shape[-1] != features:
        rule = f"hold {name} {features} in its last axis"
        remedy = f"change {name} or the input"
        raise ValueError(message(where, "x", rule, f"shape {x.shape}", remedy))


def input_axes(
    where: str, axes: Axes | None, ndim: int, transposed: bool, name="input_axes"
) -> Axes | None:
    """The logical axes of x in its own order, after checking their number.

    They are given in batch-first order and turned round for sequence-first inputs.
    """
    if axes is not None and len(axes) != ndim:
        rule = f"name each of the {ndim} dims of x"
        remedy = "use None for dims that are not sharded"
        raise ValueError(message(where, name, rule, axes, remedy))
    if axes is None or not transposed or ndim < 2:
        return axes
    return (axes[1], axes[0], *axes[2:])


def ints(where: str, name: str, value: Any) -> tuple[int, ...]:
    """Returns a tuple of ints, or raises ValueError."""
    found = _ints(value)
    if found is None or isinstance(value, int | np.integer):
        rule, remedy = "be a tuple of ints", "write (1,) for one"
        raise ValueError(message(where, name, rule, repr(value), remedy))
    return found


def _ints(value: Any) -> tuple[int, ...] | None:
    """A tuple of ints, or None for anything else."""
    values = (value,) if isinstance(value, (int, np.integer)) else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    ok = all(isinstance(v, (int, np.integer)) for v in values)
    if not ok or any(isinstance(v, (bool, np.bool_)) for v in values):
        return None
    return tuple(int(v) for v in values)
