"""How a layer makes a parameter: initializer on the flat shape, axes, metadata."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from te_flax.errors import message
from te_flax.sharding import param_metadata
from te_flax.typing import Axes, Initializer, Shape


def init_param(
    where: str,
    init: Initializer,
    shape: Shape,
    flat_shape: Shape,
    *,
    dtype: Any,
    metadata: Mapping[str, Any],
    rngs: nnx.Rngs,
    **named_axes: Axes | None,
) -> nnx.Param:
    """Returns a parameter of ``shape``, initialized as one of ``flat_shape``.

    ``named_axes`` holds one argument of the layer, ``kernel_axes=...`` or so.
    """
    ((axes_name, axes),) = named_axes.items()
    if axes is not None and len(axes) != len(shape):
        raise ValueError(
            message(
                where,
                axes_name,
                f"name each of the {len(shape)} dims of {shape}",
                axes,
                "use None for dims that are not sharded",
            )
        )
    value = init(rngs.params(), flat_shape, dtype)
    metadata = param_metadata(axes, metadata)
    if isinstance(value, nnx.VariableMetadata):
        value.raw_value = jnp.reshape(value.raw_value, shape)
        return nnx.Param(value, **metadata)
    return nnx.Param(jnp.reshape(value, shape), **metadata)
