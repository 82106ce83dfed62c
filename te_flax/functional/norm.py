"""LayerNorm and RMSNorm alone."""

import functools

import jax

from te_flax.functional import _core
from te_flax.functional._checks import check_norm
from te_flax.functional.config import DenseConfig, GemmState, NormConfig
from te_flax.typing import Array


def norm(
    x: Array, scale: Array, bias: Array | None = None, *, config: NormConfig
) -> Array:
    """Computes ``(x - mean) / sqrt(var + epsilon) * scale + bias`` over the last axis.

    An RMSNorm divides by ``sqrt(mean(x^2) + epsilon)`` and subtracts nothing. The
    statistics are float32, of centred values.

    Args:
        x: ``[*batch, features]`` float32, bfloat16 or float16.
        scale: ``[features]``.
        bias: ``[features]`` for a LayerNorm, None for an RMSNorm.
        config: which norm.

    Returns:
        ``[*batch, features]`` of ``config.out_dtype``, or of x's dtype.

    Raises:
        ValueError: shapes do not fit, or the last axis is empty.
        TypeError: an operand is no float array.

    Example:
        >>> import jax.numpy as jnp
        >>> rms = NormConfig(kind="rmsnorm")
        >>> y = norm(jnp.array([3.0, 4.0]), jnp.ones(2), config=rms)
        >>> [round(float(v), 3) for v in y]
        [0.849, 1.131]

    Source: Ba et al. 2016, "Layer Normalization" (arXiv:1607.06450), equation 3; Zhang
    and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467),
    equation 4.
    """
    check_norm("norm", config, x, scale, bias)
    return _norm(config, *map(_core.array, (x, scale, bias)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(config, x, scale, bias):
    return _forward(config, x, scale, bias)[0]


def _forward(config, x, scale, bias):
    gemm, state = DenseConfig(impl=config.impl), GemmState()
    arrays = (x, scale, bias)
    made = _core.normalize(gemm, config, *arrays, state, backward=False, h=True)
    return made.h, made.extras


def _norm_fwd(config, x, scale, bias):
    h, stats = _forward(config, x, scale, bias)
    types = _core.Types(map(_core.type_of, (x, scale, bias)))
    return h, (x, scale, stats, types)


def _norm_bwd(config, res, dh):
    x, scale, stats, types = res
    gemm = DenseConfig(impl=config.impl)
    return _core.norm_gradients(gemm, config, dh, x, scale, stats, types)


_norm.defvjp(_norm_fwd, _norm_bwd)
