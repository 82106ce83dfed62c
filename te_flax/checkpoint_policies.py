"""What ``jax.checkpoint`` and ``nnx.remat`` keep of te_flax's layers.

Layers name the quantized copies of their operands (``quantization_checkpoint_name``,
"te_quantized" unless given) and the results of a feed-forward block's GEMMs
("ffn1", "ffn2"); attention and users add names of their own.
"""

from collections.abc import Callable
from typing import Any

import jax

from te_flax.functional.config import QUANTIZED_NAME

Policy = Callable[..., Any]


def save_quantized(*names: str) -> Policy:
    """Keeps the quantized operands of the GEMMs, and what carries one of the names.

    The backward pass then quantizes nothing a second time: it multiplies the saved
    codes. Everything else is computed again.

    Args:
        *names: further names to keep: "ffn1" to spare the first GEMM, the
            ``quantization_checkpoint_name`` of layers that have their own.

    Returns:
        A policy for ``nnx.remat(policy=...)``.

    Example:
        >>> import jax, jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.LayerNormMLP(64, 128, rngs=nnx.Rngs(0))
        >>> policy = te.checkpoint_policies.save_quantized("ffn1")
        >>> run = nnx.remat(lambda layer, x: layer(x), policy=policy)
        >>> with te.autocast(te.MXFP8BlockScaling()):
        ...     run(layer, jnp.ones((4, 64))).shape
        (4, 64)
    """
    return jax.checkpoint_policies.save_only_these_names(QUANTIZED_NAME, *names)


def save_gemms(prim: Any, *_: Any, **__: Any) -> bool:
    """Keeps the results of te_flax's GEMMs and of JAX's own dot products.

    The counterpart of ``jax.checkpoint_policies.dots_saveable`` for models whose
    products are te_flax ops.

    Args:
        prim: the primitive whose results may be kept.

    Returns:
        Whether it is a product.

    Example:
        >>> import te_flax as te
        >>> te.checkpoint_policies.save_gemms(jax.lax.dot_general_p)
        True
    """
    return prim is jax.lax.dot_general_p or prim.name.startswith("te_gemm")


def save_quantized_and_gemms(*names: str) -> Policy:
    """Keeps what :func:`save_quantized` and :func:`save_gemms` keep.

    Args:
        *names: further names to keep.

    Returns:
        A policy for ``nnx.remat(policy=...)``.

    Example:
        >>> policy = save_quantized_and_gemms("context")
    """
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(save_quantized(*names), save_gemms)
