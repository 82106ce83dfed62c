"""What one call of attention is made of: static options and arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from te_flax.typing import Array

WHERE = "dot_product_attention"
LAYOUTS = ("BTNH", "BNTH", "TBNH")
MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "causal_bottom_right",
    "padding_causal",
    "padding_causal_bottom_right",
)
SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")
INTEGERS = (  # fields of Operands
    "segment_ids",
    "positions",
    "q_seqlen",
    "kv_seqlen",
    "offsets",
    "page_table",
)
Pair = tuple[Array, Array]
Band = tuple[int | None, int | None]


class Options(NamedTuple):
    """The static part of a call.

    Attributes:
        layout: order of the dims of q, k, v and of the result.
        mask_type: one of MASK_TYPES.
        left: how many positions back a query sees; None is all.
        right: how many positions ahead, causal masks included; None is all.
        scale: factor of q . k.
        softmax_type: one of SOFTMAX_TYPES.
        dropout_rate: share of the probabilities that is dropped.
        score_mod: function of the scores, or None.
        max_segments: largest segment id, or None.
        return_residual: whether the log-sum-exp is returned too.
        band: (low, high) between which the number of a key less that of a query that
            sees it is known to lie; None is no limit.
    """

    layout: str
    mask_type: str
    left: int | None
    right: int | None
    scale: float
    softmax_type: str
    dropout_rate: float
    score_mod: Callable[..., Array] | None
    max_segments: int | None
    return_residual: bool
    band: Band = (None, None)

    @property
    def bottom_right(self) -> bool:
        """Whether the last query is aligned with the last key."""
        return self.mask_type.endswith("bottom_right")


class Operands(NamedTuple):
    """The arrays of a call, in the user's layout; None where there is none.

    Attributes:
        q: queries, B, T, N, H in the order of the layout.
        k: keys, B, S, K, H, or pages of them.
        v: values, B, S, K, Hv, or pages of them.
        bias: ``[B|1, N|1, T|1, S|1]``.
        mask: likewise, boolean or added to the scores.
        alibi_slopes: ``[N]``.
        segment_ids: of queries and keys.
        positions: of queries and keys.
        q_seqlen: ``[B]`` or ``[B, M]``.
        kv_seqlen: likewise.
        offsets: of queries and keys, ``[B, M + 1]``.
        sink: ``[N]``.
        dropout_key: uint32 ``[2]``, the words of a random key.
        score_mod_args: trees of arrays.
        page_table: of keys and values, ``[B, pages]``.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    mask: Array | None
    alibi_slopes: Array | None
    segment_ids: Pair | None
    positions: Pair | None
    q_seqlen: Array | None
    kv_seqlen: Array | None
    offsets: Pair | None
    sink: Array | None
    dropout_key: Array | None
    score_mod_args: tuple[Any, ...]
    page_table: Pair | None


class Sizes(NamedTuple):
    """The dims of a call, whatever its layout.

    Attributes:
        batch: B.
        queries: T.
        keys: S.
        heads: N.
        kv_heads: K, a divisor of N.
        qk_dim: H of q and k.
        v_dim: H of v and of the result.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


def sizes_of(layout: str, operands: Operands) -> Sizes:
    """Reads the dims of q, k and v."""
    at = layout.index
    q, k, v = operands.q.shape, operands.k.shape, operands.v.shape
    keys = k[at("T")]
    if operands.page_table is not None:
        keys *= operands.page_table[0].shape[1]
    return Sizes(
        batch=q[at("B")],
        queries=q[at("T")],
        keys=keys,
        heads=q[at("N")],
        kv_heads=k[at("N")],
        qk_dim=q[3],
        v_dim=v[3],
    )


def standard_slopes(heads: int) -> Array:
    """The slopes of ALiBi: ``2^(-8 i / N)`` for a power of two N.

    Between two powers of two the rest come from the odd entries of the larger one.

    Args:
        heads: N.

    Returns:
        float32 ``[N]``.

    Example:
        >>> [float(s) for s in standard_slopes(3)]
        [0.0625, 0.00390625, 0.25]

    Source: Press et al. 2022, "Train Short, Test Long" (arXiv:2108.12409), section 3.
    """
    whole = 1 << max(heads.bit_length() - 1, 0)
    exponents = [-8 * (i + 1) / whole for i in range(whole)]
    exponents += [-4 * (i + 1) / whole for i in range(0, 2 * whole, 2)]
    return jnp.asarray([2.0**e for e in exponents[:heads]], jnp.float32)
