"""LayerNormMLP: the feed-forward block of a transformer as one layer."""

import functools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from te_flax import sharding
from te_flax.errors import part_of
from te_flax.functional.activation import activation
from te_flax.functional.config import ActivationConfig
from te_flax.functional.dense import dense, layernorm_dense
from te_flax.functional.layernorm_mlp import MLPConfig, MLPParams, layernorm_mlp
from te_flax.functional.lora import low_rank
from te_flax.layers import _activations, _arguments, _fp8, _gemm
from te_flax.layers._activations import Activation
from te_flax.layers._dropout import check_dims, dropout_key, make_dropout
from te_flax.layers.dense_general import DEFAULT_KERNEL_INIT, DenseGeneral
from te_flax.layers.layer_norm_dense_general import make_norm, refuse
from te_flax.layers.norm import ZEROS
from te_flax.ops._choice import current as current_kernels
from te_flax.recipe.context import resolve
from te_flax.sharding import placement
from te_flax.typing import Array, Axes, Initializer

_WHERE = "LayerNormMLP"
_DROPOUT_DIMS = "intermediate_hidden_dropout_dims"
_OWN = ("axis", "input_axes", "dot_input_axes", "kernel_axes", "bias_axes")

# Arguments that the norm takes, and those of both maps.
_NORM = (
    "epsilon",
    "zero_centered_gamma",
    "scale_init",
    "scale_axes",
    "ln_bias_init",
    "ln_bias_axes",
    "dtype",
    "param_dtype",
    "rngs",
)
_GEMM = (
    "use_bias",
    "kernel_init",
    "bias_init",
    "enable_low_rank_adaptation",
    "low_rank_adaptation_dim",
    "low_rank_adaptation_alpha",
    "transpose_batch_sequence",
    "dtype",
    "param_dtype",
    "rngs",
)


