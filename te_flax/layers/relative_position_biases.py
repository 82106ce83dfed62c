"""RelativePositionBiases: an attention bias that depends on the distance of tokens."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from te_flax.errors import message
from te_flax.layers import _arguments
from te_flax.layers._params import init_param
from te_flax.typing import Array, Axes, Initializer

_WHERE = "RelativePositionBiases"
DEFAULT_EMBEDDING_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


class RelativePositionBiases(nnx.Module):
    """T5's biases: one number for each head and bucket of distances.

    ``bias[0, n, t, s] = embedding[n, bucket(s - t)]``. Half of the buckets hold one
    distance each; the others grow by a constant factor up to ``max_distance``, and the
    last one holds all that is further. Parameter: ``embedding`` ``[heads, buckets]``.

    Args:
        num_buckets: number of buckets, >= 4 and even.
        max_distance: from where on the last bucket is used, > num_buckets / 2.
        num_heads: number of heads.
        embedding_init: called with the shape of the embedding.
        embedding_axes: a logical axis, or None, for heads and buckets.
        param_dtype: of the embedding.
        dtype: of the biases; None is ``param_dtype``.
        rngs: key for the embedding.

    Raises:
        ValueError: a size is out of range.
        TypeError: a dtype is no float, or logical axes no tuple.

    Example:
        >>> import te_flax as te
        >>> layer = te.RelativePositionBiases(32, 128, 4, rngs=nnx.Rngs(0))
        >>> layer(6, 10).shape
        (1, 4, 6, 10)

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a
    Unified Text-to-Text Transformer" (arXiv:1910.10683), section 2.1;
    TransformerEngine's layer of the same name.
    """

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        num_heads: int,
        *,
        embedding_init: Initializer = DEFAULT_EMBEDDING_INIT,
        embedding_axes: Axes | None = None,
        param_dtype: Any = jnp.float32,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        _arguments.check_options(_WHERE, locals())
        buckets, furthest, heads = _arguments.sizes(
            _WHERE,
            num_buckets=num_buckets,
            max_distance=max_distance,
            num_heads=num_heads,
        )
        if buckets < 4 or buckets % 2:
            rule, remedy = "be even and >= 4", "use 32"
            raise ValueError(message(_WHERE, "num_buckets", rule, buckets, remedy))
        if furthest <= buckets // 2:
            rule, remedy = f"be > num_buckets / 2 = {buckets // 2}", "use 128"
            raise ValueError(message(_WHERE, "max_distance", rule, furthest, remedy))
        _arguments.check_float_dtypes(_WHERE, dtype=dtype, param_dtype=param_dtype)
        self.num_buckets, self.max_distance, self.num_heads = buckets, furthest, heads
        self.dtype = dtype or param_dtype
        shape = (heads, buckets)
        self.embedding = init_param(
            _WHERE,
            embedding_init,
            shape,
            shape,
            embedding_axes=embedding_axes,
            dtype=param_dtype,
            metadata={},
            rngs=rngs,
        )

    def __call__(
        self,
        q_seqlen: int,
        k_seqlen: int,
        bidirectional: bool = True,
        *,
        q_positions: Array | None = None,
        k_positions: Array | None = None,
    ) -> Array:
        """Returns the biases.

        Args:
            q_seqlen: number of queries T.
            k_seqlen: number of keys S.
            bidirectional: whether keys behind the query have buckets of their own;
                otherwise they share that of distance 0.
            q_positions: int ``[T]`` or ``[B, T]``; None counts from 0.
            k_positions: int ``[S]`` or ``[B, S]``; None counts from 0.

        Returns:
            ``[1, num_heads, T, S]``, or ``[B, num_heads, T, S]`` with positions of each
            example.

        Raises:
            ValueError: a length is < 1, or positions have another shape.
        """
        lengths = _arguments.sizes(_WHERE, q_seqlen=q_seqlen, k_seqlen=k_seqlen)
        embedding = self.embedding[...]  # cast last: its gradient adds up many terms
        table = bucket_table(self.num_buckets, self.max_distance, bool(bidirectional))
        if q_positions is None and k_positions is None:
            return _diagonals(embedding, table, *lengths).astype(self.dtype)
        q = _positions("q_positions", q_positions, lengths[0])
        k = _positions("k_positions", k_positions, lengths[1])
        buckets = _lookup(table, k[:, None, :] - q[:, :, None])
        biases = jnp.moveaxis(jnp.take(embedding, buckets, axis=1), 0, 1)
        return biases.astype(self.dtype)


def bucket_table(buckets: int, furthest: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each distance key - query from -furthest to furthest.

    Example:
        >>> bucket_table(4, 3, True).tolist()
        [1, 1, 1, 0, 3, 3, 3]
    """
    each = buckets // 2 if bidirectional else buckets
    exact = each // 2
    back = np.arange(furthest + 1, dtype=np.float32)  # how far the key lies behind
    ratio = np.log(np.maximum(back, 1) / np.float32(exact)) / np.log(furthest / exact)
    grown = exact + ((each - exact) * ratio + 1e-6).astype(np.int32)
    behind = np.where(back < exact, back, np.minimum(grown, each - 1)).astype(np.int32)
    ahead = behind[1:] + each if bidirectional else np.zeros(furthest, np.int32)
    return np.concatenate([behind[::-1], ahead])


def _lookup(table: np.ndarray, distance: Array) -> Array:
    furthest = len(table) // 2
    index = jnp.clip(distance, -furthest, furthest) + furthest
    return jnp.take(jnp.asarray(table), index)


def _diagonals(embedding: Array, table: np.ndarray, t: int, s: int) -> Array:
    """Biases that depend on s - t alone: each row is the one above, moved by one.

    Neither pass gathers or scatters more than one row of each head.
    """
    # Row 0 of a cyclic matrix with one column to spare: 0 .. s - 1, then 1 - t .. -1.
    distance = np.concatenate([np.arange(s), [0], np.arange(1 - t, 0)])
    furthest = len(table) // 2
    buckets = table[np.clip(distance, -furthest, furthest) + furthest]
    row = jnp.take(embedding, jnp.asarray(buckets), axis=1)
    width = t + s
    rows = jnp.broadcast_to(row[:, None], (len(embedding), t, width))
    flat = rows.reshape(len(embedding), t * width)[:, : t * (width - 1)]
    return flat.reshape(1, len(embedding), t, width - 1)[..., :s]


def _positions(name: str, positions: Array | None, length: int) -> Array:
    if positions is None:
        return jnp.arange(length)[None]
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        rule, got = f"have shape [{length}] or [batch, {length}]", positions.shape
        raise ValueError(message(_WHERE, name, rule, got, "give each token one"))
    return positions.reshape(-1, length)
