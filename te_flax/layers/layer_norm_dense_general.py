"""LayerNormDenseGeneral: a norm that writes the quantized operand of a dense layer."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from te_flax import sharding
from te_flax.errors import message, part_of
from te_flax.layers import _arguments, _gemm
from te_flax.layers.dense_general import DenseGeneral
from te_flax.layers.norm import NORMS, ZEROS
from te_flax.typing import Array, Axes, Initializer


def make_norm(
    where: str,
    enable: bool,
    layernorm_type: str,
    features: int,
    *,
    epsilon: float,
    scale_init: Initializer | None,
    scale_axes: Axes | None,
    ln_bias_init: Initializer,
    ln_bias_axes: Axes | None,
    **options: Any,
) -> Any:
    """The norm in front of a GEMM, or None."""
    options["epsilon"] = _arguments.epsilon(where, epsilon)
    _arguments.choice(where, "layernorm_type", layernorm_type, tuple(NORMS))
    if not enable:
        return nnx.data(None)
    options |= {"scale_init": scale_init, "scale_axes": scale_axes}
    if layernorm_type == "layernorm":
        options |= {"bias_init": ln_bias_init, "bias_axes": ln_bias_axes}
    with part_of(where, bias_axes="ln_bias_axes"):
        return NORMS[layernorm_type](features, **options)


class LayerNormDenseGeneral(DenseGeneral):
    """A norm over the last axis and a linear map: ``y = norm(x) . kernel + bias``.

    Where the recipe's scales are known beforehand (delayed scaling) or local (MXFP8),
    the norm writes codes only. Parameters: ``norm.scale``, ``norm.bias``, ``kernel``,
    ``bias``. Without a recipe it equals :class:`flax.nnx.LayerNorm` (with
    ``use_fast_variance=False``) or :class:`flax.nnx.RMSNorm` and then
    :class:`flax.nnx.LinearGeneral`.

    Args:
        in_features: size of the last axis.
        out_features: size of each new axis; int or tuple.
        enable_layernorm: False leaves the norm out.
        layernorm_type: "layernorm" or "rmsnorm".
        epsilon: added to the variance, >= 0.
        zero_centered_gamma: whether the factor is ``1 + norm.scale``.
        scale_init: of the norm's scale; None is ones, or zeros when zero-centred.
        scale_axes: a logical axis, or None, for the dim of the norm's scale.
        ln_bias_init: of the norm's bias.
        ln_bias_axes: likewise for the norm's bias.
        return_layernorm_output: whether a call returns ``(y, norm(x))``.
        layernorm_input_axes: a logical axis, or None, for each dim of the input.
        dot_input_axes: likewise for norm(x): what travels is its codes.
        depth_scaling: y is divided by it; None for no division.
        **dense: the other arguments of :class:`te_flax.DenseGeneral`, ``rngs``
            included; ``axis`` is always -1.

    Raises:
        ValueError: an argument is out of range.
        TypeError: ``recipe`` is no recipe, a dtype no float, a flag no bool, a name no
            str, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.LayerNormDenseGeneral(128, 256, rngs=nnx.Rngs(0))
        >>> with te.autocast(te.MXFP8BlockScaling()):
        ...     layer(jnp.ones((8, 128))).shape
        (8, 256)

    Source: TransformerEngine's layer of the same role.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        enable_layernorm: bool = True,
        layernorm_type: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        scale_init: Initializer | None = None,
        scale_axes: Axes | None = None,
        ln_bias_init: Initializer = ZEROS,
        ln_bias_axes: Axes | None = None,
        return_layernorm_output: bool = False,
        layernorm_input_axes: Axes | None = None,
        dot_input_axes: Axes | None = None,
        depth_scaling: float | None = None,
        rngs: nnx.Rngs,
        **dense: Any,
    ):
        where = type(self).__name__
        _arguments.check_options(where, locals())
        refuse(where, dense, DenseGeneral, "axis", "input_axes")
        (features,) = _arguments.sizes(where, in_features=in_features)
        self.norm = make_norm(
            where,
            enable_layernorm,
            layernorm_type,
            features,
            epsilon=epsilon,
            zero_centered_gamma=zero_centered_gamma,
            scale_init=scale_init,
            scale_axes=scale_axes,
            ln_bias_init=ln_bias_init,
            ln_bias_axes=ln_bias_axes,
            dtype=dense.get("dtype"),
            param_dtype=dense.get("param_dtype", jnp.float32),
            rngs=rngs,
        )
        dense |= {"dot_input_axes": dot_input_axes, "rngs": rngs}
        super().__init__(features, out_features, **dense)
        self.return_layernorm_output = return_layernorm_output
        self.layernorm_input_axes = layernorm_input_axes
        if depth_scaling is not None:
            remedy = "use None for no division"
            depth_scaling = _arguments.number(
                where, "depth_scaling", depth_scaling, 1e-30, float("inf"), remedy
            )
        self.depth_scaling = depth_scaling

    def __call__(
        self, x: Array, out_sharding: PartitionSpec | NamedSharding | None = None
    ) -> Any:
        """Applies the layer.

        Args:
            x: float array ``[*batch, in_features]``.
            out_sharding: wanted of y.

        Returns:
            y ``[*batch, *out_features]``, or (y, norm(x)) with
            ``return_layernorm_output``.

        Raises:
            ValueError: the last axis of x has another size.
            TypeError: x is no float array.
        """
        where = type(self).__name__
        x = _arguments.float_array(where, x)
        _arguments.check_last(where, x, self.in_features[0], "in_features")
        axes = self._axes("layernorm_input_axes", x.ndim)
        y, h = _gemm.apply(
            self,
            sharding.constrain(x, axes),
            norm=self.norm,
            axes=(axes, self._axes("dot_input_axes", x.ndim)),
            return_h=self.return_layernorm_output,
            out_sharding=out_sharding,
        )
        if self.depth_scaling is not None:
            y = y / jnp.asarray(self.depth_scaling, y.dtype)
        return (y, h) if self.return_layernorm_output else y


def refuse(
    where: str, given: dict[str, Any], layers: type | tuple[type, ...], *own: str
) -> None:
    """Raises TypeError for keywords that the layers inside do not take from here.

    Args:
        where: the layer that got them.
        given: its keywords for the layers inside.
        layers: the layer inside, or several of which one takes it.
        *own: arguments of the layers inside that have another name here, or one value.
    """
    layers = layers if isinstance(layers, tuple) else (layers,)
    found = [inspect.signature(layer.__init__).parameters for layer in layers]
    options = {p.name for ps in found for p in ps.values() if p.kind is p.KEYWORD_ONLY}
    known = sorted(options - {*own, "rngs"})
    for name in given:
        if name not in known:
            rule, remedy = (
                "be an argument of this layer",
                f"further ones are {', '.join(known)}",
            )
            raise TypeError(message(where, name, rule, "a keyword", remedy))
