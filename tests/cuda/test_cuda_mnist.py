"""The MNIST example learns on a GPU under every recipe, as it does on the CPU."""

import jax
import pytest
from _gpu import GPU
from test_mnist_convergence import SEEDS, check_learning

from te_flax.recipe.presets import presets

pytestmark = GPU


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam raises a float to an integer power, which strict mode refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("recipe", presets())
def test_a_recipe_learns_as_well_as_float32(recipe):
    with jax.default_device(jax.devices("cuda")[0]):
        check_learning(recipe, SEEDS[:1])
