"""Power-of-two scales and amax_epsilon, from the recipe to the products of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax.testing import oracle, oracle_block
from te_flax.testing.numerics import close_to, gemm_bound

# amax(x) is about 4 and amax(kernel) about 0.6: 1.0 lifts the kernel's only. Among
# powers of two it takes 3000 to change more than exponents: codes become subnormal.
OPTIONS = [(False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0), (True, 3000.0)]
each = pytest.mark.parametrize(("power_of_2", "epsilon"), OPTIONS)


def layer_and_data():
    layer = te.DenseGeneral(130, 20, use_bias=False, rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (6, 130))
    return layer, x, jax.random.normal(keys[1], (6, 20))


def tensor_operand(x, format, options):
    """Codes times the inverse scale, one for the tensor."""
    scale, inverse = oracle.amax_to_scale(
        oracle.amax(x)[0][0], format=format, margin=0, **options
    )
    codes = oracle.quantize(x, scale, k_ndim=1, row_format=format)[0]
    return codes.astype(np.float64) * np.float64(inverse)


def block_operand(x, format, options, two_dimensional):
    """Codes times the inverse scales of their blocks, which run along the rows."""
    if two_dimensional:
        codes, _, inverse, _ = oracle_block.quantize_block2d(
            x, k_ndim=1, format=format, **options
        )
    else:
        codes, inverse, _ = oracle_block.quantize_block(
            x, k_ndim=1, row_format=format, **options
        )
    rows = 128 if two_dimensional else 1
    (values,) = oracle_block.dequantize_block(
        codes, inverse, k_ndim=1, out_dtype="float32", rows=rows
    )
    return values.astype(np.float64)


def check(got, left, right):
    """The product is that of the operands, within its bound."""
    exact, size = left @ right, np.abs(left) @ np.abs(right)
    bound = gemm_bound(size, left.shape[1], exact, np.float32, terms=4)
    close_to(got, exact, bound)


def run(recipe):
    layer, x, dy = layer_and_data()

    def f(x):
        with te.autocast(recipe):
            return layer(x)

    y, pull = jax.vjp(f, x)
    kernel = np.asarray(layer.kernel[...])
    return np.asarray(x), kernel, np.asarray(dy), y, pull(dy)[0]


@each
def test_current_scaling(power_of_2, epsilon):
    recipe = te.Float8CurrentScaling(
        use_power_2_scales=power_of_2, amax_epsilon=epsilon
    )
    options = {"power_of_2": power_of_2, "epsilon": epsilon}
    x, kernel, dy, y, dx = run(recipe)
    q = [tensor_operand(a, f, options) for a, f in ((x, "e4m3"), (kernel, "e4m3"))]
    check(y, q[0], q[1])
    check(dx, tensor_operand(dy, "e5m2", options), q[1].T)


@each
def test_block_scaling(power_of_2, epsilon):
    recipe = te.Float8BlockScaling(
        "hybrid", use_f32_scales=not power_of_2, amax_epsilon=epsilon
    )
    options = {"power_of_2": power_of_2, "epsilon": epsilon}
    x, kernel, dy, y, dx = run(recipe)
    qk = block_operand(kernel, "e4m3", options, True)
    check(y, block_operand(x, "e4m3", options, False), qk)
    check(dx, block_operand(dy, "e5m2", options, False), qk.T)


def test_the_options_change_the_products():
    """Or the tests above would pass without them."""
    for make in (
        lambda p, e: te.Float8CurrentScaling(use_power_2_scales=p, amax_epsilon=e),
        lambda p, e: te.Float8BlockScaling(use_f32_scales=not p, amax_epsilon=e),
    ):
        results = [np.asarray(run(make(p, e))[3]) for p, e in OPTIONS]
        for i, j in ((0, 1), (0, 2), (1, 4)):
            # Far beyond the bounds above, which are about 1e-5.
            assert np.max(np.abs(results[i] - results[j])) > 1e-3


def test_a_tensor_below_epsilon_keeps_small_codes():
    x = jnp.full((4, 130), 0.5)
    tensor = te.TensorQuantizer(epsilon=8.0)(x, k_ndim=1, rowwise=True, colwise=False)
    block = te.BlockQuantizer(epsilon=8.0)(x, k_ndim=1, rowwise=True, colwise=False)
    assert tensor.rowwise.data[0, 0] == 28  # 0.5 * 448 / 8
    assert float(block.rowwise.scale[0, 0]) == 2.0**-5  # 448 / 8 = 56 down to 32
