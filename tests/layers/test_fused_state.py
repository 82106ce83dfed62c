"""The fused layers' codes, residuals and statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import RECIPES, data
from _fused import NORMS, context, gemms, options
from flax import nnx

import te_flax as te

HISTORIES = ("x", "kernel", "dy")


def mlp(norm="layernorm", n=64, mid=96, **kwargs):
    return te.LayerNormMLP(n, mid, rngs=nnx.Rngs(0), **options(norm) | kwargs)


def apart(layer):
    """te.LayerNorm and te.DenseGeneral with the parameters of a fused layer."""
    kind = te.RMSNorm if layer.norm.kind == "rmsnorm" else te.LayerNorm
    centred = layer.norm.zero_centered_gamma
    n = layer.in_features[0]
    norm = kind(n, zero_centered_gamma=centred, dtype=layer.dtype, rngs=nnx.Rngs(0))
    norm.scale = layer.norm.scale
    if layer.norm.kind == "layernorm":
        norm.bias = layer.norm.bias
    dense = te.DenseGeneral(
        n, layer.out_features, use_bias=True, dtype=layer.dtype, rngs=nnx.Rngs(0)
    )
    dense.kernel, dense.bias = layer.kernel, layer.bias
    return norm, dense


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm1p"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_fused_layer_is_the_norm_and_the_dense_layer_to_the_bit(
    recipe, norm, dtype
):
    """h is rounded to dtype before it is quantized, so the codes are those of h.

    That holds for current scaling too: its amax is that of the rounded h.
    """
    layer = te.LayerNormDenseGeneral(
        96,
        40,
        return_layernorm_output=True,
        dtype=dtype,
        rngs=nnx.Rngs(0),
        **options(norm),
    )
    norm, dense = apart(layer)
    x = data((33, 96), 0, dtype)
    with context(recipe):
        for _ in range(2):  # delayed scaling: with the scales of the first call
            y, h = layer(x)
            alone = norm(x)
            want = dense(alone)
    np.testing.assert_array_equal(h, alone)
    np.testing.assert_array_equal(y, want)
    for name in HISTORIES:
        histories = (getattr(m.fp8, name)[...] for m in (layer, dense))
        np.testing.assert_array_equal(*histories)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("names", [("gelu",), ("silu", "linear")])
def test_the_fused_block_is_its_parts_to_the_bit(recipe, names):
    """Callables take the path of two dense layers with an activation between them."""
    fused = mlp(activations=names)
    parts = mlp(activations=tuple(f if f == "linear" else Op(f) for f in names))
    nnx.update(parts, nnx.state(fused, nnx.Param))
    x = data((33, 64))
    with context(recipe):
        for _ in range(2):
            y, want = fused(x), parts(x)
    # Apart, two slices are rounded to dtype before they are multiplied: here float32,
    # in which the block multiplies them too.
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(fused.wi.fp8.x[...], parts.wi.fp8.x[...])


class Op:
    """A named activation behind a callable."""

    def __init__(self, name):
        self.config = te.ActivationConfig(name=name)

    def __call__(self, x):
        return te.activation(jnp.expand_dims(x, -2), config=self.config)


def residual_bytes(layer, x):
    """Bytes that jax.vjp keeps besides parameters, statistics and the input."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def f(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x)

    _, pullback = jax.vjp(f, params, x)
    live = {id(a) for a in jax.tree.leaves((params, rest, x))}
    kept = {id(a): a for a in jax.tree.leaves(pullback) if id(a) not in live}
    return sum(a.nbytes for a in kept.values())


