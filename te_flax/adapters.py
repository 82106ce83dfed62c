"""Which layer of te_flax takes the place of a layer of flax.nnx, and where none can."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from te_flax.layers.attention import DotProductAttention
from te_flax.layers.dense_general import DenseGeneral
from te_flax.layers.einsum import Einsum
from te_flax.layers.kv_cache import CACHED
from te_flax.layers.layer_norm_dense_general import LayerNormDenseGeneral
from te_flax.layers.multi_head_attention import MultiHeadAttention
from te_flax.layers.norm import LayerNorm, RMSNorm
from te_flax.paths import places, variables
from te_flax.recipe.base import Recipe
from te_flax.recipe.state import Fp8Rounding, Fp8Statistics
from te_flax.typing import FLOATS

NORMS: dict[type, type] = {nnx.LayerNorm: LayerNorm, nnx.RMSNorm: RMSNorm}
"""The norms of flax.nnx and the layers that replace them."""

FUSED = LayerNormDenseGeneral
"""The layer that replaces a norm and the linear layer behind it."""

# They pick the variables of the layer inside by name, "kernel": the amax history of
# the kernel has this name too.
_BY_NAME = (nnx.WeightNorm, nnx.SpectralNorm)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a converted layer was before.

    Attributes:
        kind: its class.
        attributes: its attributes, except its variables.
    """

    kind: type
    attributes: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user chose for one layer.

    Attributes:
        recipe: the layer's ``recipe=``.
        amax_history_len: the layer's ``amax_history_len=``.
        seed: of its stochastic rounding; parameters are replaced afterwards.
    """

    recipe: Recipe | None = None
    amax_history_len: int | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Adapter:
    """How one class of flax.nnx is replaced.

    Attributes:
        refuse: returns why a layer cannot be replaced, or None.
        construct: makes the new layer; its parameters are replaced afterwards.
        parameters: names of the variables that both layers have.
        gemm: whether the layer has a GEMM.
        children: attributes that both have and that are converted by themselves.
        blank: arguments that construct some layer of the class.
    """

    refuse: Callable[[Any], str | None]
    construct: Callable[[Any, Options], nnx.Module]
    parameters: tuple[str, ...]
    gemm: bool
    children: tuple[str, ...] = ()
    blank: tuple[Any, ...] = (1, 1)

    @property
    def held(self) -> tuple[str, ...]:
        """The attributes that are no options."""
        return (*self.parameters, *self.children)


def adapter(module: Any) -> Adapter | None:
    """The adapter of the first class of the module's ancestry that has one."""
    found = (ADAPTERS[kind] for kind in type(module).__mro__ if kind in ADAPTERS)
    return next(found, None)


def refusal(module: Any, ancestors: Sequence[Any] = ()) -> str | None:
    """Tells why a layer cannot be replaced.

    Args:
        module: a layer that has an adapter.
        ancestors: the modules above it.

    Returns:
        The reason, or None.

    Example:
        >>> layer = nnx.Linear(2, 2, dot_general=jnp.dot, rngs=nnx.Rngs(0))
        >>> refusal(layer)
        'its dot_general is not jax.lax.dot_general'
    """
    for parent in ancestors:
        if isinstance(parent, _BY_NAME):
            return (
                f"it is inside nnx.{type(parent).__name__}, which picks variables by "
                "name and would pick the FP8 state as well"
            )
    kind = adapter(module)
    if kind is None:
        return f"te_flax has no layer for {class_name(type(module))}"
    if type(module) not in ADAPTERS:
        return f"{class_name(type(module))} may compute something else than its base"
    held = vars(module)
    more = [n for n, v in held.items() if nnx.is_data(v) and n not in kind.held]
    more = [name for name in more if not name.startswith("_pytree__")]
    if more:
        return f"it holds more than its parameters: {', '.join(more)}"
    for name in kind.parameters:
        dtype = None if held[name] is None else held[name].get_value()
        dtype = getattr(dtype, "dtype", type(dtype).__name__)
        if held[name] is not None and dtype not in FLOATS:
            return f"its {name} is {dtype}, not float32, bfloat16 or float16"
    reason = kind.refuse(module)
    if reason is not None:
        return reason
    try:
        nnx.eval_shape(lambda: kind.construct(module, Options()))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def replacement(module: Any, options: Options) -> nnx.Module:
    """Makes the layer that takes a layer's place and shares its variables.

    Args:
        module: a layer without a :func:`refusal`.
        options: the user's choices.

    Returns:
        The new layer; its ``converted_from`` tells what :func:`original` needs.
    """
    layer = ADAPTERS[type(module)].construct(module, options)
    adopt(layer, module)
    return layer


