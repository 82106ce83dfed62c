"""The keys and values of earlier tokens, for decoding one token after the other."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.experimental import checkify

from te_flax.errors import message
from te_flax.layers import _arguments
from te_flax.layers._batch import batch_of
from te_flax.typing import Array, Shape

CACHED = ("cached_key", "cached_value", "cache_index")


class Cached(NamedTuple):
    """What a call of attention reads after its own tokens were added.

    Attributes:
        key: of all slots, in the layout of the layer.
        value: likewise.
        queries: int32 ``[T]``, the slots of the call's own tokens.
        keys: int32 ``[S]``, all slots.
        overrun: bool ``[]``, whether a token found no slot.
    """

    key: Array
    value: Array
    queries: Array
    keys: Array
    overrun: Array

    def as_causal(self, batch: int) -> dict[str, Any]:
        """Arguments of attention for which a token sees the slots up to its own."""
        pair = (self.queries, self.keys)
        positions = tuple(jnp.broadcast_to(p, (batch, p.shape[0])) for p in pair)
        return {"mask_type": "causal", "positions": positions}


class KVCache(nnx.Module):
    """What a layer of attention adds to be able to decode.

    The layer has ``num_kv_heads``, ``head_dim`` and ``transpose_batch_sequence``. The
    variables have the names and the type of :class:`flax.nnx.MultiHeadAttention`:
    ``cached_key``, ``cached_value`` and ``cache_index``, each an ``nnx.Cache``.
    """

    num_kv_heads: int
    head_dim: int
    transpose_batch_sequence: bool
    cached_key: Any
    cached_value: Any
    cache_index: Any

    def init_cache(self, input_shape: Shape, dtype: Any = jnp.float32) -> None:
        """Makes an empty cache, in place of the one that may be there.

        Args:
            input_shape: ``[*batch, max_length, features]``, or sequence first
                ``[max_length, *batch, features]``; the shape of an input with all
                tokens that will come.
            dtype: of the cached keys and values.

        Raises:
            ValueError: the shape has less than two dims, or one of them is < 1.
            TypeError: dtype is no float dtype.
        """
        where = type(self).__name__
        _arguments.check_float_dtypes(where, dtype=dtype)
        sizes = _arguments.ints(where, "input_shape", input_shape)
        least = 3 if self.transpose_batch_sequence else 2
        if len(sizes) < least or min(sizes) < 1:
            rule = f"have at least {least} dims >= 1"
            remedy = "pass the shape of an input of the full length"
            raise ValueError(message(where, "input_shape", rule, sizes, remedy))
        batch = batch_of(where, sizes, 1, self.transpose_batch_sequence)
        shape = (*batch.joined_shape(sizes)[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def _no_cache(self) -> None:
        for name in CACHED:
            setattr(self, name, nnx.data(None))

    def slots(self, tokens: int) -> tuple[Array, Array]:
        """The slots that the next tokens take, and all slots.

        Args:
            tokens: how many tokens come.

        Returns:
            int32 ``[tokens]`` and int32 ``[max_length]``.

        Raises:
            ValueError: there is no cache, or no token.
        """
        where = type(self).__name__
        if self.cached_key is None:
            rule, remedy = "hold a cache to decode", "call init_cache first"
            raise ValueError(message(where, "the layer", rule, "none", remedy))
        if tokens < 1:
            rule, remedy = "be >= 1 in decoding", "leave out the call"
            raise ValueError(message(where, "the tokens", rule, tokens, remedy))
        length = self.cached_key.shape[0 if self.transpose_batch_sequence else 1]
        keys = jnp.arange(length, dtype=jnp.int32)
        return self.cache_index[...] + jnp.arange(tokens, dtype=jnp.int32), keys

    def _append(self, key: Array, value: Array) -> Cached:
        """Adds the keys and values of a call to the cache."""
        axis = 0 if self.transpose_batch_sequence else 1
        queries, keys = self.slots(key.shape[axis])
        self._check(key, axis)
        overrun = self._overrun(queries, keys.shape[0])
        start = [jnp.zeros((), jnp.int32)] * key.ndim
        start[axis] = queries[0]
        for variable, new in ((self.cached_key, key), (self.cached_value, value)):
            held = variable[...]
            variable[...] = lax.dynamic_update_slice(
                held, new.astype(held.dtype), start
            )
        self.cache_index[...] = queries[-1] + 1
        key, value = (
            variable[...].astype(key.dtype)
            for variable in (self.cached_key, self.cached_value)
        )
        return Cached(key, value, queries, keys, overrun)

    def _check(self, key: Array, axis: int) -> None:
        """Raises ValueError unless the keys of a call fit the cache."""
        found, held = list(key.shape), list(self.cached_key.shape)
        length = held.pop(axis)
        if found.pop(axis) > length or found != held:
            rule = f"fit the cache of keys of shape {self.cached_key.shape}"
            remedy = "call init_cache with the batch and the length that are needed"
            where, got = type(self).__name__, f"keys of shape {key.shape}"
            raise ValueError(message(where, "inputs", rule, got, remedy))

    def _overrun(self, queries: Array, length: int) -> Array:
        """Whether a token finds no slot: an error where the number is known."""
        where, rule = type(self).__name__, f"be <= the cache's length {length}"
        remedy = "call init_cache with a longer shape"
        overrun = queries[-1] >= length
        if not isinstance(overrun, Tracer):
            if overrun:
                got = int(queries[-1]) + 1
                raise ValueError(message(where, "the tokens", rule, got, remedy))
            return overrun
        text = message(where, "the tokens", rule, "{count}", remedy)
        checkify.debug_check(~overrun, text, count=queries[-1] + 1)
        return overrun


def check_decode(where: str, inputs: dict[str, Any], whole: dict[str, Any]) -> None:
    """Raises ValueError for arguments that only whole sequences have.

    Args:
        where: the layer.
        inputs: inputs_q, inputs_k and inputs_v; the cache holds what the first gave.
        whole: the other arguments.
    """
    for name in ("inputs_k", "inputs_v"):
        if inputs[name] is not None and inputs[name] is not inputs["inputs_q"]:
            rule, got = "be None in decoding", f"shape {inputs[name].shape}"
            remedy = "pass decode=False: other keys are read whole, without a cache"
            raise ValueError(message(where, name, rule, got, remedy))
    for name, value in whole.items():
        if value is not None:
            rule, remedy = "be None in decoding", "pass mask= for the cache's slots"
            got = type(value).__name__
            raise ValueError(message(where, name, rule, got, remedy))
