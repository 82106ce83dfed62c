"""Which position each query and key has, and how they carry it."""

import functools
from typing import Any

import jax.numpy as jnp

from te_flax.errors import message
from te_flax.functional.rotary import rotary_embedding
from te_flax.typing import Array


def position_pair(layer: Any, positions: Any, query: Array, key: Array) -> Any:
    """The positions of queries and keys, int32 ``[B, T]`` and ``[B, S]``, or None.

    Args:
        layer: the attention; a single array is that of queries alone for "cross".
        positions: what a call was given: an array, a pair or None.
        query: of the call.
        key: of the call.

    Raises:
        ValueError: a shape does not fit.
    """
    if positions is None:
        return None
    pair = positions
    if not isinstance(positions, tuple | list):
        pair = (positions, None if layer.attention_type == "cross" else positions)
    where = type(layer).__name__
    if len(pair) != 2:
        rule, remedy = "be an array or a pair", "write (queries, keys)"
        got = f"{len(pair)} arrays"
        raise ValueError(message(where, "positions", rule, got, remedy))
    sequence = 0 if layer.transpose_batch_sequence else 1
    batch, arrays = query.shape[1 - sequence], []
    for given, array in zip(pair, (query, key), strict=True):
        count = array.shape[sequence]
        own = jnp.arange(count, dtype=jnp.int32) if given is None else given
        own = jnp.asarray(own)
        if own.shape not in ((count,), (1, count), (batch, count)):
            rule, got = f"have shape {(count,)} or {(batch, count)}", own.shape
            remedy = "give each token one"
            raise ValueError(message(where, "positions", rule, got, remedy))
        arrays.append(jnp.broadcast_to(own, (batch, count)))
    return tuple(arrays)


def rotate(layer: Any, query: Array, key: Array, pair: Any) -> tuple[Array, Array]:
    """Queries and keys with their positions in them, where the layer wants that."""
    if not layer.enable_rotary_pos_emb:
        return query, key
    turn = functools.partial(
        rotary_embedding,
        windows=layer.rotary_pos_emb_windows,
        group_method=layer.rotary_pos_emb_group_method,
        layout="TBNH" if layer.transpose_batch_sequence else "BTNH",
    )
    q, k = pair or (None, None)
    return turn(query, q), turn(key, k)
