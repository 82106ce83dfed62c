"""Stand-ins with the arguments of the norm layers and of the fused layer."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

import te_flax as te


class _Norm(nnx.Module):
    centred: bool

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Any = nnx.initializers.zeros,
        scale_init: Any = nnx.initializers.ones,
        zero_centered_gamma: bool = False,
        rngs: nnx.Rngs,
    ):
        self.num_features, self.epsilon, self.dtype = num_features, epsilon, dtype
        make = lambda init: nnx.Param(init(rngs.params(), (num_features,), param_dtype))
        self.scale = make(scale_init) if use_scale else nnx.data(None)
        self.bias = make(bias_init) if use_bias else nnx.data(None)

    def __call__(self, x):
        mean = jnp.mean(x, -1, keepdims=True) if self.centred else 0.0
        x = x - mean
        y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon)
        y = y if self.scale is None else y * self.scale[...]
        return y if self.bias is None else y + self.bias[...]


class LayerNorm(_Norm):
    centred = True


class RMSNorm(_Norm):
    centred = False

    def __init__(self, num_features: int, **options: Any):
        if "use_bias" in options or "bias_init" in options:
            raise TypeError("RMSNorm has no bias")
        super().__init__(num_features, use_bias=False, **options)
        del self.bias

    def __call__(self, x):
        y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon)
        return y if self.scale is None else y * self.scale[...]


class LayerNormDenseGeneral(te.DenseGeneral):
    def __init__(
        self,
        in_features: Any,
        out_features: Any,
        *,
        layernorm_type: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_gamma: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **options)
        norm = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[layernorm_type]
        features = in_features if isinstance(in_features, int) else in_features[0]
        self.norm = norm(features, epsilon=epsilon, rngs=rngs)

    def __call__(self, x, out_sharding=None):
        return super().__call__(self.norm(x), out_sharding=out_sharding)