def adopt(layer: Any, module: Any) -> None:
    """Gives a new layer the variables of a layer of flax.nnx, and notes its origin."""
    kind = ADAPTERS[type(module)]
    for name in kind.parameters:
        setattr(layer, name, nnx.data(getattr(module, name)))
    static = (
        (name, value)
        for name, value in vars(module).items()
        if name not in kind.held and not name.startswith("_pytree__")
    )
    layer.converted_from = Source(type(module), tuple(static))
    _stack(layer, stacked_dims(layer))


def original(layer: Any) -> nnx.Module:
    """Makes the layer that a converted layer was, sharing its variables."""
    source: Source = layer.converted_from
    kind = ADAPTERS[source.kind]
    module = nnx.eval_shape(lambda: source.kind(*kind.blank, rngs=nnx.Rngs(0)))
    values = {name: nnx.data(getattr(layer, name)) for name in kind.parameters}
    values |= {name: nnx.data(None) for name in kind.children}  # places for them
    values |= {name: getattr(layer, name) for name in kind.children if name in _MODE}
    for name in [n for n in vars(module) if not n.startswith("_pytree__")]:
        delattr(module, name)
    for name, value in (*values.items(), *source.attributes):
        setattr(module, name, value)
    return module


def children(module: Any) -> tuple[str, ...]:
    """The attributes that stay when a layer is replaced, or gets its old class back."""
    source = getattr(module, "converted_from", None)
    kind = adapter(module) if source is None else ADAPTERS[source.kind]
    return () if kind is None else kind.children


def class_name(kind: type) -> str:
    """``nnx.Linear`` or ``te.DenseGeneral``; other classes by their own name."""
    root = kind.__module__.split(".")
    if root[0] == "te_flax":
        return f"te.{kind.__name__}"
    return f"nnx.{kind.__name__}" if root[:2] == ["flax", "nnx"] else kind.__name__


def stacked_dims(layer: Any) -> tuple[int, ...]:
    """The leading dims of the parameters of layers that ``nnx.vmap`` stacked."""
    if isinstance(getattr(layer, "kernel", None), nnx.Variable):
        ndim = len(layer.in_features) + len(layer.out_features)
        return layer.kernel.shape[: layer.kernel.ndim - ndim]
    return ()


