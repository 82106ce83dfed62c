"""Shape and dtype vocabulary shared by the whole library."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]
Initializer = Callable[..., Any]

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def wider(a: Any, b: Any) -> Any:
    """The dtype that holds two float dtypes, whatever promotion the user allows."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)
