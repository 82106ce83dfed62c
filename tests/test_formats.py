"""The error of one rounding, as testing/ball.py derives it for each format."""

import numpy as np
import pytest

import te_flax as te
from te_flax.quantize.nvfp4 import NVFP4Quantizer
from te_flax.testing.ball import Ball
from te_flax.testing.formats import quantized, rotated, rounding_bound

QUANTIZERS = {
    "e4m3": te.TensorQuantizer(),
    "e5m2": te.TensorQuantizer(format="e5m2"),
    "mxfp8": te.MXFP8Quantizer(),
    "mxfp6": te.MXFP6Quantizer(),
    "mxfp6 e3m2": te.MXFP6Quantizer(format="e3m2"),
    "block": te.Float8BlockScaling("hybrid", use_f32_scales=True).quantizers().dy,
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_2d": NVFP4Quantizer(two_dimensional=True),
}


def matrix(decades):
    """Normal values whose blocks of 16 x 16 lie decades apart."""
    rng = np.random.default_rng(0)
    size = np.repeat(np.repeat(10.0 ** rng.uniform(-decades, 0, (8, 24)), 16, 0), 16, 1)
    return (rng.standard_normal(size.shape) * size).astype(np.float32).astype(float)


def share(x, quantizer):
    """The largest error, as a share of the bound."""
    found = quantized(Ball.exact(x), quantizer).value
    return np.max(np.abs(found - x) / rounding_bound(x, quantizer))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("decades", [0, 7])  # block scales of NVFP4 down to 0
def test_the_bound_of_a_rounding_holds_and_is_nearly_reached(name, decades):
    assert 0.85 <= share(matrix(decades), QUANTIZERS[name]) <= 1


@pytest.mark.parametrize("stochastic", [False, True])
def test_errors_have_most_of_the_norm_of_the_noise_in_their_place(stochastic):
    """Noise over +-bound has the norm |bound| / sqrt(3), for dy sqrt(2) of it."""
    x, quantizer = matrix(0), NVFP4Quantizer(stochastic=stochastic)
    random = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)
    found = quantized(Ball.exact(x), quantizer, random=random if stochastic else None)
    error, bound = np.abs(found.value - x), rounding_bound(x, quantizer)
    limit = np.linalg.norm(bound) / 3**0.5 * (2**0.5 if stochastic else 1)
    assert 0.6 * limit <= np.linalg.norm(error) <= 0.9 * limit
    worst = np.max(error / bound)
    assert 1.7 <= worst <= 2 if stochastic else worst <= 1


def test_the_values_of_another_scale_are_beyond_the_bound():
    """A bound that nothing exceeds would hold nothing."""
    x, quantizer = matrix(2), NVFP4Quantizer()
    found = 1.3 * quantized(Ball.exact(x), quantizer).value
    assert np.max(np.abs(found - x) / rounding_bound(x, quantizer)) > 1.2


def test_a_product_of_two_rotated_matrices_is_that_of_the_matrices():
    a, b = (Ball.exact(m) for m in (matrix(0)[:, :33], matrix(1)[:, :33]))
    turned = rotated(a).dot(rotated(b).transposed)
    exact = a.value @ b.value.T
    assert np.max(np.abs(turned.value - exact)) <= 1e-12 * np.abs(exact).max()
