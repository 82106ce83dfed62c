"""The layers against float64 under every recipe, and what they keep, on a GPU."""

import jax
import jax.numpy as jnp
import pytest
from _fused import RECIPES, context
from _gpu import GPU
from flax import nnx
from test_dense_general import (
    test_both_passes_stay_within_the_error_of_the_format as test_dense,
)
from test_layer_norm_dense_general import (
    test_both_passes_against_float64 as test_layer_norm_dense,
)
from test_layer_norm_mlp import (
    test_both_passes_against_float64 as test_layer_norm_mlp,
)
from test_transformer_layer import (
    test_it_trains_under_every_recipe as test_transformer_layer,
)

import te_flax as te

pytestmark = GPU
__all__ = [
    "test_dense",
    "test_layer_norm_dense",
    "test_layer_norm_mlp",
    "test_transformer_layer",
]


@pytest.fixture(autouse=True)
def exact_products():
    """Float32 products without a recipe are TensorFloat-32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


def held(recipe, layer, x):
    """Bytes in use for the residuals of one forward pass of a bfloat16 layer."""
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    @jax.jit
    def forward(params, rest, x):
        def call(params, x):
            with context(recipe):
                return nnx.merge(graphdef, params, rest, copy=True)(x)

        return jax.vjp(call, params, x)

    jax.block_until_ready(forward(params, rest, x))
    device = jax.devices("cuda")[0]
    before = device.memory_stats()["bytes_in_use"]
    y, pull = forward(params, rest, x)
    jax.block_until_ready((y, pull))
    return device.memory_stats()["bytes_in_use"] - before - y.nbytes


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"nvfp4"}))
def test_residuals_take_half_the_bytes_of_bfloat16(recipe):
    """One byte an element and the scales, where bfloat16 keeps two."""
    layer = te.DenseGeneral(
        2048, 2048, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (4096, 2048), jnp.bfloat16)
    wide = held(None, layer, x)
    assert wide >= 2 * (4096 + 2048) * 2048
    assert held(recipe, layer, x) <= (0.5 + 1 / 32) * wide + 2**16
