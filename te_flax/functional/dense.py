"""The dense product y = f(x) . kernel + bias, f the identity or a norm."""

import functools
from typing import Any, NamedTuple

import jax

from te_flax.functional import _core
from te_flax.functional._checks import check_gemm, check_norm
from te_flax.functional.config import DenseConfig, GemmState, NormConfig
from te_flax.typing import Array


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    k_ndim: int = 1,
    config: DenseConfig | None = None,
    state: GemmState | None = None,
) -> tuple[Array, tuple[Array | None, Array | None]]:
    """Computes ``y = x . kernel + bias`` with quantized operands in both passes.

    ``dx = dy . kernel^T`` and ``dkernel = x^T . dy`` read the copies that the forward
    pass made; nothing is quantized twice and no unquantized operand is kept.

    Args:
        x: ``[*batch, *in]`` float32, bfloat16 or float16.
        kernel: ``[*in, *out]``.
        bias: ``[*out]`` or None.
        k_ndim: number of dims in ``in``.
        config: quantizers and options; None multiplies unquantized.
        state: scales known from earlier steps, mailbox and key, as the recipe asks.

    Returns:
        y ``[*batch, *out]``, and the amax ``[2]`` (largest finite magnitude, non-finite
        flag) of x and of the kernel, None where none was measured.

    Raises:
        ValueError: ranks or contracted sizes do not match.
        TypeError: an operand is no float32, bfloat16 or float16 array (float64 only
            unquantized and with ``jax_enable_x64``).

    Example:
        >>> import jax.numpy as jnp
        >>> y, _ = dense(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4))
        >>> y.shape, float(y[0, 0])
        ((2, 4), 4.0)
    """
    config, state = config or DenseConfig(), state or GemmState()
    check_gemm("dense", x, kernel, bias, k_ndim, config)
    static = _Static(config, None, k_ndim, False)
    arrays = [_core.array(a) for a in (x, None, None, kernel, bias)]
    found: Any = _dense(static, *arrays, state)
    y, _, amaxes = found
    return y, amaxes


def layernorm_dense(
    x: Array,
    scale: Array,
    norm_bias: Array | None,
    kernel: Array,
    bias: Array | None = None,
    *,
    norm: NormConfig | None = None,
    config: DenseConfig | None = None,
    state: GemmState | None = None,
    return_layernorm_output: bool = False,
) -> tuple[Array, Array | None, tuple[Array | None, Array | None]]:
    """Computes ``y = norm(x) . kernel + bias``; the norm writes the quantized operand.

    Where the recipe's scales are known beforehand or local, the norm's result is never
    written unquantized.

    Args:
        x: ``[*batch, in]`` float32, bfloat16 or float16.
        scale: ``[in]``, gamma of the norm.
        norm_bias: ``[in]``, beta of a LayerNorm; None for an RMSNorm.
        kernel: ``[in, *out]``.
        bias: ``[*out]`` or None.
        norm: which norm; None is a LayerNorm with epsilon 1e-6.
        config: quantizers and options; None multiplies unquantized.
        state: scales known from earlier steps, mailbox and key, as the recipe asks.
        return_layernorm_output: whether norm(x) is returned too.

    Returns:
        y ``[*batch, *out]``, norm(x) or None, and the amax ``[2]`` of norm(x) and of
        the kernel, None where none was measured.

    Raises:
        ValueError: ranks or sizes do not match.
        TypeError: an operand is no float32, bfloat16 or float16 array.

    Example:
        >>> import jax.numpy as jnp
        >>> x, ones = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
        >>> layernorm_dense(x, ones, 0 * ones, jnp.ones((3, 4)))[0].shape
        (2, 4)
    """
    norm, config = norm or NormConfig(), config or DenseConfig()
    check_norm("layernorm_dense", norm, x, scale, norm_bias)
    check_gemm("layernorm_dense", x, kernel, bias, 1, config)
    static = _Static(config, norm, 1, return_layernorm_output)
    arrays = [_core.array(a) for a in (x, scale, norm_bias, kernel, bias)]
    return _dense(static, *arrays, state or GemmState())


class _Static(NamedTuple):
    """The static argument of both passes."""

    config: DenseConfig
    norm: NormConfig | None
    k_ndim: int
    return_h: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(static, x, scale, norm_bias, kernel, bias, state):
    """Forward pass alone: only the copies that the forward product reads."""
    arrays = (x, scale, norm_bias, kernel, bias)
    return _forward(static, *arrays, state, backward=False)[0]


def _forward(static, x, scale, norm_bias, kernel, bias, state, *, backward: bool):
    config, norm, k_ndim, return_h = static
    if norm is None:
        made = _core.quantize_input(config, x, k_ndim, state, backward=backward)
    else:
        made = _core.normalize_input(
            config, norm, x, scale, norm_bias, state, backward=backward, h=return_h
        )
    wide = (norm and norm.out_dtype) or x.dtype
    y, kernel_amax, saved = _core.multiply(
        config,
        made.quantized,
        kernel,
        bias,
        k_ndim,
        state,
        config.out_dtype or wide,
        backward=backward,
    )
    h = made.h if return_h else None
    return (y, h, (made.quantized.amax, kernel_amax)), saved, made.extras


def _dense_fwd(static, x, scale, norm_bias, kernel, bias, state):
    arrays = (x, scale, norm_bias, kernel, bias)
    out, saved, stats = _forward(static, *arrays, state, backward=True)
    types = (*map(_core.type_of, arrays), _core.mail_types(state))
    kept = (x, scale, stats) if static.norm else None
    return out, (saved, kept, _core.Types(types))


def _dense_bwd(static, res, cotangents):
    config, norm, k_ndim, return_h = static
    saved, kept, types = res
    x_type, scale_type, norm_bias_type, kernel_type, bias_type, mail_types = types
    dy, dh_extra, _ = cotangents
    n_ndim = kernel_type.ndim - k_ndim
    with_bias = bias_type is not None
    h_type = _core.type_after(norm, x_type)
    made = _core.quantize_cotangent(config, saved, dy, n_ndim, h_type, dbias=with_bias)
    dx, dkernel = _core.gradients(
        config, saved, made.quantized, k_ndim, h_type, kernel_type
    )
    dscale = dnorm_bias = None
    if norm is not None:
        x, scale, stats = kept
        dh = _core.add(dx, dh_extra) if return_h else dx
        dx, dscale, dnorm_bias = _core.norm_gradients(
            config, norm, dh, x, scale, stats, (x_type, scale_type, norm_bias_type)
        )
    dbias = _core.cotangent(made.dbias, bias_type)
    dstate = _core.state_cotangent(config, made, mail_types)
    dx = _core.cotangent(dx, x_type)
    return dx, dscale, dnorm_bias, dkernel, dbias, dstate


_dense.defvjp(_dense_fwd, _dense_bwd)
