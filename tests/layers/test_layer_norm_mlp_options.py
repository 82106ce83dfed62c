"""LayerNormMLP's options: dropout, low-rank adaptation, callables, transforms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import RECIPES, data
from _dense import UNIT as FORMAT
from _fused import context, options
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

import te_flax as te
from te_flax.testing.numerics import UNIT, chain_bound, close_to, rounding_share


def mlp(n=32, mid=64, **kwargs):
    return te.LayerNormMLP(n, mid, rngs=nnx.Rngs(0), **options("layernorm") | kwargs)


def ones_block(rate, **kwargs):
    """A block whose activation results are all 1 and whose wo is the identity."""
    layer = te.LayerNormMLP(
        8,
        128,
        out_features=128,
        enable_layernorm=False,
        activations=("linear",),
        intermediate_dropout_rate=rate,
        rngs=nnx.Rngs(params=0, dropout=1, noise=2),
        **kwargs,
    )
    layer.wi.kernel[...] = jnp.full((8, 128), 1 / 8)
    layer.wo.kernel[...] = jnp.eye(128)
    return layer


def test_dropout_drops_its_share_and_keeps_the_mean():
    rate, tokens = 0.25, 256
    layer = ones_block(rate)
    y = np.asarray(layer(jnp.ones((tokens, 8))))
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=8 * UNIT)
    # A binomial share is beyond 5 standard deviations once in 10^6 draws.
    spread = math.sqrt(rate * (1 - rate) / y.size)
    assert abs((1 - kept.mean()) - rate) <= 5 * spread
    assert (layer(jnp.ones((tokens, 8))) != y).any()  # the next call draws anew


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("names", [("linear",), (jax.nn.gelu,)])
def test_the_gradient_is_zero_exactly_where_it_dropped(recipe, names):
    layer = ones_block(0.5)
    layer.activations = names
    if callable(names[0]):
        layer.activation = None
    x = jnp.ones((64, 8))

    def loss(layer):
        y = layer(x)
        return jnp.sum(y * (1 + jnp.arange(128.0)) / 128), y

    with context(recipe):
        grads, y = te.grad(loss, has_aux=True)(layer)
    # y = mid: d loss / d wi sums over the tokens that kept the unit.
    share = np.asarray(y != 0).sum(0)
    per_kept = np.asarray(grads["wi"]["bias"][...]) / np.maximum(share, 1)
    slope = float(jax.grad(jax.nn.gelu)(1.0)) if callable(names[0]) else 1.0
    weight = (1 + np.arange(128)) / 128 * 2 * slope
    # dy, of e5m2 under the hybrid recipes, and the kernel's 1 are rounded once each.
    rtol = 2.0**-3 + 2.0**-4 + 2.0**-6 if recipe else 64 * UNIT
    np.testing.assert_allclose(per_kept[share > 0], weight[share > 0], rtol=rtol)


def test_where_a_unit_is_dropped_for_all_tokens_its_gradients_are_zero():
    layer = ones_block(0.5, intermediate_hidden_dropout_dims=(0,))

    def loss(layer):
        y = layer(jnp.ones((16, 8)))
        return jnp.sum(y * y), y

    grads, y = te.grad(loss, has_aux=True)(layer)
    dropped = np.asarray(y[0] == 0)
    assert 0 < dropped.sum() < 128
    np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))
    assert not grads["wi"]["bias"][...][dropped].any()
    assert grads["wi"]["bias"][...][~dropped].all()
    assert not grads["wo"]["kernel"][...][dropped].any()


def test_dropout_can_be_turned_off():
    layer, x = ones_block(0.5), jnp.ones((4, 8))
    assert (layer(x) == 0).any()
    assert (layer(x, deterministic=True) == 1).all()
    layer.eval()
    assert (layer(x) == 1).all()
    assert (layer(x, deterministic=False) == 0).any()
    layer.train()
    assert (layer(x) == 0).any()


def test_the_stream_of_the_dropout_is_named():
    a = ones_block(0.5, intermediate_dropout_rng_name="noise")
    b = ones_block(0.5, intermediate_dropout_rng_name="noise")
    c = ones_block(0.5)
    x = jnp.ones((4, 8))
    first = a(x)
    np.testing.assert_array_equal(first, b(x))
    assert (first != c(x)).any()
    nnx.reseed(a, noise=2)
    np.testing.assert_array_equal(a(x), first)


def adapted(names, **kwargs):
    layer = mlp(
        activations=names,
        enable_low_rank_adaptation=True,
        low_rank_adaptation_dim=4,
        low_rank_adaptation_alpha=6.0,
        **kwargs,
    )
    for gemm, seed in ((layer.wi, 5), (layer.wo, 6)):
        gemm.lora_b[...] = data(gemm.lora_b[...].shape, seed) * 0.3
    return layer


def plain_block(p, x, activation, scale):
    """The block with low-rank additions in plain JAX."""
    mean = x.mean(-1, keepdims=True)
    std = jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    h = (x - mean) / std * p["norm"]["scale"] + p["norm"]["bias"]

    def dense(q, v):
        contract = lambda a, b: jnp.tensordot(a, b, 1)
        low = contract(contract(v, q["lora_a"]), q["lora_b"])
        return contract(v, q["kernel"]) + q["bias"] + scale * low

    return dense(p["wo"], activation(dense(p["wi"], h)))


LORA = {
    "gelu": (("gelu",), jax.nn.gelu),
    "gated": (
        ("silu", "linear"),
        lambda z: jax.nn.silu(z[..., 0, :]) * z[..., 1, :],
    ),
    "callable": ((jnp.tanh,), jnp.tanh),
}


@pytest.mark.parametrize("how", LORA)
@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "mxfp8"])
def test_low_rank_adaptation_against_plain_jax(how, recipe):
    names, activation = LORA[how]
    layer = adapted(names)
    x, dy = data((16, 32)), data((16, 32), 1)
    loss = lambda layer, x: jnp.sum(layer(x) * dy)
    with context(recipe):
        run = nnx.jit(te.grad(loss, argnums=(0, 1)))
        for _ in range(2):  # delayed scaling: with scales of its own
            grads, dx = run(layer, x)
    p = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    reference = lambda p, x: jnp.sum(plain_block(p, x, activation, 1.5) * dy)
    with jax.default_matmul_precision("highest"):
        want, want_dx = jax.jit(jax.grad(reference, (0, 1)))(p, x)
    got = {**nnx.to_pure_dict(grads), "dx": dx}
    want = {**want, "dx": want_dx}
    if recipe:
        # A gradient passes through dy, kernel, x and kernel (of z), dz, x.
        dy_unit = FORMAT["e4m3" if recipe == "mxfp8" else "e5m2"]
        share = rounding_share([dy_unit] * 2 + [FORMAT["e4m3"]] * 4)
        if how == "callable":  # 1 - tanh(z)^2 changes by up to 2 |z| of what z does
            share *= 2
    else:  # norm there and back, wi, wo back, wi back, tokens
        share = float(chain_bound([32, 32, 32, 32, 64, 16], 1.0))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)


def test_low_rank_factors_start_without_effect():
    layer = mlp(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)
    assert layer.wi.lora_scale == 1.0
    assert not layer.wi.lora_b[...].any()
    plain = mlp()
    nnx.update(plain, nnx.state(layer, lambda path, _: "lora" not in str(path)))
    np.testing.assert_array_equal(layer(data((4, 32))), plain(data((4, 32))))


@pytest.mark.parametrize("recipe", [None, "current_scaling"])
def test_callables_take_the_unfused_path(recipe):
    fused, apart = mlp(), mlp(activations=(jax.nn.gelu,))
    assert apart.activation is None
    nnx.update(apart, nnx.state(fused, nnx.Param))
    x = data((16, 32))
    with context(recipe):
        y, want = fused(x), apart(x)
    share = 0.05 if recipe else 64 * UNIT
    assert np.linalg.norm(y - want) <= share * np.linalg.norm(want)


def test_a_pair_that_no_op_knows_is_multiplied():
    names = ("silu", "gelu")
    layer = mlp(activations=names)
    assert layer.activation is None
    x = data((16, 32))
    z = layer.wi(layer.norm(x))
    mid = jax.nn.silu(z[:, 0]) * jax.nn.gelu(z[:, 1])
    close_to(layer(x), np.asarray(layer.wo(mid)), 64 * UNIT)


@pytest.mark.parametrize("names", [("gelu",), (jnp.tanh,)])
def test_the_norms_output_and_its_gradient(names):
    layer = mlp(activations=names, return_layernorm_output=True)
    x, dy, dh = data((16, 32)), data((16, 32), 1), data((16, 32), 2)

    def loss(layer, x, dy, dh):
        y, h = layer(x)
        return jnp.sum(y * dy) + jnp.sum(h * dh)

    run = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    both, y_only, h_only = (
        run(layer, x, *d) for d in ((dy, dh), (dy, 0 * dh), (0 * dy, dh))
    )
    norm = te.LayerNorm(32, rngs=nnx.Rngs(0))
    norm.scale, norm.bias = layer.norm.scale, layer.norm.bias
    np.testing.assert_array_equal(layer(x)[1], norm(x))
    _, pull = jax.vjp(lambda x: norm(x), x)
    close_to(h_only[1], np.asarray(pull(dh)[0]), 64 * UNIT)
    for parts in zip(*map(jax.tree.leaves, (both, y_only, h_only)), strict=True):
        a, b, c = (np.asarray(v, np.float64) for v in parts)
        close_to(a, b + c, 2.0**-18 * (np.abs(b) + np.abs(c)).max())


def test_without_the_norm():
    layer = mlp(enable_layernorm=False, return_layernorm_output=True)
    x = data((8, 32))
    y, h = layer(x)
    np.testing.assert_array_equal(h, x)
    want = layer.wo(jax.nn.gelu(layer.wi(x)))
    close_to(y, np.asarray(want), 64 * UNIT * np.abs(want).max())
    grads = nnx.grad(lambda m, x: jnp.sum(m(x)[0]))(layer, x)
    assert "norm" not in nnx.to_pure_dict(grads)


def saved(layer, x, policy, recipe, capsys):
    """The lines that describe what remat with a policy keeps besides its arguments."""
    graph, state = nnx.split(layer)
    fn = lambda state, x: jnp.sum(nnx.merge(graph, state)(x) ** 2)
    fn = jax.checkpoint(fn, policy=policy)
    with context(recipe):
        print_saved_residuals(fn, state, x)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "from the argument" not in line]


@pytest.mark.parametrize("names", [("gelu",), (jnp.tanh,)])
@pytest.mark.parametrize("where", ["ffn1", "ffn2"])
def test_policies_see_the_results_of_the_gemms(names, where, capsys):
    save = jax.checkpoint_policies.save_only_these_names
    layer = mlp(activations=names, **{f"{where}_ckpt_name": "mine"})
    layer.eval()
    run = lambda name: saved(layer, data((16, 32)), save(name), None, capsys)
    assert any("named 'mine'" in line for line in run("mine"))
    assert not any("named" in line for line in run(where))


@pytest.mark.parametrize("names", [("gelu",), (jnp.tanh,)])
def test_policies_see_the_quantized_copies(names, capsys):
    save = jax.checkpoint_policies.save_only_these_names
    x = data((16, 32))
    for name, kwargs in (
        ("te_quantized", {}),
        ("mine", {"quantization_checkpoint_name": "mine"}),
    ):
        layer = mlp(activations=names, **kwargs)
        layer.eval()
        # The backward pass reads four copies; to make z and y again takes two each.
        for policy, count in (
            (save(name, "ffn1", "ffn2"), 4),
            (save(name, "ffn1"), 6),
            (save(name), 8),
            (save("another"), 0),
        ):
            kept = saved(layer, x, policy, "mxfp8", capsys)
            # Codes and scales, both named as bytes.
            assert sum("u8[" in line or "uint8[" in line for line in kept) == 2 * count


@pytest.mark.parametrize("recipe", [None, "delayed_scaling", "mxfp8"])
def test_stacked_layers_scan_like_a_loop(recipe):
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return te.LayerNormMLP(32, 48, rngs=rngs)

    layers = stack(nnx.Rngs(0))
    x = data((8, 32))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    graph, state = nnx.split(layers)
    state = jax.tree.map(jnp.copy, state)
    with context(recipe):
        got = run(layers, x)
        for i in range(3):
            one = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))
            x = one(x)
            for name in ("x", "kernel"):
                a, b = (getattr(m.wo.fp8, name)[...] for m in (layers, one))
                np.testing.assert_allclose(a[i], b, rtol=2.0**-18)
    close_to(got, np.asarray(x), 0.2 * np.abs(x).max() if recipe else 256 * UNIT)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_jit_equals_eager(recipe):
    layer, x = mlp(activations=("silu", "linear")), data((16, 32))
    layer.eval()
    with context(recipe):
        got, want = nnx.jit(lambda m, x: m(x))(layer, x), layer(x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("names", [("gelu",), (jax.nn.gelu,)])
def test_each_gemm_follows_its_own_recipe(names):
    layer = mlp(activations=names)
    layer.eval()
    x = data((16, 32))
    want = layer(x)
    with context("mxfp8"):
        both = layer(x)
        layer.wi.recipe = te.HIGH_PRECISION
        second = layer(x)
        layer.wo.recipe = te.HIGH_PRECISION
        neither = layer(x)
    np.testing.assert_array_equal(neither, want)
    errors = [float(jnp.abs(y - want).max()) for y in (both, second)]
    assert errors[0] != errors[1]
    assert errors[1] > 0


def test_preferred_element_type_is_that_of_the_result():
    layer = mlp(dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    for recipe in (None, "mxfp8"):
        with context(recipe):
            assert layer(data((16, 32))).dtype == jnp.float32
