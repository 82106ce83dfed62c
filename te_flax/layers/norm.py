"""LayerNorm and RMSNorm: flax.nnx's layers with exact variance, zero-centred gamma."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from te_flax import sharding
from te_flax.functional.config import NormConfig
from te_flax.functional.norm import norm
from te_flax.layers import _arguments
from te_flax.layers._params import init_param
from te_flax.ops._choice import current as current_kernels
from te_flax.typing import Array, Axes, Initializer

ZEROS = nnx.initializers.zeros_init()
ONES = nnx.initializers.ones_init()


class LayerNorm(nnx.Module):
    """Normalises the last axis: ``(x - mean) / sqrt(var + epsilon) * scale + bias``.

    Equal to :class:`flax.nnx.LayerNorm` with ``use_fast_variance=False``: the variance
    is that of the centred values, in float32.

    Args:
        num_features: size of the last axis.
        epsilon: added to the variance, >= 0.
        dtype: of the result; None promotes the input's with the parameters'.
        param_dtype: of the parameters.
        use_bias: whether to add a bias.
        use_scale: whether to multiply by a scale.
        bias_init: of the bias.
        scale_init: of the scale; None is ones, or zeros when zero-centred.
        zero_centered_gamma: whether the factor is ``1 + scale``.
        promote_dtype: as in :class:`flax.nnx.LayerNorm`.
        scale_axes: a logical axis, or None, for the dim of the scale.
        bias_axes: likewise for the bias.
        input_axes: a logical axis, or None, for each dim of the input.
        transpose_batch_sequence: whether inputs are ``[sequence, batch, ...]``;
            ``input_axes`` stays in batch-first order and is turned round.
        scale_metadata: metadata of the scale's variable.
        bias_metadata: metadata of the bias's variable.
        rngs: key for the parameters.

    Raises:
        ValueError: ``num_features`` is < 1 or ``epsilon`` negative.
        TypeError: a dtype is no float, a flag no bool, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> te.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.arange(8.0).reshape(2, 4)).shape
        (2, 4)

    Source: Ba et al. 2016, "Layer Normalization" (arXiv:1607.06450), equation 3.
    """

    kind = "layernorm"

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = ZEROS,
        scale_init: Initializer | None = None,
        zero_centered_gamma: bool = False,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        scale_axes: Axes | None = None,
        bias_axes: Axes | None = None,
        input_axes: Axes | None = None,
        transpose_batch_sequence: bool = False,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        where = type(self).__name__
        _arguments.check_options(where, locals())
        (features,) = _arguments.sizes(where, num_features=num_features)
        _arguments.check_float_dtypes(where, dtype=dtype, param_dtype=param_dtype)
        self.num_features = features
        self.epsilon = _arguments.epsilon(where, epsilon)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.zero_centered_gamma = zero_centered_gamma
        self.promote_dtype = promote_dtype
        self.input_axes = input_axes
        self.transpose_batch_sequence = transpose_batch_sequence
        shape = (features,)
        make = {"dtype": param_dtype, "rngs": rngs}
        self.scale = nnx.data(None)
        if use_scale:
            init = scale_init or (ZEROS if zero_centered_gamma else ONES)
            self.scale = init_param(
                where,
                init,
                shape,
                shape,
                scale_axes=scale_axes,
                metadata=scale_metadata,
                **make,
            )
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = init_param(
                where,
                bias_init,
                shape,
                shape,
                bias_axes=bias_axes,
                metadata=bias_metadata,
                **make,
            )

    def __call__(self, x: Array) -> Array:
        """Applies the layer.

        Args:
            x: float array ``[..., num_features]``.

        Returns:
            An array like x, of the promoted dtype.

        Raises:
            ValueError: the last axis has another size.
            TypeError: x is no float array.
        """
        where = type(self).__name__
        x = _arguments.float_array(where, x)
        _arguments.check_last(where, x, self.num_features, "num_features")
        x = sharding.constrain(x, self._input_axes(x.ndim))
        scale, bias = self.parameters()
        # Only what the layer holds takes part: without parameters x keeps its dtype.
        own = [None if p is None else p[...] for p in (self.scale, self.bias)]
        px, *_ = self.promote_dtype((x, *own), dtype=self.dtype)
        x = _arguments.unpromoted(x, px)
        return norm(x, scale, bias, config=self.config(px.dtype.name))

    def config(self, out_dtype: str) -> NormConfig:
        """The static configuration of the functional, read at the call."""
        return NormConfig(
            kind=self.kind,
            epsilon=self.epsilon,
            zero_centered_gamma=self.zero_centered_gamma,
            out_dtype=out_dtype,
            impl=current_kernels(),
        )

    def parameters(self) -> tuple[Array, Array | None]:
        """Scale and bias as the functional takes them, neutral where there is none."""
        shape = (self.num_features,)
        if self.scale is None:
            neutral = jnp.zeros if self.zero_centered_gamma else jnp.ones
            scale = neutral(shape, self.param_dtype)
        else:
            scale = self.scale[...]
        if self.kind == "rmsnorm":
            return scale, None
        if self.bias is None:
            return scale, jnp.zeros(shape, self.param_dtype)
        return scale, self.bias[...]

    def _input_axes(self, ndim: int) -> Axes | None:
        return _arguments.input_axes(
            type(self).__name__, self.input_axes, ndim, self.transpose_batch_sequence
        )


class RMSNorm(LayerNorm):
    """Divides by the root mean square: ``x / sqrt(mean(x^2) + epsilon) * scale``.

    Equal to :class:`flax.nnx.RMSNorm`.

    Args:
        num_features: size of the last axis.
        epsilon: added to the mean square, >= 0.
        dtype: of the result; None promotes the input's with the parameter's.
        param_dtype: of the parameter.
        use_scale: whether to multiply by a scale.
        scale_init: of the scale; None is ones, or zeros when zero-centred.
        zero_centered_gamma: whether the factor is ``1 + scale``.
        promote_dtype: as in :class:`flax.nnx.RMSNorm`.
        scale_axes: a logical axis, or None, for the dim of the scale.
        input_axes: a logical axis, or None, for each dim of the input.
        transpose_batch_sequence: whether inputs are ``[sequence, batch, ...]``.
        scale_metadata: metadata of the scale's variable.
        rngs: key for the parameter.

    Raises:
        ValueError: ``num_features`` is < 1 or ``epsilon`` negative.
        TypeError: a dtype is no float, a flag no bool, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> te.RMSNorm(4, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).tolist()[0][0]
        0.9999995231628418

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
    (arXiv:1910.07467), equation 4.
    """

    kind = "rmsnorm"

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer | None = None,
        zero_centered_gamma: bool = False,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        scale_axes: Axes | None = None,
        input_axes: Axes | None = None,
        transpose_batch_sequence: bool = False,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_bias=False,
            use_scale=use_scale,
            scale_init=scale_init,
            zero_centered_gamma=zero_centered_gamma,
            promote_dtype=promote_dtype,
            scale_axes=scale_axes,
            input_axes=input_axes,
            transpose_batch_sequence=transpose_batch_sequence,
            scale_metadata=scale_metadata,
            rngs=rngs,
        )


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
