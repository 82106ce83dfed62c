"""te.record of dy: its statistics leave the backward pass under every recipe."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8_worlds import LENGTH, MODES, WIDTH, dense, graph_mode, linear_loss
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.functional.config import GemmState
from te_flax.quantize.statistics import (
    RECORD_SIZE,
    decode_statistics,
    encode_statistics,
    statistics,
)
from te_flax.recipe.record import start_recording, stop_recording

RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=LENGTH),
    "current": te.Float8CurrentScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "block": te.Float8BlockScaling(),
    "nvfp4": te.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
WANTED = te.diff_filter(nnx.Param)
# Two stand for all where the recipe plays no part: with and without a history.
TWO = ("delayed", "mxfp8")
NIGHTLY = pytest.param("nvfp4", True, marks=pytest.mark.slow)  # a large program


def values(*shape, seed=0, bad=True):
    """dy with a wide range; 3 NaN or infinite elements where it is large enough."""
    rng = np.random.default_rng(seed)
    dy = rng.standard_normal(shape) * np.exp(5 * rng.standard_normal(shape))
    if bad and dy.size >= 256:
        dy.flat[[5, 100, 200]] = np.nan, np.inf, -np.inf
    return dy.astype(np.float32)


def recorded():
    layer = dense()
    start_recording(layer.fp8)
    return layer


@nnx.jit
def step(layer, dy):
    """A training step whose dy is this one."""
    return te.grad(linear_loss)(layer, jnp.ones(dy.shape), dy)


@functools.partial(jax.jit, static_argnums=0)
def _expected(recipe, dy, amax):
    quantizer: Any = recipe.quantizers().dy
    scale = quantizer.scale(amax) if isinstance(recipe, te.DelayedScaling) else None
    pair = quantizer(dy, k_ndim=1, rowwise=True, colwise=True, scale=scale)
    return statistics(dy, pair.rowwise)


def expected(recipe, dy, amax=0.0):
    """Of one dy, quantized as the layer quantizes it."""
    return [float(number) for number in _expected(recipe, dy, jnp.float32(amax))]


def found(layer, index=()):
    return [float(number) for number in np.asarray(layer.fp8.record[(*index, 2)])]


def largest(dy):
    """The largest finite magnitude."""
    return np.abs(dy[np.isfinite(dy)]).max()


def bound(value):
    return 2.0 ** math.ceil(math.log2(value))


def below(scale):
    """The power of two at or below a scale; 0 is that of a block with a NaN."""
    return 1 / bound(1 / scale) if scale else 0.0


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "graph") for name in RECIPES] + [(n, m) for n in TWO for m in MODES[1:]],
)
def test_one_use(name, mode):
    recipe, dy = RECIPES[name], values(64, WIDTH)
    with graph_mode(mode), te.autocast(recipe):
        layer = recorded()
        grads = step(layer, dy)
    want = expected(recipe, dy)
    assert found(layer) == want
    assert list(grads) == ["kernel"]
    assert want[2] + want[3] > 0  # something is lost
    assert want[4] == 3
    np.testing.assert_array_equal(layer.fp8.record_mailbox[...], 0)


def test_delayed_scaling_saturates_when_dy_grows():
    recipe, dy = RECIPES["delayed"], np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32)
    dy = dy.reshape(8, WIDTH)
    with te.autocast(recipe):
        layer = recorded()
        for factor in (1, 4):
            step(layer, factor * dy)
    want = expected(recipe, 4 * dy, amax=1.0)
    assert found(layer) == want
    assert want[0] == 4
    np.testing.assert_allclose(want[1], 57344, rtol=3 * 2**-24)
    assert 0.7 < want[2] < 0.75


@pytest.mark.parametrize("name", RECIPES)
def test_a_dy_of_zeros(name):
    recipe, dy = RECIPES[name], np.zeros((8, WIDTH), np.float32)
    with te.autocast(recipe):
        layer = recorded()
        step(layer, dy)
    assert found(layer) == expected(recipe, dy)
    assert found(layer)[0] == 0
    assert 0 < found(layer)[1] < math.inf


def pooled(recipe, *dys):
    """Of several contributions: of all elements, the non-finite count a mean."""
    parts = np.array([expected(recipe, dy) for dy in dys])
    sizes = np.array([dy.size for dy in dys])
    shares = (parts[:, 2:4] * sizes[:, None]).sum(0) / sizes.sum()
    scale = below(parts[:, 1].min())
    return [bound(parts[:, 0].max()), scale, *shares, parts[:, 4].mean()]


def assert_pooled(got, want, where=""):
    """amax and scale are powers of two; the rest has seen a few roundings."""
    assert got[:2] == want[:2], where
    np.testing.assert_allclose(got[2:], want[2:], rtol=2**-20, err_msg=where)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWO)
def test_two_uses_of_different_size(name, mode):
    recipe, bad = RECIPES[name], name != "mxfp8"  # whose scale would be 0
    dys = values(64, WIDTH, bad=bad), 8 * values(32, WIDTH, seed=1, bad=bad)

    def loss(layer):
        return sum(linear_loss(layer, jnp.ones(dy.shape), dy) for dy in dys)

    with graph_mode(mode), te.autocast(recipe):
        layer = recorded()
        nnx.jit(te.grad(loss))(layer)
    assert_pooled(found(layer), pooled(recipe, *dys))


@pytest.mark.parametrize("name", TWO)
def test_microbatches_by_value_and_grad_record_the_last(name):
    recipe, dys = RECIPES[name], np.stack([values(32, WIDTH, seed=i) for i in (1, 2)])
    if name == "delayed":
        recipe = te.DelayedScaling(amax_history_len=LENGTH, margin=2)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def steps(layer, dy):
        return layer, te.grad(linear_loss)(layer, jnp.ones(dy.shape), dy)

    with te.autocast(recipe):
        layer, _ = steps(recorded(), dys)
    assert found(layer) == expected(recipe, dys[1], amax=largest(dys[0]))


@pytest.mark.parametrize("weight", [1.0, 0.5, 3.0], ids=["sum", "mean", "scaled"])
def test_microbatches_by_hand_record_all(weight):
    """One absorb for a weighted sum; the model is updated after it, or before."""
    recipe, dys = RECIPES["current"], [values(32, WIDTH, seed=i) for i in (1, 2)]
    layer = recorded()
    graphdef, diff, rest = nnx.split(layer, WANTED, ...)

    def loss(diff, dy):
        inner = nnx.merge(graphdef, diff, rest, copy=True)
        value = linear_loss(inner, jnp.ones(dy.shape), dy)
        return value, nnx.state(inner, nnx.Not(WANTED))

    with te.autocast(recipe):
        parts = [jax.jit(jax.grad(loss, has_aux=True))(diff, dy) for dy in dys]
    total = jax.tree.map(lambda *g: weight * sum(g), *(grads for grads, _ in parts))
    nnx.update(layer, parts[-1][1])
    assert list(te.absorb(layer, total)) == ["kernel"]
    assert_pooled(found(layer), pooled(recipe, *dys))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", TWO)
def test_shards_record_the_whole(name, where, check_vma):
    """Equal blocks on each device: the shards' statistics are those of the whole."""
    recipe, dy = RECIPES[name], values(128, WIDTH, bad=name != "mxfp8")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    layer = recorded()
    graphdef, diff, rest = nnx.split(layer, WANTED, ...)
    shard = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("d"), P("d")),
        out_specs=P(),
        check_vma=check_vma,
    )

    def inside(diff, rest, x, dy):
        inner = nnx.merge(graphdef, diff, rest, copy=True)
        te.grad(linear_loss)(inner, x, dy)
        return inner.fp8.record[...]

    def loss(diff, rest, x, dy):
        inner = nnx.merge(graphdef, diff, rest, copy=True)
        return jax.lax.psum(linear_loss(inner, x, dy), "d")

    arrays = diff, rest, jnp.ones(dy.shape), dy
    with te.autocast(recipe):
        if where == "inside":
            layer.fp8.record[...] = jax.jit(shard(inside))(*arrays)
        else:
            te.absorb(layer, jax.jit(jax.grad(shard(loss)))(*arrays))
    # Nobody tracks the gradient outside: delayed scaling measures dy itself.
    want = expected(recipe, dy, amax=0.0 if where == "inside" else largest(dy))
    if where == "outside" and not check_vma:  # four equal copies arrive
        want = [bound(want[0]), below(want[1]), *want[2:]]
    assert found(layer) == want


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan-remat"])
@pytest.mark.parametrize("name", TWO)
def test_stacked_layers_each_record_their_own(name, remat):
    recipe, dy = RECIPES[name], values(8, WIDTH)
    make = nnx.vmap(lambda rngs: dense(rngs=rngs), in_axes=0)
    model = make(nnx.Rngs(0).split(3))
    start_recording(model.fp8)

    def loss(model):
        body = lambda layer, x: layer(x)
        body = nnx.remat(body) if remat else body
        body = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return jnp.sum(body(model, jnp.ones((8, WIDTH))) * dy)

    def unrolled(layers):
        x = jnp.ones((8, WIDTH))
        for layer in layers:
            x = layer(x)
        return jnp.sum(x * dy)

    layers = nnx.List([dense() for _ in range(3)])
    for i, layer in enumerate(layers):
        layer.kernel[...] = model.kernel[i]
        start_recording(layer.fp8)
    with te.autocast(recipe):
        nnx.jit(te.grad(loss))(model)
        nnx.jit(te.grad(unrolled))(layers)
    assert found(model, (2,)) == expected(recipe, dy)
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(found(model, (i,)), found(layer), rtol=2**-20)


