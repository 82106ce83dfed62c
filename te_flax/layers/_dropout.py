"""How a layer makes its dropout, and where a call gets a key from."""

from typing import Any, cast

from flax import nnx

from te_flax.errors import message
from te_flax.layers import _arguments
from te_flax.typing import Array


def make_dropout(
    where: str,
    name: str,
    rate: Any,
    stream: str,
    rngs: nnx.Rngs,
    broadcast_dims: tuple[int, ...] = (),
) -> nnx.Dropout | None:
    """The dropout of a layer, or None where nothing is ever dropped.

    Args:
        where: the layer.
        name: of the argument that holds the rate.
        rate: in [0, 1).
        stream: of ``rngs``, forked.
        rngs: the layer's.
        broadcast_dims: dims along which one draw serves all.
    """
    rate = _arguments.number(where, name, rate, 0, 1, "use 0.0 for none")
    if rate == 0:
        return nnx.data(None)
    if stream not in rngs and "default" not in rngs:
        rule, remedy = f"hold the stream {stream!r}", f"add {stream}= to it"
        raise ValueError(message(where, "rngs", rule, rngs, remedy))
    options: dict[str, Any] = {"rng_collection": stream, "rngs": rngs}
    return nnx.Dropout(rate, broadcast_dims=broadcast_dims, **options)


def dropout_key(dropout: nnx.Dropout | None, deterministic: bool | None) -> Any:
    """A new key, or None where nothing is dropped.

    Args:
        dropout: of the layer.
        deterministic: True drops nothing; None follows ``model.train()``.
    """
    if dropout is None:
        return None
    if _is_off(dropout, deterministic):
        return None
    if dropout.rngs is None:
        rule, remedy = "be given to a layer that keeps no stream", "pass rngs="
        raise ValueError(message(type(dropout).__name__, "rngs", rule, None, remedy))
    return cast(nnx.RngStream, dropout.rngs)()


def _is_off(dropout: nnx.Dropout, deterministic: bool | None) -> bool:
    return bool(dropout.deterministic if deterministic is None else deterministic)


def drop(dropout: nnx.Dropout | None, x: Array, deterministic: bool | None) -> Array:
    """Applies the dropout of a layer."""
    return x if dropout is None else dropout(x, deterministic=deterministic)


def check_dims(where: str, name: str, dims: tuple[int, ...], ndim: int) -> None:
    """Raises ValueError unless the dims are those of an array of so many."""
    if any(not -ndim <= dim < ndim for dim in dims):
        rule, remedy = f"be dims of x, which has {ndim}", "count them from 0"
        raise ValueError(message(where, name, rule, dims, remedy))


def given_key(layer: Any, rngs: Any, deterministic: bool | None) -> Array | None:
    """A key from what a call was given, or None where nothing is dropped.

    Args:
        layer: the attention, which may hold a stream ``rngs``.
        rngs: Rngs, a stream, a key or None.
        deterministic: True drops nothing; None follows ``model.train()``.
    """
    dropout = layer.core_attention.dropout
    if dropout is None or _is_off(dropout, deterministic):
        return None
    rngs = layer.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs[layer.dropout_rng_name]
    return rngs() if isinstance(rngs, nnx.RngStream) else rngs
