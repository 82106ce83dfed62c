"""Activations alone, plain and gated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from te_flax.functional import _core
from te_flax.functional._checks import check_dtypes
from te_flax.functional.config import IDENTITY, ActivationConfig, DenseConfig
from te_flax.ops.activation import ACT_BWD, ACT_FWD
from te_flax.ops.activation import ACTIVATIONS as ACTIVATIONS
from te_flax.ops.activation import PLAIN as PLAIN
from te_flax.quantize.fused import produce
from te_flax.typing import Array


def activation(x: Array, *, config: ActivationConfig) -> Array:
    """Computes ``f(x0)``, or ``f(x0) * g(x1)`` for a gated one.

    Args:
        x: ``[*batch, n_act, features]`` float32, bfloat16 or float16, one slice for
            each name.
        config: which activation.

    Returns:
        ``[*batch, features]`` of ``config.out_dtype``, or of x's dtype.

    Raises:
        ValueError: the name is unknown or x has another number of slices.
        TypeError: x is no float array.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[2.0, -2.0], [3.0, 3.0]])
        >>> activation(x, config=ActivationConfig(name="relu,linear")).tolist()
        [6.0, 0.0]

    Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units"
    (arXiv:1606.08415), section 2; Shazeer 2020, "GLU Variants Improve Transformer"
    (arXiv:2002.05202), equation 5.
    """
    check_dtypes("activation", DenseConfig(), x=x)
    return _activation(config, jnp.asarray(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activation(config, x):
    return activate(config, x)


def activate(config: ActivationConfig, x: Array) -> Any:
    """The forward pass alone, for functionals with a backward pass of their own."""
    return _run(config, ACT_FWD, x, out_dtype=config.out_dtype or x.dtype.name)


def _run(config, family, *arrays, out_dtype: str):
    made = produce(
        IDENTITY,
        family,
        *arrays,
        k_ndim=1,
        rowwise=True,
        colwise=False,
        out_dtype=out_dtype,
        impl=config.impl,
        **config.attrs,
    )
    return made.h


def _activation_fwd(config, x):
    return activate(config, x), x


def _activation_bwd(config, x, dy):
    dx = _run(config, ACT_BWD, dy, x, out_dtype=x.dtype.name)
    return (_core.cotangent(dx, x),)


_activation.defvjp(_activation_fwd, _activation_bwd)
