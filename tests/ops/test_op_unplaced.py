"""Arrays that were never placed on the mesh in context, as most users have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.ops.quantize import QUANTIZE_ROWCOL

A, E = AxisType.Auto, AxisType.Explicit


def quantize(x, scale):
    formats = {"row_format": "e4m3", "col_format": "e4m3"}
    return QUANTIZE_ROWCOL(x, scale, **formats, k_ndim=1)


@pytest.mark.parametrize("kinds", [(A, A), (E, E), (E, A)])
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("placed", [False, True])
def test_unplaced_operands(kinds, how, placed):
    values = np.random.default_rng(0).standard_normal((64, 64))
    x, scale = jnp.asarray(values, jnp.float32), jnp.float32(2)
    want = quantize(x, scale)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)
    if placed:  # the scale still is not
        x = jax.device_put(x, NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh):
        got = how(quantize)(x, scale)
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
