"""What a layer of attention is constructed with: sizes, and options with choices."""

import math
from typing import Any

import numpy as np

from te_flax.errors import message, part_of
from te_flax.functional.rotary import GROUP_METHODS, check_windows
from te_flax.layers import _arguments
from te_flax.layers._projections import LOW_RANK_SCOPES
from te_flax.layers.norm import NORMS
from te_flax.typing import Array

_CHOICES = {
    "attention_type": ("self", "cross"),
    "rotary_pos_emb_group_method": GROUP_METHODS,
    "low_rank_adaptation_scope": tuple(LOW_RANK_SCOPES),
    "layernorm_type": tuple(NORMS),
}


def head_counts(
    where: str, num_heads: int, head_dim: int, num_kv_heads: int | None
) -> list[int]:
    """Heads, their size and the heads of keys and values; raises ValueError."""
    kv = num_heads if num_kv_heads is None else num_kv_heads
    found = _arguments.sizes(
        where, num_heads=num_heads, head_dim=head_dim, num_kv_heads=kv
    )
    if found[0] % found[2]:
        rule, remedy = f"divide num_heads {num_heads}", "each serves as many queries"
        raise ValueError(message(where, "num_kv_heads", rule, kv, remedy))
    return found


def slopes_of(where: str, value: Any, heads: int) -> tuple[float, ...] | bool | None:
    """The slopes of ALiBi as constants, True for the published ones, or None."""
    if value is None or isinstance(value, bool):
        return value or None
    rule, got = f"be None, True or {heads} constants, one a head", repr(value)[:60]
    remedy = "use True for the published slopes"
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:  # a traced array too
        raise TypeError(message(where, "alibi_slopes", rule, got, remedy)) from error
    if found.shape != (heads,) or not np.isfinite(found).all():
        raise ValueError(message(where, "alibi_slopes", rule, got, remedy))
    return tuple(found.tolist())


def head_sizes(where: str, layer: Any, given: dict[str, Any]) -> tuple[int, int, int]:
    """Sets the numbers and sizes of heads; returns in, out and in_kv features."""
    features = given["in_features"]
    names = ("qkv_features", "out_features", "in_kv_features")
    others = {n: features if given[n] is None else given[n] for n in names}
    heads, n_in, joined, n_out, n_kv = _arguments.sizes(
        where, num_heads=given["num_heads"], in_features=features, **others
    )
    if joined % heads:
        rule, remedy = f"be a multiple of num_heads {heads}", "change one of them"
        raise ValueError(message(where, "qkv_features", rule, joined, remedy))
    layer.num_heads, layer.head_dim, layer.num_kv_heads = head_counts(
        where, heads, joined // heads, given["num_kv_heads"]
    )
    return n_in, n_out, n_kv


def check_options(where: str, layer: Any, given: dict[str, Any]) -> None:
    """Raises ValueError for unknown values, and for ones that do not fit together."""
    for name, allowed in _CHOICES.items():
        _arguments.choice(where, name, given[name], allowed)
    epsilon = given["layernorm_epsilon"]
    _arguments.number(where, "layernorm_epsilon", epsilon, 0, math.inf, "use 1e-6")
    check_windows(where, "rotary_pos_emb_windows", given["rotary_pos_emb_windows"])
    if given["enable_rotary_pos_emb"] and layer.head_dim % 2:
        rule, remedy = "give heads of even size for RoPE", "change qkv_features"
        got = f"head_dim {layer.head_dim}"
        raise ValueError(message(where, "qkv_features", rule, got, remedy))
    shared = given["fuse_qkv_params"] and given["attention_type"] == "self"
    if shared and layer.in_kv_features != layer.in_features:
        rule = "be in_features where attention_type is 'self'"
        remedy = "use attention_type='cross', or fuse_qkv_params=False"
        got = layer.in_kv_features
        raise ValueError(message(where, "in_kv_features", rule, got, remedy))
    layer.packed = shared and layer.num_heads == layer.num_kv_heads


def check_inputs(
    where: str, layer: Any, q: Array, k: Array | None, v: Array | None
) -> None:
    """Raises ValueError for inputs that the layer's projections do not read."""
    shapes = {"inputs_q": q, "inputs_k": k, "inputs_v": v}
    cross, fused = layer.attention_type == "cross", layer.fuse_qkv_params
    least = 3 if layer.transpose_batch_sequence else 2
    problems = {
        "inputs_k": (
            (
                k is None and v is not None,
                "be given with inputs_v",
                "or leave out both",
            ),
            (
                k is None and cross,
                "be given for cross attention",
                "build a 'self' layer",
            ),
            (
                k is not None and fused and not cross,
                "be left out of self attention with a shared kernel",
                "use attention_type='cross' or fuse_qkv_params=False",
            ),
        ),
        "inputs_v": (
            (
                v is not None and fused,
                "be left out where keys and values share a kernel",
                "use fuse_qkv_params=False",
            ),
        ),
    }
    kv = (layer.in_kv_features, "in_kv_features")
    sizes = {"inputs_q": (layer.in_features, "in_features"), "inputs_k": kv}
    for name, array in shapes.items():
        got = None if array is None else f"shape {array.shape}"
        for wrong, rule, remedy in problems.get(name, ()):
            if wrong:
                raise ValueError(message(where, name, rule, got, remedy))
        if array is None:
            continue
        if array.ndim < least:
            rule, remedy = f"have at least {least} dims", "tokens and features are two"
            raise ValueError(message(where, name, rule, got, remedy))
        with part_of(where, x=name):
            _arguments.float_array(where, array)
            _arguments.check_last(where, array, *sizes.get(name, kv))