def test_experts_under_vmap_each_record_their_own():
    recipe = RECIPES["mxfp8"]
    make = nnx.vmap(lambda rngs: dense(rngs=rngs), in_axes=0)
    model = make(nnx.Rngs(0).split(3))
    start_recording(model.fp8)
    dys = np.stack([values(32, WIDTH, seed=i) for i in range(3)])
    loss = lambda model, x, dy: jnp.sum(nnx.vmap(lambda m, x: m(x))(model, x) * dy)
    with te.autocast(recipe):
        nnx.jit(te.grad(loss))(model, jnp.ones(dys.shape), dys)
    for i, dy in enumerate(dys):
        assert found(model, (i,)) == expected(recipe, dy)


@pytest.mark.parametrize("name", TWO)
def test_frozen_layers_record_and_push_nothing(name):
    recipe, dy = RECIPES[name], values(64, WIDTH)
    with te.autocast(recipe):
        layer = recorded()
        layer.eval()
        step(layer, dy)
    assert found(layer) == expected(recipe, dy, amax=largest(dy))
    np.testing.assert_array_equal(layer.fp8.dy[...], 0)
    assert int(layer.fp8.nonfinite[...]) == 0


def test_without_a_recipe_nothing_is_recorded():
    layer, dy = recorded(), values(8, WIDTH)
    step(layer, dy)
    assert np.isnan(np.asarray(layer.fp8.record[...])).all()