def copies(recipe, m, k, n):
    """Bytes of one copy of x and of the kernel: codes and scales."""
    if recipe == "mxfp8":
        return m * k + k * n + -(-m // 32) * k + k * -(-n // 32)
    return m * k + k * n + 2 * 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_residuals_of_the_dense_layer(recipe, norm):
    """One FP8 copy of each operand, mean and rstd of each row, and x and gamma.

    The last two live on anyway; without jit they are counted as copies.
    """
    m, k, n = 48, 40, 24
    layer = te.LayerNormDenseGeneral(k, n, rngs=nnx.Rngs(0), **NORMS[norm])
    with context(recipe):
        got = residual_bytes(layer, data((m, k)))
    statistics = (2 if norm == "layernorm" else 1) * 4 * m
    assert got == copies(recipe, m, k, n) + statistics + 4 * m * k + 4 * k


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("names", [("gelu",), ("silu", "linear")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_residuals_of_the_block(recipe, names, dtype):
    """One FP8 copy of four operands, the statistics, x and z unquantized, gamma."""
    m, k, mid = 48, 40, 56
    wide = len(names) * mid
    layer = mlp(n=k, mid=mid, activations=names, dtype=dtype)
    with context(recipe):
        got = residual_bytes(layer, data((m, k), 0, dtype))
    x_and_z = m * (k + wide) * jnp.dtype(dtype).itemsize
    quantized = copies(recipe, m, k, wide) + copies(recipe, m, mid, k)
    assert got == quantized + x_and_z + 2 * 4 * m + 4 * k


def amax(a):
    return float(jnp.max(jnp.abs(a)))


def test_delayed_scaling_pushes_what_each_gemm_saw():
    layer = mlp()
    x, dy = data((33, 64)), data((33, 64), 1)

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y * dy), y

    with context("delayed_scaling"):
        te.grad(loss, has_aux=True)(layer, x)
    first = {n: float(getattr(layer.wi.fp8, n)[0]) for n in HISTORIES}
    second = {n: float(getattr(layer.wo.fp8, n)[0]) for n in HISTORIES}
    norm, _ = apart_norm(layer)
    assert first["x"] == amax(norm(x))
    assert first["kernel"] == amax(layer.wi.kernel[...])
    assert second["kernel"] == amax(layer.wo.kernel[...])
    assert second["dy"] == amax(dy)
    mid, dz = by_hand(layer, norm(x), dy)
    assert abs(second["x"] - amax(mid)) < 0.1 * amax(mid)
    assert abs(first["dy"] - amax(dz)) < 0.2 * amax(dz)
    for gemm in gemms(layer):
        for name in HISTORIES:
            history = np.asarray(getattr(gemm.fp8, name)[...])
            assert (history[1:] == 0).all()


def apart_norm(layer):
    norm = te.LayerNorm(64, rngs=nnx.Rngs(0))
    norm.scale, norm.bias = layer.norm.scale, layer.norm.bias
    return norm, None


def by_hand(layer, h, dy):
    """Unquantized gelu(z) and dz."""
    z = h @ layer.wi.kernel[...] + layer.wi.bias[...]
    mid, pull = jax.vjp(jax.nn.gelu, z)
    return mid, pull(dy @ layer.wo.kernel[...].T)[0]


@pytest.mark.parametrize("how", ["eval", "other recipe", "none"])
def test_nothing_is_pushed(how):
    layer = mlp()
    if how == "eval":
        layer.eval()
    recipe = {"eval": "delayed_scaling", "other recipe": "mxfp8"}.get(how)
    with context(recipe):
        te.grad(lambda layer, x: jnp.sum(layer(x)))(layer, data((8, 64)))
    for gemm in gemms(layer):
        assert not any(getattr(gemm.fp8, n)[...].any() for n in HISTORIES)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_bad_batch_does_not_poison_the_next_steps(bad):
    layers = mlp(), mlp()
    x = data((33, 64))
    poisoned = x.at[3, 5].set(bad)

    @nnx.jit
    def step(layer, x):
        def loss(layer, x):
            y = layer(x)
            return jnp.sum(y * y), y

        return te.grad(loss, has_aux=True)(layer, x)

    with context("delayed_scaling"):
        for layer, first in zip(layers, (x, poisoned), strict=True):
            step(layer, x)
            _, y = step(layer, first)
            good = np.arange(33) != 3
            assert np.isfinite(y[good]).all()
            for gemm in gemms(layer):
                for name in HISTORIES:
                    assert np.isfinite(getattr(gemm.fp8, name)[...]).all()
            counted = [int(gemm.fp8.nonfinite[...]) for gemm in gemms(layer)]
            assert all(n > 0 for n in counted) == (first is poisoned)
        results = [jax.tree.leaves(step(layer, x)) for layer in layers]
    for a, b in zip(*results, strict=True):
        assert np.isfinite(b).all()
        # A history of other rows' maxima may scale otherwise: within the format.
        assert np.linalg.norm(a - b) <= 0.2 * np.linalg.norm(a)
