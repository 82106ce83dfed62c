"""Rotary position embedding: a rotation of coordinate pairs by the position."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.typing import FLOATS, Array

GROUP_METHODS = ("consecutive", "alternate")
LAYOUTS = ("BTNH", "BNTH", "TBNH")
_WHERE = "rotary_embedding"


def rotary_embedding(
    x: Array,
    positions: Array | None = None,
    *,
    windows: Sequence[float] = (1, 10000),
    group_method: str = "consecutive",
    layout: str = "BTNH",
) -> Array:
    """Rotates pairs of coordinates: ``(a cos t - b sin t, b cos t + a sin t)``.

    The i-th of H / 2 pairs turns by ``t = position / (low (high / low)^(2 i / H))``,
    ``windows`` being (low, high). Computed in float32 and rounded once.

    Args:
        x: query or key, float ``[B, T, N, H]`` or as ``layout`` says, H even.
        positions: integers ``[T]`` or ``[B, T]``; None counts from 0.
        windows: smallest and largest time scale, both > 0.
        group_method: which coordinates are a pair: "consecutive" takes 2 i and 2 i + 1,
            "alternate" i and i + H / 2.
        layout: "BTNH", "BNTH" or "TBNH".

    Returns:
        An array like x.

    Raises:
        ValueError: H is odd, an option is unknown, or a shape does not fit.
        TypeError: x is no float array, or positions no integers.

    Example:
        >>> x = jnp.ones((1, 3, 2, 8))
        >>> rotary_embedding(x, jnp.array([4, 5, 6])).shape
        (1, 3, 2, 8)

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864), equation 34; "alternate" as
    in GPT-NeoX.
    """
    _check(x, windows, group_method, layout)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    half = x.shape[-1] // 2
    low, high = windows
    rates = (high / low) ** (-np.arange(half) / half) / low
    angle = _positions(x, positions, layout).astype(wide)[..., None]
    angle = angle * jnp.asarray(rates, wide)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = x.astype(wide)
    if group_method == "alternate":
        a, b = pairs[..., :half], pairs[..., half:]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = pairs[..., ::2], pairs[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def _positions(x: Array, positions: Array | None, layout: str) -> Array:
    """The positions, with the dims of x but the last."""
    batch, tokens = (x.shape[layout.index(dim)] for dim in "BT")
    found = jnp.arange(tokens) if positions is None else jnp.asarray(positions)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        rule, remedy = "be integers", "cast them first"
        raise TypeError(message(_WHERE, "positions", rule, found.dtype, remedy))
    if found.shape not in ((tokens,), (1, tokens), (batch, tokens)):
        rule = f"have shape {(tokens,)} or {(batch, tokens)}"
        remedy = "give each token of x one"
        raise ValueError(message(_WHERE, "positions", rule, found.shape, remedy))
    found = found.reshape(-1, tokens)
    if layout == "TBNH":
        found = found.T
    return jnp.expand_dims(found, layout.index("N"))


def _check(x: Array, windows: Sequence[float], group_method: str, layout: str) -> None:
    for name, value, choices in (
        ("group_method", group_method, GROUP_METHODS),
        ("layout", layout, LAYOUTS),
    ):
        if value not in choices:
            rule = f"be one of {', '.join(map(repr, choices))}"
            remedy = "choose one of these"
            raise ValueError(message(_WHERE, name, rule, repr(value), remedy))
    check_windows(_WHERE, "windows", windows)
    if x.dtype not in (*FLOATS, jnp.float64):
        rule, remedy = "be a float array", "cast it first"
        raise TypeError(message(_WHERE, "x", rule, x.dtype, remedy))
    if x.ndim != 4 or x.shape[-1] % 2:
        rule, got = f"be {layout} with an even last axis", f"shape {x.shape}"
        remedy = "pairs of coordinates are rotated"
        raise ValueError(message(_WHERE, "x", rule, got, remedy))


def check_windows(where: str, name: str, value: Sequence[float]) -> None:
    """Raises ValueError unless the value is a pair of positive numbers."""
    numbers = isinstance(value, Sequence) and all(
        isinstance(v, int | float | np.number) and 0 < v < float("inf") for v in value
    )
    if not numbers or len(value) != 2:
        rule, remedy = "be two numbers > 0", "use (1, 10000)"
        raise ValueError(message(where, name, rule, repr(value), remedy))