class LayerNormMLP(nnx.Module):
    """Norm, linear map, activation, linear map: ``y = act(norm(x) . wi) . wo``.

    With named activations the whole block is one function: the norm and the activation
    write the quantized operands of the GEMMs, and the activation's gradient the
    quantized cotangent with its bias gradient. Parameters: ``norm.scale``,
    ``norm.bias``, ``wi.kernel`` (``[in, mid]``, gated ``[in, n_act, mid]``),
    ``wi.bias``, ``wo.kernel`` (``[mid, out]``), ``wo.bias``.

    Args:
        in_features: size of the last axis.
        intermediate_dim: size of the axis between the two maps.
        out_features: size of y's last axis; None takes ``in_features``.
        enable_layernorm: False leaves the norm out.
        layernorm_type: "layernorm" or "rmsnorm".
        epsilon: added to the variance, >= 0.
        zero_centered_gamma: whether the factor is ``1 + norm.scale``.
        scale_init: of the norm's scale; None is ones, or zeros when zero-centred.
        scale_axes: a logical axis, or None, for the dim of the norm's scale.
        ln_bias_init: of the norm's bias.
        ln_bias_axes: likewise for the norm's bias.
        activations: a name or a callable, or a tuple of them: each acts on a slice of
            its own and the results are multiplied, ``("silu", "linear")`` say.
        activation_params: ``limit``, ``alpha`` and ``offset`` of the clamped ones.
        use_bias: whether both maps add a bias.
        kernel_init: of both kernels, called with their 2-D shapes.
        bias_init: of both biases.
        kernel_axes_1: a logical axis, or None, for each dim of ``wi.kernel``.
        kernel_axes_2: likewise for ``wo.kernel``.
        bias_axes_1: likewise for ``wi.bias``.
        bias_axes_2: likewise for ``wo.bias``.
        return_layernorm_output: whether a call returns ``(y, norm(x))``.
        intermediate_dropout_rate: of the activation's result, in [0, 1).
        intermediate_dropout_rng_name: stream of its keys.
        intermediate_hidden_dropout_dims: dims along which one draw serves all, in the
            order of the input.
        enable_low_rank_adaptation: whether both maps have a low-rank addition.
        low_rank_adaptation_dim: its rank.
        low_rank_adaptation_alpha: its scale is alpha / rank; None is 1.
        layernorm_input_axes: a logical axis, or None, for each dim of the input.
        dot_1_input_axes: likewise for norm(x): what travels is its codes.
        dot_2_input_axes: likewise for the activation's result.
        ffn1_ckpt_name: name of the first GEMM's result for ``jax.checkpoint`` policies.
        ffn2_ckpt_name: likewise of the second's.
        transpose_batch_sequence: whether inputs are ``[sequence, batch, ...]``; the
            ``*_axes`` stay in batch-first order and are turned round.
        dtype: of the computation and of y; None promotes the input's with the
            parameters'.
        param_dtype: of the parameters.
        **dense: other arguments of both :class:`te_flax.DenseGeneral`: ``recipe``,
            ``amax_history_len``, ``precision``, ``promote_dtype``,
            ``quantization_checkpoint_name``, ``kernel_metadata``, ``bias_metadata``.
        rngs: keys for the parameters and the dropout.

    Raises:
        ValueError: an argument is out of range or unknown.
        TypeError: ``recipe`` is no recipe, a dtype no float, a flag no bool, a name no
            str, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.LayerNormMLP(128, 256, rngs=nnx.Rngs(0))
        >>> with te.autocast(te.Float8CurrentScaling()):
        ...     layer(jnp.ones((8, 128))).shape
        (8, 128)

    Source: TransformerEngine's layer of the same role; Shazeer 2020, "GLU Variants
    Improve Transformer" (arXiv:2002.05202), equation 6.
    """

    def __init__(
        self,
        in_features: int,
        intermediate_dim: int,
        *,
        out_features: int | None = None,
        enable_layernorm: bool = True,
        layernorm_type: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        scale_init: Initializer | None = None,
        scale_axes: Axes | None = None,
        ln_bias_init: Initializer = ZEROS,
        ln_bias_axes: Axes | None = None,
        activations: Activation | Sequence[Activation] = ("gelu",),
        activation_params: Mapping[str, float] = MappingProxyType({}),
        use_bias: bool = True,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        bias_init: Initializer = ZEROS,
        kernel_axes_1: Axes | None = None,
        kernel_axes_2: Axes | None = None,
        bias_axes_1: Axes | None = None,
        bias_axes_2: Axes | None = None,
        return_layernorm_output: bool = False,
        intermediate_dropout_rate: float = 0.0,
        intermediate_dropout_rng_name: str = "dropout",
        intermediate_hidden_dropout_dims: Sequence[int] = (),
        enable_low_rank_adaptation: bool = False,
        low_rank_adaptation_dim: int = 32,
        low_rank_adaptation_alpha: float | None = None,
        layernorm_input_axes: Axes | None = None,
        dot_1_input_axes: Axes | None = None,
        dot_2_input_axes: Axes | None = None,
        ffn1_ckpt_name: str = "ffn1",
        ffn2_ckpt_name: str = "ffn2",
        transpose_batch_sequence: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **dense: Any,
    ):
        given = dict(locals())
        _arguments.check_options(_WHERE, given)
        refuse(_WHERE, dense, DenseGeneral, *_OWN)
        features, mid, out = _arguments.sizes(
            _WHERE,
            in_features=in_features,
            intermediate_dim=intermediate_dim,
            out_features=in_features if out_features is None else out_features,
        )
        self.activations = _activations.checked(activations)
        self.activation = _activations.config(self.activations, activation_params)
        self.norm = make_norm(
            _WHERE,
            enable_layernorm,
            layernorm_type,
            features,
            **{name: given[name] for name in _NORM},
        )
        make = functools.partial(
            DenseGeneral, **{name: given[name] for name in _GEMM}, **dense
        )
        wide = (len(self.activations), mid) if self.activations[1:] else mid
        self.wi = _part(make, 1, features, wide, kernel_axes_1, bias_axes_1)
        self.wo = _part(make, 2, mid, out, kernel_axes_2, bias_axes_2)
        self.intermediate_hidden_dropout_dims = _arguments.ints(
            _WHERE, _DROPOUT_DIMS, intermediate_hidden_dropout_dims
        )
        self.dropout = make_dropout(
            _WHERE,
            "intermediate_dropout_rate",
            intermediate_dropout_rate,
            intermediate_dropout_rng_name,
            rngs,
            self.intermediate_hidden_dropout_dims,
        )
        self.in_features = features
        self.return_layernorm_output = return_layernorm_output
        self.input_axes = (layernorm_input_axes, dot_1_input_axes, dot_2_input_axes)
        self.ckpt_names = (ffn1_ckpt_name, ffn2_ckpt_name)
        self.transpose_batch_sequence = transpose_batch_sequence

    def __call__(
        self,
        x: Array,
        *,
        deterministic: bool | None = None,
        out_sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Any:
        """Applies the layer.

        Args:
            x: float array ``[*batch, in_features]``.
            deterministic: True drops nothing; None follows ``model.train()`` and
                ``model.eval()``.
            out_sharding: wanted of y.

        Returns:
            y ``[*batch, out_features]``, or (y, norm(x)) with
            ``return_layernorm_output``.

        Raises:
            ValueError: the last axis of x has another size.
            TypeError: x is no float array.
        """
        x = _arguments.float_array(_WHERE, x)
        _arguments.check_last(_WHERE, x, self.in_features, "in_features")
        x = sharding.constrain(x, self._axes(0, x.ndim))
        name, dims = _DROPOUT_DIMS, self.intermediate_hidden_dropout_dims
        check_dims(_WHERE, name, dims if self.dropout else (), x.ndim)
        key = dropout_key(self.dropout, deterministic)
        run = self._apart if self.activation is None else self._fused
        y, h = run(x, key, out_sharding)
        return (y, h) if self.return_layernorm_output else y

    def _fused(self, x: Array, key: Array | None, out_sharding):
        """Both GEMMs in one function."""
        wi, wo, norm = self.wi, self.wo, self.norm
        recipes = resolve(wi.recipe), resolve(wo.recipe)
        px, params = self._operands(x, recipes)
        dtype = px.dtype.name
        out_dtype = jnp.dtype(wo.preferred_element_type or dtype).name
        x_at, h_at, mid_at = (
            placement(self._axes(i, x.ndim), x.ndim) for i in range(3)
        )
        config = MLPConfig(
            norm=None if norm is None else norm.config(dtype),
            wi=_gemm.common(wi, recipes[0], dtype, dtype, placed=(x_at, h_at)),
            wo=_gemm.common(
                wo, recipes[1], dtype, out_dtype, out_sharding, (mid_at, mid_at)
            ),
            activation=cast(ActivationConfig, self.activation),
            dropout_rate=0.0 if self.dropout is None else self.dropout.rate,
            dropout_dims=self.intermediate_hidden_dropout_dims,
            lora_scale=wi.lora_scale,
            return_layernorm_output=self.return_layernorm_output,
            ffn1_name=self.ckpt_names[0],
            ffn2_name=self.ckpt_names[1],
        )
        states = (
            _fp8.gemm_state(recipes[0], wi.fp8),
            _fp8.gemm_state(recipes[1], wo.fp8),
        )
        x = px if norm is None else _arguments.unpromoted(x, px)
        if wi.fp8.record is not None:
            _record((wi, wo), recipes, states, _inputs(x, params, config, states))
        y, h, amaxes = layernorm_mlp(
            x,
            params,
            config=config,
            states=states,
            dropout_key=key,
        )
        for layer, recipe, measured in zip((wi, wo), recipes, amaxes, strict=True):
            _fp8.push(recipe, layer.fp8, measured)
        return y, h

    def _operands(self, x: Array, recipes: tuple) -> tuple[Array, MLPParams]:
        """Promotes x and the parameters, and shapes them for the functional."""
        wi, wo = self.wi, self.wo
        arrays = {
            "wi": wi.kernel[...],
            "wi_bias": None if wi.bias is None else wi.bias[...],
            "wo": wo.kernel[...],
            "wo_bias": None if wo.bias is None else wo.bias[...],
        }
        px, *promoted = wi.promote_dtype((x, *arrays.values()), dtype=wi.dtype)
        named = dict(zip(arrays, promoted, strict=True))
        for name, layer, recipe in zip(("wi", "wo"), (wi, wo), recipes, strict=True):
            named[name] = _gemm.kernel_of(layer, recipe, arrays[name], named[name])
        lora = _gemm.lora(wi)
        if len(self.activations) == 1:
            named["wi"] = jnp.expand_dims(named["wi"], 1)
            if wi.bias is not None:
                named["wi_bias"] = jnp.expand_dims(named["wi_bias"], 0)
            if lora is not None:
                lora = lora._replace(b=jnp.expand_dims(lora.b, 1))
        scale = norm_bias = None
        if self.norm is not None:
            scale, norm_bias = self.norm.parameters()
        return px, MLPParams(
            scale, norm_bias, **named, wi_lora=lora, wo_lora=_gemm.lora(wo)
        )

    def _apart(self, x: Array, key: Array | None, out_sharding):
        """Activations that no op knows: the two GEMMs with plain JAX between them."""
        x_axes, h_axes, mid_axes = (self._axes(i, x.ndim) for i in range(3))
        z, h = _gemm.apply(
            self.wi,
            x,
            norm=self.norm,
            axes=(x_axes, h_axes),
            return_h=self.return_layernorm_output,
        )
        z = checkpoint_name(z, self.ckpt_names[0])
        slices = [z]
        if len(self.activations) > 1:
            slices = [z[..., i, :] for i in range(len(self.activations))]
        parts = zip(self.activations, slices, strict=True)
        mid = functools.reduce(operator.mul, [_activate(f, part) for f, part in parts])
        if key is not None:
            drop = cast(nnx.Dropout, self.dropout)
            mid = drop(mid, deterministic=False, rngs=key)
        mid = sharding.constrain(mid, mid_axes)
        axes = mid_axes, mid_axes
        y, _ = _gemm.apply(self.wo, mid, axes=axes, out_sharding=out_sharding)
        return checkpoint_name(y, self.ckpt_names[1]), h

    def _axes(self, index: int, ndim: int) -> Axes | None:
        name = ("layernorm_input_axes", "dot_1_input_axes", "dot_2_input_axes")[index]
        axes, flipped = self.input_axes[index], self.transpose_batch_sequence
        return _arguments.input_axes(_WHERE, axes, ndim, flipped, name)


def _part(make, index: int, n_in, n_out, kernel_axes, bias_axes) -> DenseGeneral:
    """One of the two maps; in its errors the axes have the block's names for them."""
    own = {f"{name}_axes": f"{name}_axes_{index}" for name in ("kernel", "bias")}
    with part_of(_WHERE, **own):
        return make(n_in, n_out, kernel_axes=kernel_axes, bias_axes=bias_axes)


def _inputs(x: Array, p: MLPParams, config: MLPConfig, states) -> tuple[Array, Array]:
    """What the two GEMMs read: computed once more, while somebody records it."""
    gemm = {"config": config.wi, "state": states[0]}
    if config.norm is None:
        h, (z, _) = x, dense(x, p.wi, p.wi_bias, **gemm)
    else:
        gemm |= {"norm": config.norm, "return_layernorm_output": True}
        scale = cast(Array, p.scale)
        z, h, _ = layernorm_dense(x, scale, p.norm_bias, p.wi, p.wi_bias, **gemm)
    h = cast(Array, h)
    if p.wi_lora is not None:
        z = z + low_rank(h, p.wi_lora, config.lora_scale).astype(z.dtype)
    return h, activation(z, config=config.activation)


def _record(layers, recipes, states, inputs: tuple[Array, Array]) -> None:
    for args in zip(layers, recipes, states, inputs, strict=True):
        _gemm.record(*args)


def _activate(f: Activation, x: Array) -> Array:
    if callable(f):
        return f(x)
    config = ActivationConfig(name=f, impl=current_kernels())
    return activation(jnp.expand_dims(x, -2), config=config)
