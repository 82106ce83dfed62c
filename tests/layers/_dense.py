"""What the tests of DenseGeneral share."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import te_flax as te

RECIPES = {
    "delayed_scaling": te.DelayedScaling(),
    "current_scaling": te.Float8CurrentScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
}
# One rounding of an operand to the format, as a share of its amax or its block's.
UNIT = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}


def data(shape, seed=0, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def grid(names, devices):
    """The shape of a mesh of one axis, or of two whose second, tp, is of size 2."""
    return (devices,) if len(names) == 1 else (devices // 2, 2)


def wide(shape) -> Any:
    """A float64 host array."""
    return np.ones(shape, np.float64)
