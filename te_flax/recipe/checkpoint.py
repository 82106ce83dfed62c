"""What of the FP8 state goes into a checkpoint, and how it comes back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from te_flax.errors import message
from te_flax.recipe.state import Fp8Mailbox, Fp8Record, Fp8Rounding, Fp8Stat


def checkpoint_filter(path: tuple, value: Any) -> bool:
    """The filter of what belongs into a checkpoint: all but mailboxes and records.

    Args:
        path: path of the variable in the model.
        value: the variable.

    Returns:
        False for a mailbox (it is always zero) and for what ``te.record`` adds, else
        True.

    Example:
        >>> from flax import nnx
        >>> import te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> sorted(nnx.state(model, te.checkpoint_filter)["fp8"])
        ['dy', 'kernel', 'nonfinite', 'rounding', 'x']
    """
    return not isinstance(value, Fp8Mailbox | Fp8Record)


def restore_state(model: Any, state: Any) -> None:
    """Updates a model from a checkpoint, whatever FP8 state that one holds.

    Statistics that the checkpoint lacks (one of a plain nnx model, say) become
    zero, as in a new layer; a history of another length keeps its newest entries
    and is filled up with zeros. A missing seed of stochastic rounding is kept.
    Mailboxes in the checkpoint are ignored. All other variables must be there, with
    their shapes. The values keep the dtype and the sharding of the model's.

    Args:
        model: the module; updated in place.
        state: an ``nnx.State`` or nested mapping of arrays, as it was saved or as
            Orbax returns it without a target.

    Returns:
        None.

    Raises:
        ValueError: a variable is missing, unknown, or has another shape.

    Example:
        >>> from flax import nnx
        >>> import te_flax as te
        >>> plain = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(1))
        >>> te.restore_state(model, nnx.state(plain))
        >>> bool((model.kernel[...] == plain.kernel[...]).all())
        True
    """
    target = nnx.to_flat_state(nnx.state(model))
    source = _flatten(state, {tuple(map(str, path)) for path, _ in target})
    updates, missing = [], []
    for path, leaf in target:
        value = source.pop(tuple(map(str, path)), None)
        if isinstance(leaf, Fp8Mailbox | Fp8Record):
            continue
        if value is None and isinstance(leaf, Fp8Stat):
            value = jnp.zeros(leaf.shape, leaf.dtype)
        if value is None and isinstance(leaf, Fp8Rounding):
            continue
        if value is None:
            missing.append("/".join(map(str, path)))
            continue
        updates.append((path, _fit(path, leaf, value)))
    unknown = ["/".join(path) for path in source]
    for names, rule in ((missing, "hold"), (unknown, "not hold")):
        if names:
            got = "a state without them" if rule == "hold" else "a state with them"
            remedy = "restore into a model of the same structure"
            rule = f"{rule} {', '.join(names)}"
            raise ValueError(message("restore_state", "state", rule, got, remedy))
    nnx.update(model, nnx.from_flat_state(updates))


def _flatten(state: Any, known: set[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """Paths (as strings) to arrays.

    Orbax writes a variable as {"value": array}: that last level is dropped, unless
    the model knows a variable of this very name.
    """
    flat: dict[tuple[str, ...], Any] = {}

    def visit(path: tuple[str, ...], node: Any) -> None:
        if isinstance(node, nnx.Variable):
            visit(path, node.get_value())
        elif isinstance(node, Mapping):
            for key, child in node.items():
                visit((*path, str(key)), child)
        elif isinstance(node, list | tuple):
            for key, child in enumerate(node):
                visit((*path, str(key)), child)
        elif node is not None:
            wrapped = len(path) > 1 and path[-1] == "value" and path not in known
            flat[path[:-1] if wrapped else path] = node

    visit((), state)
    return flat


def _fit(path: tuple, leaf: Any, value: Any) -> Any:
    """Gives a restored array the length, dtype and sharding of the model's."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, Fp8Stat) and value.shape[:-1] == shape[:-1] and shape:
        value = jnp.asarray(value)[..., : shape[-1]]
        short = shape[-1] - value.shape[-1]
        value = jnp.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, short)])
    if tuple(value.shape) != shape:
        raise ValueError(
            message(
                "restore_state",
                "/".join(map(str, path)),
                f"have shape {shape}",
                tuple(value.shape),
                "restore into a model of the same sizes",
            )
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    value = jnp.asarray(value, leaf.dtype)
    held = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    sharding = getattr(held, "sharding", None)
    return value if sharding is None else jax.device_put(value, sharding)