def _stack(layer: Any, dims: tuple[int, ...]) -> None:
    """Gives each of the stacked layers its own FP8 state, differently seeded."""
    for place in places(layer) if dims else ():
        if isinstance(place.module, Fp8Statistics):
            for variable in variables(place.module).values():
                value = variable.get_value()
                value = jnp.broadcast_to(value, (*dims, *value.shape))
                if isinstance(variable, Fp8Rounding):
                    index = jnp.arange(math.prod(dims), dtype=value.dtype)
                    value = value.at[..., 0].add(index.reshape(dims))
                variable.set_value(value)


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer whose result is thrown away."""
    return jnp.zeros(shape, dtype)


def _refuse_linear(module: nnx.Linear) -> str | None:
    if module.dot_general is not jax.lax.dot_general:
        return "its dot_general is not jax.lax.dot_general"
    return _refuse_shape(module, (module.in_features, module.out_features))


def _refuse_linear_general(module: nnx.LinearGeneral) -> str | None:
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name) not in (None, jax.lax.dot_general):
            return f"its {name} is not jax.lax.dot_general"
    if module.batch_axis:
        return "it has a batch_axis: one kernel for each entry of an input's axis"
    return _refuse_shape(module, (*module.in_features, *module.out_features))


def _refuse_shape(module: Any, expected: tuple[int, ...]) -> str | None:
    shape = module.kernel.shape
    if math.prod(expected) and shape[max(len(shape) - len(expected), 0) :] == expected:
        return None
    return f"its kernel has shape {shape}, which does not end in {expected}"


def _construct_dense(module: Any, options: Options) -> nnx.Module:
    return DenseGeneral(
        module.in_features,
        module.out_features,
        axis=getattr(module, "axis", -1),
        **dense_keywords(module, options),
    )


def dense_keywords(module: Any, options: Options) -> dict[str, Any]:
    """The keywords of a dense layer that a linear layer of flax.nnx determines."""
    bias = {} if isinstance(module, nnx.Einsum) else {"use_bias": module.use_bias}
    return {
        **bias,
        "dtype": module.dtype,
        "param_dtype": module.param_dtype,
        "precision": module.precision,
        "promote_dtype": module.promote_dtype,
        "preferred_element_type": module.preferred_element_type,
        "kernel_init": _zeros,
        "bias_init": _zeros,
        "recipe": options.recipe,
        "amax_history_len": options.amax_history_len,
        "rngs": nnx.Rngs(options.seed),
    }


def _refuse_norm(module: Any) -> str | None:
    if type(module) not in NORMS:
        return f"te_flax has no layer for {class_name(type(module))}"
    for name in ("reduction_axes", "feature_axes"):
        axes = getattr(module, name)
        if axes not in (-1, (-1,), [-1]):
            return f"its {name} is {axes}: te_flax normalises the last axis"
    for name in ("axis_name", "axis_index_groups"):
        if getattr(module, name) is not None:
            return f"it has {name}: statistics over devices"
    if module.promote_dtype is not dtypes.promote_dtype:
        return "its promote_dtype is not that of flax.nnx"
    return None


def _construct_norm(module: Any, options: Options) -> nnx.Module:
    bias = {}
    if isinstance(module, nnx.LayerNorm):
        bias = {"use_bias": module.use_bias, "bias_init": _zeros}
    return NORMS[type(module)](
        module.num_features,
        epsilon=module.epsilon,
        dtype=module.dtype,
        param_dtype=module.param_dtype,
        use_scale=module.use_scale,
        scale_init=_zeros,
        rngs=nnx.Rngs(0),
        **bias,
    )


def _refuse_einsum(module: nnx.Einsum) -> str | None:
    if module.einsum_op is not jnp.einsum:
        return "its einsum_op is not jnp.einsum"
    if module.einsum_str is None:
        return "its einsum_str comes with each call"
    return _refuse_shape(module, tuple(module.kernel_shape))


def _construct_einsum(module: nnx.Einsum, options: Options) -> nnx.Module:
    keywords = dense_keywords(module, options)
    return Einsum(module.einsum_str, module.kernel_shape, module.bias_shape, **keywords)


def _refuse_attention(module: nnx.MultiHeadAttention) -> str | None:
    if module.attention_fn is not nnx.dot_product_attention:
        return "its attention_fn is not nnx.dot_product_attention"
    return None


def _construct_attention(module: nnx.MultiHeadAttention, options: Options):
    """The shell; the projections and norms inside are converted by themselves.

    It draws each weight's dropout by itself, whatever ``broadcast_dropout`` says.
    """
    shell = nnx.eval_shape(
        lambda: MultiHeadAttention(
            module.num_heads,
            module.in_features,
            module.qkv_features,
            module.out_features,
            module.num_kv_heads,
            module.in_kv_features,
            fuse_qkv_params=False,
            decode=bool(module.decode),
            rngs=nnx.Rngs(0),
        )
    )
    shell.core_attention = DotProductAttention(
        module.num_heads,
        module.head_dim,
        num_kv_heads=module.num_kv_heads,
        recipe=options.recipe,
        amax_history_len=options.amax_history_len,
        rngs=nnx.Rngs(0),
    )
    _stack(shell.core_attention, stacked_dims(module.query))
    if module.dropout_rate > 0:
        shell.core_attention.dropout = nnx.Dropout(
            module.dropout_rate, deterministic=module.deterministic
        )
    for name in _MODE:
        setattr(shell, name, getattr(module, name))
    return shell


# The classes of flax.nnx that are replaced.
_MODE = ("rngs", "deterministic")  # whether and from where dropout is drawn
_PROJECTIONS = ("query", "key", "value", "out", "query_ln", "key_ln")
_DENSE = ("kernel", "bias")
ADAPTERS = {
    nnx.Linear: Adapter(_refuse_linear, _construct_dense, _DENSE, True),
    nnx.LinearGeneral: Adapter(_refuse_linear_general, _construct_dense, _DENSE, True),
    nnx.LayerNorm: Adapter(
        _refuse_norm, _construct_norm, ("scale", "bias"), False, blank=(1,)
    ),
    nnx.RMSNorm: Adapter(_refuse_norm, _construct_norm, ("scale",), False, blank=(1,)),
    nnx.Einsum: Adapter(
        _refuse_einsum, _construct_einsum, _DENSE, True, blank=("a,ab->b", (1, 1))
    ),
    nnx.MultiHeadAttention: Adapter(
        _refuse_attention,
        _construct_attention,
        parameters=(),
        gemm=False,
        children=(*_PROJECTIONS, *CACHED, *_MODE),
    ),
}
