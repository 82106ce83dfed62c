"""LayerNorm and RMSNorm against float64 and flax.nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import data, wide
from _fused import flat
from flax import nnx

import te_flax as te
from te_flax.testing import chain
from te_flax.testing.ball import Ball
from te_flax.testing.numerics import close_to, sharded_bound

KINDS = {"layernorm": te.LayerNorm, "rmsnorm": te.RMSNorm}
NNX = {"layernorm": nnx.LayerNorm, "rmsnorm": nnx.RMSNorm}


def pair(kind, n, **kwargs):
    """Our layer and nnx's, parameters drawn alike."""
    draw = nnx.initializers.normal(1.0)
    kwargs = {"scale_init": draw} | kwargs
    if kind == "layernorm":
        kwargs = {"bias_init": draw} | kwargs
    return (
        KINDS[kind](n, rngs=nnx.Rngs(0), **kwargs),
        NNX[kind](n, rngs=nnx.Rngs(0), use_fast_variance=False, **kwargs),
    )


@nnx.jit
def step(layer, x, dy):
    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    (grads, dx), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return {"y": y, "dx": dx} | {n: v[...] for n, v in grads.items()}


def ball(kind, x, dy, layer, epsilon=1e-6, zero_centered_gamma=False):
    """The float64 results of a norm, by the names of `step`."""
    scale = np.ones(x.shape[-1]) - zero_centered_gamma
    if layer.scale is not None:
        scale = np.asarray(layer.scale[...], np.float64)
    beta = None
    if kind == "layernorm" and layer.bias is not None:
        beta = np.asarray(layer.bias[...], np.float64)
    options = {"epsilon": epsilon, "zero_centered_gamma": zero_centered_gamma}
    saved = chain.norm_fwd(kind, flat(x), scale, beta, **options)
    factor = scale + zero_centered_gamma
    dx, dscale, dbias = chain.norm_bwd(kind, Ball.exact(flat(dy)), saved, factor)
    return {"y": saved.h, "dx": dx, "scale": dscale, "bias": dbias}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 128), (2, 33, 19), (3, 1), (111,), (4, 1024)])
def test_both_passes_equal_nnx_and_float64(kind, shape):
    ours, theirs = pair(kind, shape[-1])
    x, dy = data(shape), data(shape, 1)
    got, want = step(ours, x, dy), step(theirs, x, dy)
    exact = ball(kind, x, dy, ours)
    assert set(got) == set(want)
    for name, value in got.items():
        assert (value.shape, value.dtype) == (want[name].shape, want[name].dtype)
        close_to(value.reshape(exact[name].value.shape), *parts(exact[name]))
        if shape[-1] > 1:  # one centred value is 0, its statistics are rounding alone
            limit = sharded_bound(exact[name].radius).reshape(value.shape)
            close_to(value, np.asarray(want[name]), limit)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_under_strict_promotion(kind):
    layer = KINDS[kind](8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(data((2, 8), dtype=jnp.bfloat16)).dtype == jnp.bfloat16


def parts(ball):
    return ball.value, ball.radius


@pytest.mark.parametrize("kind", KINDS)
def test_zero_centred_gamma_is_one_more(kind):
    layer = KINDS[kind](32, zero_centered_gamma=True, rngs=nnx.Rngs(0))
    assert not layer.scale[...].any()
    layer.scale[...] = data((32,), 2)
    _, theirs = pair(kind, 32)
    theirs.scale[...] = layer.scale[...] + 1.0
    if kind == "layernorm":
        theirs.bias[...] = layer.bias[...]
    x, dy = data((8, 32)), data((8, 32), 1)
    got, want = step(layer, x, dy), step(theirs, x, dy)
    exact = ball(kind, x, dy, layer, zero_centered_gamma=True)
    for name, value in got.items():
        close_to(value, *parts(exact[name]))
        close_to(value, np.asarray(want[name]), sharded_bound(exact[name].radius))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_can_be_left_out(kind, use_scale, use_bias):
    kwargs = {"use_scale": use_scale}
    if kind == "layernorm":
        kwargs["use_bias"] = use_bias
    ours, theirs = pair(kind, 24, **kwargs)
    x, dy = data((5, 24)), data((5, 24), 1)
    for a, b in zip(
        jax.tree.leaves(nnx.state(ours, nnx.Param)),
        jax.tree.leaves(nnx.state(theirs, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    got, want = step(ours, x, dy), step(theirs, x, dy)
    assert set(got) == set(want)
    exact = ball(kind, x, dy, ours)
    for name, value in got.items():
        close_to(value, *parts(exact[name]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("param_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("parameters", [True, False])
def test_dtypes_are_those_of_nnx(kind, x_dtype, dtype, param_dtype, parameters):
    kw = dict(dtype=dtype, param_dtype=param_dtype, use_scale=parameters)
    if kind == "layernorm":
        kw["use_bias"] = parameters
    x = data((4, 8), dtype=x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = pair(kind, 8, **kw)
        got, want = ours(x), theirs(x)
    assert got.dtype == want.dtype
    exact = ball(kind, x, x, ours)["y"].rounded(got.dtype)
    close_to(got, *parts(exact))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("x_dtype", [np.float32, np.float64])
def test_float64_goes_through(kind, param_dtype, x_dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ours, theirs = pair(kind, 6, param_dtype=param_dtype)
        x = np.arange(12).reshape(2, 6).astype(x_dtype) + wide((2, 6)).astype(x_dtype)
        got, want = ours(x), theirs(jnp.asarray(x))
        assert got.dtype == want.dtype
        unit = max(float(jnp.finfo(t).eps) for t in (got.dtype, x_dtype))
        np.testing.assert_allclose(got, want, rtol=64 * unit, atol=64 * unit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_an_empty_batch_has_zero_gradients(kind, shape):
    ours, _ = pair(kind, 16)
    found = step(ours, jnp.ones(shape), jnp.ones(shape))
    assert found["y"].shape == found["dx"].shape == shape
    assert not found["scale"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_is_added_to_the_mean_square(kind):
    ours, _ = pair(kind, 16, epsilon=0.5)
    x, dy = data((3, 16)), data((3, 16), 1)
    exact = ball(kind, x, dy, ours, epsilon=0.5)
    for name, value in step(ours, x, dy).items():
        close_to(value, *parts(exact[name]))


def test_the_variance_is_that_of_the_centred_values():
    ours, _ = pair("layernorm", 64)
    x = data((4, 64)) + 4e4
    exact = ball("layernorm", x, x, ours)["y"]
    close_to(ours(x), *parts(exact))
    assert exact.radius.max() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_jit_equals_eager(kind):
    ours, _ = pair(kind, 48)
    x = data((7, 48))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(ours, x), ours(x))


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_first_turns_its_axes_round(kind):
    axes = ("batch", "seqlen", "embed")
    kw = {"input_axes": axes, "transpose_batch_sequence": True}
    ours = KINDS[kind](8, rngs=nnx.Rngs(0), **kw)
    x = data((8, 4, 8))
    mesh = jax.make_mesh((4,), ("dp",))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(dp="dp"))
    plain = ours(x)
    with jax.set_mesh(mesh), rules:
        turned = jax.jit(lambda x: ours(x))(x)
    assert turned.sharding.shard_shape(x.shape) == (8, 1, 8)
    np.testing.assert_array_equal(plain, turned)
