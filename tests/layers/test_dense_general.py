"""DenseGeneral against nnx.LinearGeneral, float64, and the bytes that it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import RECIPES, UNIT, data, wide
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import random_sum_bound, rounding_share


def pair(*args, seed=0, **kwargs):
    """Our layer and nnx's with the same parameters."""
    ours = te.DenseGeneral(*args, rngs=nnx.Rngs(seed), **kwargs)
    theirs = nnx.LinearGeneral(*args, rngs=nnx.Rngs(seed), **kwargs)
    return ours, theirs


SHAPES = [
    ((2, 5, 12), dict(in_features=12, out_features=7, axis=-1)),
    ((5, 3, 4), dict(in_features=(3, 4), out_features=(2, 6), axis=(-2, -1))),
    ((3, 5, 4), dict(in_features=(3, 4), out_features=8, axis=(2, 0))),
    ((12,), dict(in_features=12, out_features=(3, 2), axis=-1)),
    ((0, 12), dict(in_features=12, out_features=4, axis=-1)),
]


@pytest.mark.parametrize(("shape", "kw"), SHAPES)
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_and_results_equal_nnx_without_a_recipe(shape, kw, use_bias):
    bias_init = nnx.initializers.normal(1.0)
    ours, theirs = pair(**kw, use_bias=use_bias, bias_init=bias_init)
    for a, b in zip(
        jax.tree.leaves(nnx.state(ours, nnx.Param)),
        jax.tree.leaves(nnx.state(theirs, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    x = data(shape)
    dy = data(theirs(x).shape, 1)

    def run(model):
        def loss(model, x):
            return jnp.sum(model(x) * dy)

        return (model(x), *nnx.grad(loss, argnums=(0, 1))(model, x))

    got, want = run(ours), run(theirs)
    # Both sum the same float32 products, in an order that XLA may choose.
    length = max(int(np.prod(shape)), 16)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        bound = length * 2.0**-23 * 16
        np.testing.assert_allclose(a, b, rtol=bound, atol=bound)


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_dtypes_are_those_of_nnx(x_dtype, dtype, param_dtype, preferred):
    kw = dict(dtype=dtype, param_dtype=param_dtype, preferred_element_type=preferred)
    x = data((4, 8), dtype=x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = pair(8, 4, **kw)
        want = theirs(x)
        got = ours(x)
        for recipe in RECIPES.values():
            with te.autocast(recipe):
                quantized = ours(x)
            assert quantized.dtype == want.dtype
    assert got.dtype == want.dtype
    # Both round the operands and the result to types no narrower than these: three
    # roundings of half a step on either side, and eight float32 additions.
    kinds = (x_dtype, param_dtype, dtype or param_dtype, got.dtype)
    unit = max(float(jnp.finfo(kind).eps) for kind in kinds)
    a, k = (np.abs(np.asarray(v, np.float64)) for v in (x, theirs.kernel[...]))
    bound = (3 * unit + 9 * 2.0**-24) * (a @ k)
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    assert (error <= bound).all()


def reference64(x, kernel, bias, dy):
    """float64 y, dx, dkernel, dbias of a 2-D dense layer."""
    x, kernel, bias, dy = (np.asarray(a, np.float64) for a in (x, kernel, bias, dy))
    return x @ kernel + bias, dy @ kernel.T, x.T @ dy, dy.sum(0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64, 96, 32), (33, 65, 17), (1, 19, 111)])
def test_both_passes_stay_within_the_error_of_the_format(recipe, shape):
    m, k, n = shape
    layer = te.DenseGeneral(k, n, rngs=nnx.Rngs(0))
    x, dy = data((m, k)), data((m, n), 1)

    def loss(model, x):
        return jnp.sum(model(x) * dy), model(x)

    with te.autocast(RECIPES[recipe]):
        if recipe == "delayed_scaling":  # the first step only fills the histories
            te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
        (grads, dx), y = te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    kernel, bias = jax.tree.leaves(nnx.state(layer, nnx.Param))[::-1]
    want = reference64(x, kernel, bias, dy)
    got = (y, dx, grads["kernel"][...], grads["bias"][...])
    g = UNIT["e4m3" if recipe == "mxfp8" else "e5m2"]
    ux, uk = UNIT["e4m3"], UNIT["e4m3"]
    a_x, a_k, a_dy = (np.abs(np.asarray(v, np.float64)) for v in (x, kernel, dy))
    # |q - v| <= unit * |v| + half a subnormal step, which is below 2^-6 * unit * amax.
    grow = lambda a, u: u * (a + 2.0**-6 * a.max())
    ex, ek, edy = grow(a_x, ux), grow(a_k, uk), grow(a_dy, g)
    product = lambda a, ea, b, eb: a @ eb + ea @ b + ea @ eb
    bounds = (
        product(a_x, ex, a_k, ek),
        product(a_dy, edy, a_k.T, ek.T),
        product(a_x.T, ex.T, a_dy, edy),
        a_dy.sum(0) * m * 2.0**-23,
    )
    for name, a, b, bound in zip(
        ("y", "dx", "dkernel", "dbias"), got, want, bounds, strict=True
    ):
        error = np.abs(np.asarray(a, np.float64) - b)
        assert (error <= bound + 1e-6).all(), (name, (error - bound).max())
        if name != "dbias":  # and it is quantized at all
            assert error.max() > 1e-4 * np.abs(b).max(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_forward_value_is_the_product_of_the_quantized_operands(recipe):
    layer = te.DenseGeneral(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    x = data((40, 64))
    quantizers = RECIPES[recipe].quantizers()
    with te.autocast(RECIPES[recipe]):
        y = layer(x)
    ones = jnp.float32(448.0)  # an empty history means scale 1, that is amax 448
    given = lambda q: {"scale": q.scale(ones)} if recipe == "delayed_scaling" else {}
    row, col = (
        {"k_ndim": 1, "rowwise": by_row, "colwise": not by_row}
        for by_row in (True, False)
    )
    qx = quantizers.x(x, **row, **given(quantizers.x)).rowwise
    kernel = layer.kernel[...]
    qk = quantizers.kernel(kernel, **col, **given(quantizers.kernel)).colwise
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (qx, qk))
    bound = 64 * 2.0**-24 * (np.abs(a) @ np.abs(b))
    assert (np.abs(np.asarray(y, np.float64) - a @ b) <= bound).all()


def residual_bytes(layer, x):
    """Bytes that jax.vjp keeps, parameters and inputs that live on anyway left out."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def f(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x)

    _, pullback = jax.vjp(f, params, x)
    live = {id(a) for a in jax.tree.leaves((params, rest, x))}
    kept = {id(a): a for a in jax.tree.leaves(pullback) if id(a) not in live}
    return sum(a.nbytes for a in kept.values())


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [("delayed_scaling", 2 * 4), ("current_scaling", 2 * 4), ("mxfp8", None)],
)
@pytest.mark.parametrize("shape", [(256, 128, 512), (48, 40, 24)])
def test_residuals_hold_one_fp8_copy_of_each_operand(recipe, scales, shape):
    m, k, n = shape
    layer = te.DenseGeneral(k, n, rngs=nnx.Rngs(0))
    x = data((m, k))
    if scales is None:  # x colwise: blocks along m; kernel rowwise: blocks along n
        scales = -(-m // 32) * k + k * -(-n // 32)
    with te.autocast(RECIPES[recipe]):
        got = residual_bytes(layer, x)
    want = m * k + k * n + scales
    assert got == want, (got, want)


def test_without_a_gradient_only_the_copies_of_the_product_are_made():
    layer = te.DenseGeneral(32, 16, rngs=nnx.Rngs(0))
    layer.eval()
    with te.autocast(te.DelayedScaling()):
        text = str(jax.make_jaxpr(lambda x: layer(x))(data((8, 32))))
    assert "te_quantize_row[" in text
    assert "te_quantize_col[" in text
    assert "te_quantize_rowcol[" not in text


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_sequence_first_equals_batch_first_bit_for_bit(recipe):
    axes = ("batch", "seqlen", "embed")
    first, swapped = (
        te.DenseGeneral(
            32,
            24,
            input_axes=axes,
            transpose_batch_sequence=turned,
            rngs=nnx.Rngs(0),
        )
        for turned in (False, True)
    )
    x, dy = data((4, 16, 32)), data((4, 16, 24), 1)

    def run(model, x, dy):
        def loss(model, x):
            y = model(x)
            return jnp.sum(y * dy), y

        return te.grad(loss, argnums=(0, 1), has_aux=True)(model, x)

    with te.autocast(RECIPES[recipe] if recipe else None, enabled=bool(recipe)):
        (g1, dx1), y1 = run(first, x, dy)
        (g2, dx2), y2 = run(swapped, x.swapaxes(0, 1), dy.swapaxes(0, 1))
    np.testing.assert_array_equal(y1, y2.swapaxes(0, 1))
    np.testing.assert_array_equal(dx1, dx2.swapaxes(0, 1))
    a, b = g1["kernel"][...], g2["kernel"][...]
    if recipe == "mxfp8":  # blocks run along tokens: x and dy are rounded apart
        share = rounding_share([UNIT["e4m3"]] * 4)
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(a)
    else:
        np.testing.assert_allclose(a, b, rtol=0, atol=random_sum_bound(64, a))


def test_float64_goes_through_without_a_recipe():
    with jax.enable_x64(True):
        layer = te.DenseGeneral(3, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        assert layer(wide((2, 3))).dtype == jnp.float64
