"""Low-rank adaptation: a product through a narrow middle, added to a GEMM."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from te_flax.typing import Array


class Lora(NamedTuple):
    """The two factors.

    Attributes:
        a: ``[*in, rank]``.
        b: ``[rank, *out]``.

    Example:
        >>> Lora(jnp.ones((4, 2)), jnp.zeros((2, 3))).a.shape
        (4, 2)
    """

    a: Array
    b: Array


def low_rank(x: Array, lora: Lora, scale: float) -> Array:
    """Computes ``scale * (x . a) . b``.

    Args:
        x: ``[*batch, *in]``.
        lora: factors ``[*in, rank]`` and ``[rank, *out]``.
        scale: alpha / rank.

    Returns:
        ``[*batch, *out]`` of x's dtype.

    Example:
        >>> lora = Lora(jnp.ones((4, 2)), jnp.ones((2, 3)))
        >>> low_rank(jnp.ones((5, 4)), lora, 0.5)[0].tolist()
        [4.0, 4.0, 4.0]

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"
    (arXiv:2106.09685), equation 3.
    """
    n = lora.a.ndim - 1
    contract = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
    narrow = lax.dot_general(x, lora.a.astype(x.dtype), (contract, ((), ())))
    contract = ((narrow.ndim - 1,), (0,))
    wide = lax.dot_general(narrow, lora.b.astype(x.dtype), (contract, ((), ())))
    return wide * jnp.asarray(scale, x.dtype)
