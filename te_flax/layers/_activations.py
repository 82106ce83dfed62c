"""What a feed-forward block may put between its two GEMMs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from te_flax.errors import message
from te_flax.functional.activation import ACTIVATIONS, PLAIN
from te_flax.functional.config import ActivationConfig
from te_flax.layers import _arguments
from te_flax.typing import Array

Activation = str | Callable[[Array], Array]
CLAMPED = ("clamped_silu", "clamped_linear")
_WHERE = "LayerNormMLP"


def checked(value: Any) -> tuple[Activation, ...]:
    """The activations as a tuple, each a known name or a callable."""
    names = (value,) if isinstance(value, str) or callable(value) else value
    known = (*PLAIN, "clamped_silu", "clamped_linear")
    ok = isinstance(names, Sequence) and len(names) > 0
    if not ok or not all(callable(f) or f in known for f in names):
        rule = f"be names of {', '.join(known)}, or callables"
        remedy = 'write ("gelu",), or ("silu", "linear") for a gated one'
        raise ValueError(message(_WHERE, "activations", rule, repr(value), remedy))
    return tuple(names)


def config(names, params: Mapping[str, float]) -> ActivationConfig | None:
    """The fused activation, or None where no op computes it."""
    clamped = [f for f in names if isinstance(f, str) and f.startswith("clamped")]
    if clamped and names != CLAMPED:
        rule, got = f"be {CLAMPED}, where one is clamped", repr(names)
        raise ValueError(
            message(_WHERE, "activations", rule, got, "use both, in this order")
        )
    if params and not clamped:
        rule, remedy = f"be empty but for {CLAMPED}", "leave it out"
        got = repr(params)
        raise ValueError(message(_WHERE, "activation_params", rule, got, remedy))
    for name, value in dict(params).items():
        allowed = ("limit", "alpha", "offset")
        _arguments.choice(_WHERE, "activation_params", name, allowed)
        low = 0 if name == "limit" else -math.inf
        remedy = "give a finite number"
        _arguments.number(_WHERE, name, value, low, math.inf, remedy)
    if not all(isinstance(f, str) for f in names) or ",".join(names) not in ACTIVATIONS:
        return None
    return dataclasses.replace(ActivationConfig(name=",".join(names)), **dict(params))