def test_an_unquantized_dy_has_amax_and_count():
    dy = values(64, 8)

    def loss(mail):
        state = GemmState(record=mail)
        y, _ = te.dense(jnp.ones((64, 4)), jnp.ones((4, 8)), state=state)
        return 2 * jnp.sum(y)

    mail = jax.jit(jax.grad(loss))(jnp.zeros(RECORD_SIZE))
    numbers = [float(number) for number in decode_statistics(mail)]
    np.testing.assert_array_equal(numbers, [2.0, np.nan, np.nan, np.nan, 0.0])
    mail = encode_statistics(dy, None)
    want = [largest(dy), np.nan, np.nan, np.nan, 3.0]
    np.testing.assert_array_equal([float(n) for n in decode_statistics(mail)], want)


decoded = jax.jit(decode_statistics)


def sent(recipe, dy):
    """The mail of one dy, and its statistics."""
    quantizer = recipe.quantizers().dy
    pair = quantizer(dy, k_ndim=1, rowwise=True, colwise=False)
    numbers = statistics(dy, pair.rowwise)
    return encode_statistics(dy, pair.rowwise), [float(number) for number in numbers]


@pytest.mark.parametrize("factor", [2**-20, 0.3, 1 / 7, 3.0, 2**16])
@pytest.mark.parametrize("name", TWO)
def test_no_positive_factor_changes_the_shares(name, factor):
    """Loss scaling, means and clipping: amax never below, scale never above."""
    dy = values(64, WIDTH, bad=name != "mxfp8")
    mail, one = sent(RECIPES[name], dy)
    got = [float(number) for number in decoded(mail * jnp.float32(factor))]
    assert one[0] <= got[0] <= bound(one[0])
    assert below(one[1]) <= got[1] <= one[1]
    np.testing.assert_allclose(got[2:], one[2:], rtol=2**-22)
    for bad in (0.0, math.nan):
        nothing = decoded(mail * jnp.float32(bad))
        assert all(math.isnan(float(number)) for number in nothing)


