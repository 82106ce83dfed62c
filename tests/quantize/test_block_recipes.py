"""Block scaling, NVFP4 and MXFP6 in the products of a dense layer, against float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.ops.hadamard import HADAMARD
from te_flax.testing import oracle, oracle_block, oracle_nvfp4
from te_flax.testing.numerics import close_to, gemm_bound, sharded_bound
from te_flax.testing.patterns import same_bits

RECIPES = {
    "block": te.Float8BlockScaling(),
    "block float32 hybrid": te.Float8BlockScaling("hybrid", use_f32_scales=True),
    "nvfp4": te.NVFP4BlockScaling(),
    "nvfp4 plain": te.NVFP4BlockScaling(
        disable_rht=True,
        disable_stochastic_rounding=True,
        disable_2d_quantization=True,
    ),
    "mxfp6": te.MXFP6BlockScaling("hybrid"),
}
each = pytest.mark.parametrize("name", RECIPES)
BOTH = {"rowwise": True, "colwise": True}


def data(shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


def operands(m, k, n):
    return data((*m, *k)), data((*k, *n), 1), data((*m, *n), 2)


def codes_of(tensor):
    """The values that a product reads: transformed ones where it reads those."""
    if tensor.hadamard:
        m_ndim = tensor.ndim - tensor.k_ndim
        shape = (2 * tensor.data.shape[-1], *tensor.shape[m_ndim:])
        tensor = dataclasses.replace(tensor, hadamard=False, logical_shape=shape)
        return np.asarray(tensor.dequantize(), np.float64)
    values = np.asarray(tensor.dequantize(), np.float64)
    return values.reshape(-1, *values.shape[values.ndim - tensor.k_ndim :])


def quantized(recipe, x, kernel, dy, k_ndim):
    """Every copy of every operand, as matrices of float64."""
    n_ndim = kernel.ndim - k_ndim
    found = []
    for array, quantizer, ndim in zip(
        (x, kernel, dy), recipe.quantizers(), (k_ndim, n_ndim, n_ndim), strict=True
    ):
        pair = quantizer(array, k_ndim=ndim, **BOTH)
        found.append([codes_of(t) for t in (pair.rowwise, pair.colwise)])
    return found


def dense(recipe, k_ndim=1):
    x, kernel, dy = recipe.quantizers()
    config = te.DenseConfig(x=x, kernel=kernel, dy=dy, split_accumulator=(True,) * 3)
    return lambda x, kernel: te.dense(x, kernel, k_ndim=k_ndim, config=config)[0]


@each
@pytest.mark.parametrize(
    ("m", "k", "n"), [((3, 57), (5, 30), (7, 29)), ((40,), (33,), (1,))], ids=str
)
def test_each_product_is_that_of_the_dequantized_operands(name, m, k, n):
    recipe = RECIPES[name]
    x, kernel, dy = operands(m, k, n)
    y, pull = jax.vjp(jax.jit(dense(recipe, len(k))), x, kernel)
    dx, dkernel = pull(dy)
    (x_row, x_col), (k_row, k_col), (dy_row, dy_col) = quantized(
        recipe, x, kernel, dy, len(k)
    )
    rows, width = int(np.prod(m)), int(np.prod(k))
    for got, left, right in (
        (y, x_row.reshape(rows, -1), k_col.reshape(width, -1)),
        (dx, dy_row.reshape(rows, -1), k_row.reshape(width, -1).T),
        (dkernel, x_col.reshape(len(x_col), -1).T, dy_col.reshape(len(dy_col), -1)),
    ):
        exact, size = left @ right, np.abs(left) @ np.abs(right)
        # Two roundings of dequantized values, two products with global scales.
        bound = gemm_bound(size, left.shape[1], exact, np.float32, terms=4)
        close_to(np.asarray(got).reshape(exact.shape), exact, bound)


SHARE = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m3": 2.0**-4, "e3m2": 2.0**-3}


@each
def test_dequantize_gives_the_array_back(name):
    x = data((3, 35, 2, 70))
    for quantizer in RECIPES[name].quantizers():
        pair = quantizer(x, k_ndim=2, **BOTH)
        for tensor in (pair.rowwise, pair.colwise):
            assert tensor.shape == x.shape
            back = tensor.dequantize()
            assert back.shape == x.shape
            # e2m1: half a step is at most 1 of 6 scales, and 6 scales lack at most
            # 1/16 of the block's largest value; the transform keeps the norm.
            share = SHARE.get(tensor.format, 1 / 6 + 1 / 16)
            error = np.linalg.norm(np.asarray(back - x))
            assert error <= share * np.linalg.norm(x)
            for dtype in ("bfloat16", "float16"):
                assert tensor.dequantize(dtype).dtype == dtype


def test_the_backward_pass_keeps_packed_codes():
    x, kernel, _ = operands((64,), (96,), (128,))
    _, pull = jax.vjp(dense(RECIPES["mxfp6"]), x, kernel)
    kept = jax.tree.leaves(pull)
    assert {a.dtype for a in kept} == {jnp.dtype(jnp.uint8)}
    codes = 64 * 72 + 96 * 96  # x in blocks along its tokens, the kernel along N
    assert sum(a.nbytes for a in kept) == codes + 2 * 96 + 96 * 4


def test_codes_and_scales_are_those_of_the_oracles():
    x = data((3, 50, 40))
    pair = te.BlockQuantizer(epsilon=0.5)(x, k_ndim=1, **BOTH)
    want = oracle_block.quantize_block(
        *(np.asarray(x),),
        **{"k_ndim": 1, "power_of_2": True, "epsilon": 0.5},
        **{"row_format": "e4m3", "col_format": "e4m3"},
    )
    got = (pair.rowwise.data, pair.rowwise.scale, pair.colwise.data, pair.colwise.scale)
    for a, b in zip((*got, pair.amax), want, strict=True):
        same_bits(a, b)
    pair = te.NVFP4Quantizer()(x, k_ndim=1, **BOTH)
    scale, inverse = oracle_nvfp4.scale(oracle.amax(x)[0][0])
    for tensor, array in (
        (pair.rowwise, np.asarray(x)),
        (pair.colwise, np.asarray(x).reshape(150, 40).T),
    ):
        want = oracle_nvfp4.quantize_row(array, scale, k_ndim=1)
        same_bits(tensor.data, want[0])
        same_bits(tensor.scale, want[1])
        same_bits(tensor.global_scale, inverse)


def test_the_transformed_copy_has_a_scale_of_its_own():
    x = data((50, 40))
    pair = te.NVFP4Quantizer(hadamard=True)(x, k_ndim=1, **BOTH)
    rotated = np.asarray(HADAMARD(x, k_ndim=1)[0])
    scale, inverse = oracle_nvfp4.scale(oracle.amax(rotated)[0][0])
    want = oracle_nvfp4.quantize_row(rotated, scale, k_ndim=2)
    same_bits(pair.colwise.data, want[0])
    same_bits(pair.colwise.scale, want[1])
    same_bits(pair.colwise.global_scale, inverse)
    assert pair.rowwise.global_scale != pair.colwise.global_scale


def test_the_copies_of_2d_blocks_share_codes_and_scales():
    x = data((140, 150))
    for quantizer in (
        te.BlockQuantizer(two_dimensional=True),
        te.NVFP4Quantizer(two_dimensional=True),
    ):
        pair = quantizer(x, k_ndim=1, **BOTH)
        same_bits(pair.rowwise.scale, np.asarray(pair.colwise.scale))
        same_bits(pair.rowwise.dequantize(), np.asarray(pair.colwise.dequantize()))
        one = quantizer(x, k_ndim=1, rowwise=False, colwise=True)
        assert one.rowwise is None
        same_bits(one.colwise.data, np.asarray(pair.colwise.data))


def test_the_transform_does_not_change_an_exact_product():
    """Integers that e2m1 holds after the transform: one token in 16 is not zero."""
    x, dy = np.zeros((48, 8), np.float32), np.zeros((48, 4), np.float32)
    x[5], dy[5] = 3, 2
    x[40], dy[40] = -3, 2
    quantizer = te.NVFP4Quantizer(hadamard=True)
    left, right = (
        quantizer(jnp.asarray(a), k_ndim=1, rowwise=False, colwise=True).colwise
        for a in (x, dy)
    )
    got = te.gemm(left, right, contracting_dims=((0,), (0,)))
    close_to(got, x.T @ dy, gemm_bound(12.0, 48, 12.0, np.float32, terms=4))


def test_stochastic_rounding_follows_the_key():
    x = data((20, 40))
    quantizer = te.NVFP4Quantizer(stochastic=True, hadamard=True)
    call = lambda key: jax.tree.map(np.asarray, quantizer(x, k_ndim=1, key=key, **BOTH))
    one, same, other = (call(jax.random.key(n)) for n in (0, 0, 1))
    plain = te.NVFP4Quantizer(hadamard=True)(x, k_ndim=1, **BOTH)
    without = quantizer(x, k_ndim=1, **BOTH)
    for copy in ("rowwise", "colwise"):
        first = getattr(one, copy).data
        same_bits(getattr(same, copy).data, first)
        assert (getattr(other, copy).data != first).mean() > 0.1
        same_bits(getattr(without, copy).data, np.asarray(getattr(plain, copy).data))
    # The copies draw apart from each other: with the same bits the codes of x and of
    # its transpose would round the same elements alike.
    square = jnp.full((16, 16), 0.7).at[0, 0].set(6.0)
    pair = te.NVFP4Quantizer(stochastic=True)(
        square, k_ndim=1, key=jax.random.key(0), **BOTH
    )
    assert (pair.rowwise.data != pair.colwise.data).any()


def test_the_mean_of_many_draws_is_the_array():
    """Within 6 standard deviations of a mean of n draws, each within one step."""
    x, n = data((4, 32)).at[:, ::16].set(4.0), 4096
    quantizer = te.NVFP4Quantizer(stochastic=True)

    def draw(key):
        pair = quantizer(x, k_ndim=1, rowwise=True, colwise=False, key=key)
        return pair.rowwise.dequantize()

    keys = jax.random.split(jax.random.key(1), n)
    mean = np.mean(np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64), 0)
    tensor = quantizer(x, k_ndim=1, rowwise=True, colwise=False).rowwise
    unit = np.asarray(tensor.scale, np.float64) * float(tensor.global_scale)
    unit = np.repeat(unit, 16, 1)
    expected = np.clip(np.asarray(x, np.float64), -6 * unit, 6 * unit)
    step = 2 * unit  # of the widest gap; its deviation is at most half of it
    close_to(mean, expected, step * (6 * 0.5 / np.sqrt(n) + 2.0**-20))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@each
def test_on_a_mesh(name, kind):
    """The codes do not depend on the mesh, so the gradients differ by sums alone."""
    recipe = RECIPES[name]
    x, kernel, dy = operands((8, 256), (128,), (256,))
    f = lambda x, kernel, dy: jax.vjp(dense(recipe), x, kernel)[1](dy)
    want = jax.jit(f)(x, kernel, dy)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        specs = (P("dp"), P(None, "tp"), P("dp", None, "tp"))
        placed = [
            jax.device_put(a, jax.NamedSharding(mesh, s))
            for a, s in zip((x, kernel, dy), specs, strict=True)
        ]
        got = jax.jit(f)(*placed)
    sizes = (
        jnp.abs(dy) @ jnp.abs(kernel).T,
        jnp.einsum("bmk,bmn->kn", jnp.abs(x), jnp.abs(dy)),
    )
    for a, b, size, k in zip(got, want, sizes, (256, 2048), strict=True):
        bound = gemm_bound(2 * np.asarray(size), k, b, np.float32, terms=4)
        close_to(a, b, sharded_bound(bound))


TENSOR = te.TensorQuantizer()(jnp.ones((4, 32)), k_ndim=1, **BOTH)
BAD = [
    (
        lambda b, n: te.gemm(b.rowwise, TENSOR.rowwise, contracting_dims=((1,), (1,))),
        "gemm: rhs must be scaled like lhs (block_1d), got tensor; ",
    ),
    (
        lambda b, n: te.gemm(
            te.BlockQuantizer(two_dimensional=True)(
                jnp.ones((4, 32)), k_ndim=1, **BOTH
            ).rowwise,
            b.rowwise,
            contracting_dims=((1,), (1,)),
        ),
        "gemm: rhs must be scaled like lhs (block_2d), got block_1d; ",
    ),
    (
        lambda b, n: te.gemm(
            n.colwise,
            te.NVFP4Quantizer()(jnp.ones((4, 32)), k_ndim=1, **BOTH).colwise,
            contracting_dims=((0,), (0,)),
        ),
        "gemm: rhs must have hadamard=True like lhs, got False; transform both",
    ),
    (
        lambda b, n: te.gemm(
            n.rowwise,
            te.NVFP4Quantizer()(jnp.ones((4, 31)), k_ndim=1, **BOTH).rowwise,
            contracting_dims=((1,), (1,)),
        ),
        "gemm: rhs must have contracted sizes (32,) like lhs, got (31,); ",
    ),
    (
        lambda b, n: te.BlockQuantizer(format="e2m1"),
        "BlockQuantizer: format must be e4m3 or e5m2, got 'e2m1'; ",
    ),
    (
        lambda b, n: te.BlockQuantizer(epsilon=-1.0),
        "BlockQuantizer: epsilon must be a finite float32 >= 0, got -1.0; ",
    ),
    (
        lambda b, n: te.BlockQuantizer(two_dimensional=1),
        "BlockQuantizer: two_dimensional must be True or False, got 1; ",
    ),
    (
        lambda b, n: te.NVFP4Quantizer(stochastic=1),
        "NVFP4Quantizer: stochastic must be True or False, got 1; ",
    ),
    (
        lambda b, n: te.NVFP4Quantizer(two_dimensional=True, hadamard=True),
        "NVFP4Quantizer: hadamard must be False with two_dimensional, got True; ",
    ),
    (
        lambda b, n: te.NVFP4Quantizer()(
            jnp.ones((4, 8)), k_ndim=1, rowwise=False, colwise=False
        ),
        "NVFP4Quantizer: rowwise, colwise must be True for at least one of them",
    ),
]


@pytest.mark.parametrize(("call", "text"), BAD, ids=range(len(BAD)))
def test_bad_arguments_are_named(call, text):
    x = jnp.ones((4, 32))
    block = te.BlockQuantizer()(x, k_ndim=1, **BOTH)
    nvfp4 = te.NVFP4Quantizer(hadamard=True)(x, k_ndim=1, **BOTH)
    with pytest.raises(ValueError, match=re.escape(text)):
        call(block, nvfp4)
