"""The projections around attention: their kinds, initializers, axes and calls."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from te_flax import sharding
from te_flax.errors import message, part_of
from te_flax.layers import _arguments
from te_flax.layers.dense_general import DenseGeneral
from te_flax.layers.layer_norm_dense_general import LayerNormDenseGeneral
from te_flax.layers.norm import NORMS
from te_flax.typing import Array, Axes, Initializer

LOW_RANK_PARTS = ("qkv_proj", "output_proj", "mlp")
LOW_RANK_SCOPES = {"none": set(), "all": {*LOW_RANK_PARTS}}
LOW_RANK_SCOPES |= {part: {part} for part in LOW_RANK_PARTS}
LOW_RANK_SCOPES |= {f"exclude_{p}": {*LOW_RANK_PARTS} - {p} for p in LOW_RANK_PARTS}
# Arguments of DenseGeneral that each projection gets under another name.
OWN_AXES = ("input_axes", "dot_input_axes", "kernel_axes", "bias_axes")
_DIMS = ("heads", "head_dim")
_NORM = (
    "layernorm_type",
    "zero_centered_gamma",
    "scale_init",
    "scale_axes",
    "ln_bias_init",
    "ln_bias_axes",
    "dot_input_axes",
)


class Projected(NamedTuple):
    """What attention reads.

    Attributes:
        query: ``[*batch, T, N, H]``.
        key: ``[*batch, S, K, H]``.
        value: likewise.
        normed: norm(inputs_q), or inputs_q where no norm is.
    """

    query: Array
    key: Array
    value: Array
    normed: Array


def make_projections(
    layer: Any, given: dict[str, Any], low_rank: bool, common: dict[str, Any]
) -> None:
    """Gives a layer ``qkv``, or ``query`` and ``kv``, or ``query``, ``key``, ``value``.

    Args:
        layer: gets them; its ``packed`` and ``fuse_qkv_params`` say which.
        given: the layer's arguments.
        low_rank: whether they have low-rank additions.
        common: arguments of all.
    """
    options = common | {"enable_low_rank_adaptation": low_rank}
    make = first = functools.partial(
        DenseGeneral,
        input_axes=layer.input_axes,
        dot_input_axes=given["dot_input_axes"],
        **options,
    )
    if layer.input_layernorm:
        shared = not layer.packed and layer.attention_type == "self"
        first = functools.partial(
            LayerNormDenseGeneral,
            epsilon=given["layernorm_epsilon"],
            return_layernorm_output=shared or layer.return_layernorm_output,
            layernorm_input_axes=layer.input_axes,
            **{name: given[name] for name in _NORM},
            **options,
        )
    init = query_init = given["kernel_init"]
    if given["scaled_query_init"]:
        query_init = scaled_init(init, layer.head_dim**-0.5)
    build = functools.partial(_build, layer, given)
    n, h, k = layer.num_heads, layer.head_dim, layer.num_kv_heads
    if layer.packed:
        layer.qkv = build(
            first, "qkv", layer.in_features, (n, h), query_init, init, init
        )
        return
    layer.query = build(first, "qkv", layer.in_features, (n, h), query_init)
    if layer.fuse_qkv_params:
        layer.kv = build(make, "kv", layer.in_kv_features, (k, h), init, init)
        return
    layer.key = build(make, "kv", layer.in_kv_features, (k, h), init)
    layer.value = build(make, "kv", layer.in_kv_features, (k, h), init)


def _build(
    layer: Any,
    given: dict[str, Any],
    make: Any,
    kind: str,
    features: int,
    heads: tuple[int, int],
    *inits: Initializer,
) -> DenseGeneral:
    """One map, of as many parts as there are initializers."""
    where, parts = type(layer).__name__, len(inits)
    columns = parts * math.prod(heads)
    axes = {
        name: _joined(where, f"{kind}_{name}", given[f"{kind}_{name}"], dims, parts)
        for name, dims in (("kernel_axes", ("in", *_DIMS)), ("bias_axes", _DIMS))
    }
    with part_of(where, epsilon="layernorm_epsilon"):
        return make(
            features,
            heads if parts == 1 else (parts, *heads),
            kernel_init=inits[0] if parts == 1 else joint_init(*inits, columns=columns),
            **axes,
        )


def make_out(
    layer: Any, given: dict[str, Any], low_rank: bool, common: dict[str, Any]
) -> None:
    """Gives a layer ``out``."""
    options: dict[str, Any] = common | {"enable_low_rank_adaptation": low_rank}
    options["bias_init"] = given["out_bias_init"] or given["bias_init"]
    names: dict[str, str] = {n: f"out_{n}" for n in ("kernel_axes", "bias_axes")}
    with part_of(type(layer).__name__, input_axes="attention_axes", **names):
        layer.out = DenseGeneral(
            (layer.num_heads, layer.head_dim),
            layer.out_features,
            axis=(-2, -1),
            kernel_init=given["out_kernel_init"] or given["kernel_init"],
            input_axes=layer.attention_axes,
            **(options | {name: given[own] for name, own in names.items()}),
        )


def make_norms(layer: Any, given: dict[str, Any]) -> None:
    """Gives a layer the norms of queries and keys, or None."""
    layer.query_ln = layer.key_ln = nnx.data(None)
    if not given["normalize_qk"]:
        return
    kind = given["layernorm_type"]
    names = ("zero_centered_gamma", "scale_init", "dtype", "param_dtype", "rngs")
    options: dict[str, Any] = {name: given[name] for name in names}
    options["epsilon"] = given["layernorm_epsilon"]
    if kind == "layernorm":
        options["use_bias"] = False
    with part_of(type(layer).__name__, epsilon="layernorm_epsilon"):
        layer.query_ln = NORMS[kind](layer.head_dim, **options)
        layer.key_ln = NORMS[kind](layer.head_dim, **options)


def project(layer: Any, inputs: tuple, out_sharding: Any) -> Projected:
    """Runs the projections of a layer.

    Args:
        layer: has made them with :func:`make_projections`.
        inputs: inputs_q, inputs_k (None is norm(inputs_q)) and inputs_v (None is
            inputs_k).
        out_sharding: wanted of all three.
    """
    q, k, v = inputs
    if layer.packed:
        y, h = _first(layer.qkv, q, out_sharding)
        y = checkpoint_name(y, "combined_qkv_proj")
        query, key, value = _parts(y)
        return Projected(query, key, value, h)
    query, h = _first(layer.query, q, out_sharding)
    query = checkpoint_name(query, "query_proj")
    k = h if k is None else k
    if layer.fuse_qkv_params:
        y = layer.kv(k, out_sharding=out_sharding)
        y = checkpoint_name(y, "combined_kv_proj")
        key, value = _parts(y)
        return Projected(query, key, value, h)
    key = layer.key(k, out_sharding=out_sharding)
    value = layer.value(k if v is None else v, out_sharding=out_sharding)
    key = checkpoint_name(key, "key_proj")
    return Projected(query, key, checkpoint_name(value, "value_proj"), h)


def _parts(y: Array) -> list[Array]:
    """Slices of y [.., parts, N, H], whose gradients are joined in one pass."""
    axis = y.ndim - 3
    parts = jax.lax.split(y, (1,) * y.shape[axis], axis)
    return [jnp.squeeze(part, axis) for part in parts]


def project_out(layer: Any, context: Array, asked: Any) -> Array:
    """The last projection, placed as the inputs are.

    Args:
        layer: has made it with :func:`make_out`.
        context: the result of attention.
        asked: sharding wanted of the result, or None.
    """
    placed = sharding.Placement()
    if asked is None:
        axes, turned = layer.input_axes, layer.transpose_batch_sequence
        axes = _arguments.input_axes(type(layer).__name__, axes, 3, turned)
        placed = sharding.placement(axes, 3)
        asked = placed.spec
    y = layer.out(context, out_sharding=asked)
    return sharding.Placement(auto=placed.auto)(checkpoint_name(y, "out_proj"))


def scaled_init(init: Initializer, scale: float) -> Initializer:
    """The same initializer with its result multiplied."""

    def initialize(key: Array, shape: tuple, dtype: Any) -> Any:
        value = init(key, shape, dtype)
        return _with_array(value, lambda a: a * jnp.asarray(scale, a.dtype))

    return initialize


def joint_init(*inits: Initializer, columns: int) -> Initializer:
    """Initializes the columns of a kernel part by part, each as a kernel of its own.

    What has another number of columns, a low-rank factor, is one part.
    """

    def initialize(key: Array, shape: tuple, dtype: Any) -> Any:
        if shape[-1] != columns:
            return inits[-1](key, shape, dtype)
        keys = jax.random.split(key, len(inits))
        each = (*shape[:-1], columns // len(inits))
        parts = [init(k, each, dtype) for init, k in zip(inits, keys, strict=True)]
        rest = [p.raw_value if _is_metadata(p) else p for p in parts[1:]]
        return _with_array(parts[0], lambda a: jnp.concatenate([a, *rest], -1))

    return initialize


def _with_array(value: Any, f: Callable[[Array], Array]) -> Any:
    """Applies f to what an initializer returned, which may carry metadata."""
    if not _is_metadata(value):
        return f(value)
    value.raw_value = f(value.raw_value)
    return value


def _is_metadata(value: Any) -> bool:
    return isinstance(value, nnx.VariableMetadata)


def _joined(
    where: str, name: str, axes: Axes | None, dims: tuple[str, ...], parts: int
) -> Axes | None:
    """Logical axes with one more, not sharded, where several maps share a kernel."""
    if axes is None:
        return None
    if len(axes) != len(dims):
        rule = f"name each of the {len(dims)} dims ({', '.join(dims)})"
        remedy = "use None for dims that are not sharded"
        raise ValueError(message(where, name, rule, axes, remedy))
    at = len(dims) - len(_DIMS)
    return tuple(axes) if parts == 1 else (*axes[:at], None, *axes[at:])


def _first(layer: Any, x: Array, out_sharding: Any) -> tuple[Array, Array]:
    """The map of inputs_q, and what it read."""
    y = layer(x, out_sharding=out_sharding)
    if isinstance(layer, LayerNormDenseGeneral) and layer.return_layernorm_output:
        return y
    return y, x