@pytest.mark.parametrize("make", ["dense", "fused"])
@pytest.mark.parametrize("name", TWO)
def test_steps_that_are_not_recorded_do_not_change(name, make):
    """Not by one op: the jaxpr of a step before and after te.record."""
    block = lambda: te.LayerNormMLP(
        WIDTH, 32, amax_history_len=LENGTH, rngs=nnx.Rngs(0)
    )
    build = {"dense": dense, "fused": block}[make]
    model, plain = build(), build()
    states = [m for _, m in nnx.iter_graph(model) if isinstance(m, te.Fp8State)]

    def jaxpr(model):
        graphdef, state = nnx.split(model)

        def step(state, x, dy):
            inner = nnx.merge(graphdef, state, copy=True)
            return te.grad(linear_loss)(inner, x, dy), nnx.state(inner)

        return str(jax.make_jaxpr(step)(state, *jnp.ones((2, 4, WIDTH))))

    with te.autocast(RECIPES[name]):
        want = jaxpr(plain)
        for fp8 in states:
            start_recording(fp8)
        assert jaxpr(model) != want
        for fp8 in states:
            stop_recording(fp8)
        assert jaxpr(model) == want


@pytest.mark.parametrize(
    ("name", "bias"),
    [*((n, True) for n in RECIPES if n != "nvfp4"), ("current", False), NIGHTLY],
)
def test_the_fused_block_records_both_and_trains_to_the_same_bits(name, bias):
    recipe = RECIPES[name]
    options = {"use_bias": bias, "amax_history_len": LENGTH}
    make = lambda act: te.LayerNormMLP(
        32, 64, activations=act, rngs=nnx.Rngs(0), **options
    )
    plain, fused, apart = make("gelu"), make("gelu"), make(nnx.gelu)
    x, dy = values(4, 32, seed=3), values(4, 32, seed=4)
    with te.autocast(recipe):
        for model in (fused, apart):
            start_recording(model.wi.fp8)
            start_recording(model.wo.fp8)
        grads = [nnx.jit(te.grad(linear_loss))(m, x, dy) for m in (plain, fused, apart)]
    for a, b in zip(*map(jax.tree.leaves, grads[:2]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found(fused.wo) == expected(recipe, dy)
    assert found(apart.wo) == expected(recipe, dy)
    pairs = zip(found(fused.wi), found(apart.wi), strict=True)
    (amax, amax_), (scale, scale_), *shares, (count, _) = pairs
    np.testing.assert_allclose([amax, scale], [amax_, scale_], rtol=1e-4)
    assert max(abs(a - b) for a, b in shares) <= 4 / (4 * 64)  # codes at a rounding
    assert count == 0
