"""te.convert and te.revert: the same variables in other layers, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import te_flax as te
from te_flax.paths import places, variables
from te_flax.testing.numerics import close_to, gemm_bound
from tests._models import DENSE, RECIPES, at, data, model, scanned, stacked

LAYERS = {
    "linear": lambda r: nnx.Linear(48, 24, rngs=r),
    "no bias": lambda r: nnx.Linear(48, 24, use_bias=False, rngs=r),
    "bfloat16": lambda r: nnx.Linear(48, 24, dtype=jnp.bfloat16, rngs=r),
    "general": lambda r: nnx.LinearGeneral(48, (4, 6), rngs=r),
    "two axes": lambda r: nnx.LinearGeneral((3, 48), 24, axis=(-2, -1), rngs=r),
    "wide": lambda r: nnx.Linear(
        48,
        24,
        use_bias=False,
        param_dtype=jnp.bfloat16,
        preferred_element_type=jnp.float32,
        rngs=r,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_recipe_outputs_are_equal_to_rounding(name):
    """Each of the two errs by at most the bound of one float32 product."""
    layer = LAYERS[name](nnx.Rngs(0))
    x = data(5, 3, 48, dtype=jnp.bfloat16 if name == "wide" else jnp.float32)
    converted = te.convert(layer)
    assert type(converted) is te.DenseGeneral
    want, got = layer(x), converted(x)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    wide = lambda a: np.asarray(a).astype(np.float64)
    kernel = layer.kernel[...].astype(layer.dtype or layer.kernel.dtype)
    k = int(np.prod(np.atleast_1d(layer.in_features)))
    flat = wide(x.astype(layer.dtype or x.dtype)).reshape(-1, k)
    size = np.abs(flat) @ np.abs(wide(kernel).reshape(k, -1)) + 1
    exact = wide(want).reshape(size.shape)
    bound = 2 * gemm_bound(size, k, exact, want.dtype, 1)
    if want.dtype == jnp.bfloat16:  # nnx rounds the product, and then the sum
        bound += gemm_bound(size, k, exact, want.dtype, 1)
    close_to(np.asarray(got).reshape(size.shape), exact, bound)


def test_the_model_is_equal_to_rounding():
    """Thirteen products of at most 32 terms, each error taken as not amplified."""
    plain, x = model(), data(2, 8, 16)
    want, got = plain(x), te.convert(plain)(x)
    worst = 2 * len(DENSE) * 33 * 2.0**-24 * float(jnp.max(jnp.abs(want)))
    close_to(got, np.asarray(want, np.float64), 16 * worst)


def test_every_layer_is_replaced_and_shares_its_variables():
    plain = model()
    converted = te.convert(plain)
    for path in DENSE:
        old, new = at(plain, path), at(converted, path)
        assert type(old) in (nnx.Linear, nnx.LinearGeneral), path
        assert type(new) is te.DenseGeneral, path
        for name, variable in variables(old).items():
            assert getattr(new, name) is variable, path
    assert converted.again is converted.up
    assert isinstance(converted.pair, tuple)
    assert converted.pair[1] == 3
    states = [p for p in places(converted) if isinstance(p.module, te.Fp8State)]
    assert len({id(p.module) for p in states}) == len(DENSE)


def test_parameters_keep_their_paths_and_metadata():
    plain = nnx.Linear(
        4, 4, kernel_metadata={"out_sharding": ("a", None), "eager_sharding": False,
                               "tag": 7}, rngs=nnx.Rngs(0)
    )  # fmt: skip
    converted = te.convert(nnx.List([plain]))
    assert converted[0].kernel is plain.kernel
    assert converted[0].kernel.get_metadata()["tag"] == 7
    state = nnx.to_flat_state(nnx.state(te.convert(model()), nnx.Param))
    want = nnx.to_flat_state(nnx.state(model(), nnx.Param))
    assert [path for path, _ in state] == [path for path, _ in want]


@pytest.mark.parametrize("name", RECIPES)
def test_under_a_recipe_it_quantizes(name):
    layer, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), data(8, 64)
    own = te.DenseGeneral(64, 32, rngs=nnx.Rngs(1))
    nnx.update(own, nnx.state(layer))
    with te.autocast(RECIPES[name]):
        want, followed = own(x), te.convert(layer)(x)
    chosen = te.convert(layer, RECIPES[name])(x)
    assert (followed == want).all()
    assert (chosen == want).all()
    assert not (want == layer(x)).all()


def _fit(net, recipe, steps=30):
    optimizer = nnx.Optimizer(net, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    x, y = data(64, 8, 16), data(64, 8, 4, seed=1) * 0 + 1

    @nnx.jit
    def step(net, optimizer):
        loss = lambda net: jnp.mean((net(x) - y) ** 2)
        value, grads = te.value_and_grad(loss)(net)
        optimizer.update(net, grads)
        return value

    with te.autocast(recipe):
        losses = [float(step(net, optimizer)) for _ in range(steps)]
    return losses


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_it_trains_and_the_original_with_it(recipe):
    plain = model()
    before = plain(data(2, 8, 16))
    converted = te.convert(plain)
    losses = _fit(converted, recipe)
    assert losses[-1] < losses[0] / 10
    reverted = te.revert(converted)
    x = data(2, 8, 16)
    assert (reverted(x) == plain(x)).all()
    assert not (plain(x) == before).all()
    if isinstance(recipe, te.DelayedScaling):
        for path in DENSE:
            state = at(converted, path).fp8
            assert (state.x[:4] > 0).all(), path
            assert (state.dy[:4] > 0).all(), path


@pytest.mark.parametrize("mode", ["graph", "simple", "tree"])
def test_graph_modes(mode):
    with nnx.set_graph_updates(mode != "simple"), nnx.set_graph_mode(mode != "tree"):
        plain = nnx.Sequential(
            nnx.Linear(16, 32, rngs=nnx.Rngs(0)),
            nnx.relu,
            nnx.Linear(32, 4, rngs=nnx.Rngs(1)),
        )
        converted = te.convert(plain)
        losses = _fit(converted, te.DelayedScaling(amax_history_len=4))
        assert losses[-1] < losses[0]
        assert (te.revert(converted)(data(2, 16)) == plain(data(2, 16))).all()


def test_revert_gives_the_original_back():
    plain, x = model(), data(2, 8, 16)
    converted = te.convert(plain, te.MXFP8BlockScaling())
    reverted = te.revert(converted)
    assert nnx.graphdef(reverted) == nnx.graphdef(plain)
    assert nnx.jit(reverted)(x).tolist() == nnx.jit(plain)(x).tolist()
    assert (reverted(x) == plain(x)).all()
    for path in DENSE:
        assert at(reverted, path).kernel is at(plain, path).kernel
    with pytest.raises(ValueError, match="revert: model must hold a layer that"):
        te.revert(reverted)


@pytest.mark.parametrize("name", LAYERS)
def test_revert_restores_every_option(name):
    layer = LAYERS[name](nnx.Rngs(0))
    reverted = te.revert(te.convert(layer))
    assert type(reverted) is type(layer)
    held = {k: v for k, v in vars(layer).items() if not k.startswith("_pytree__")}
    again = {k: v for k, v in vars(reverted).items() if not k.startswith("_pytree__")}
    assert again == held
    assert nnx.graphdef(reverted) == nnx.graphdef(layer)


def test_revert_keeps_the_users_attributes_and_other_layers():
    plain = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    setattr(plain, "tag", "mine")  # noqa: B010
    own = te.DenseGeneral(4, 4, rngs=nnx.Rngs(1))
    reverted = te.revert(te.convert(nnx.List([plain, own])))
    assert reverted[0].tag == "mine"
    assert type(reverted[1]) is te.DenseGeneral


def test_the_argument_does_not_change():
    plain = model()
    before = nnx.graphdef(plain)
    converted = te.convert(plain)
    assert nnx.graphdef(plain) == before
    graphdef = nnx.graphdef(converted)
    te.revert(converted)
    assert nnx.graphdef(converted) == graphdef


def test_split_merge_and_jit():
    converted = te.convert(model(), te.DelayedScaling(amax_history_len=4))
    x = data(2, 8, 16)
    merged = nnx.merge(*nnx.split(converted), copy=True)
    clone = nnx.clone(converted)
    jitted = nnx.jit(lambda net, x: net(x))
    outputs = [jitted(net, x).tolist() for net in (merged, clone, converted)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert nnx.graphdef(te.revert(merged)) == nnx.graphdef(model())
    assert (merged.head.fp8.x[...] == converted.head.fp8.x[...]).all()


def test_checkpoints(tmp_path):
    converted = te.convert(model(), te.DelayedScaling(amax_history_len=4))
    x = data(2, 8, 16)
    converted(x)
    saver = ocp.StandardCheckpointer()
    saver.save(tmp_path / "c", nnx.state(converted, te.checkpoint_filter))
    saver.wait_until_finished()
    fresh = te.convert(model(1), te.DelayedScaling(amax_history_len=4))
    target = nnx.state(fresh, te.checkpoint_filter)
    te.restore_state(fresh, saver.restore(tmp_path / "c", target))
    assert (fresh(x) == converted(x)).all()
    te.restore_state(fresh, nnx.state(model(2)))  # of the model before it
    assert (te.revert(fresh)(x) == model(2)(x)).all()


def test_stacked_layers_get_a_state_each():
    layers, x = stacked(3, nnx.Rngs(0)), data(4, 16)
    converted = te.convert(layers, te.DelayedScaling(amax_history_len=4))
    assert converted.fp8.x.shape == (3, 4)
    scanned(converted, x)
    own = [
        te.DenseGeneral(16, 16, amax_history_len=4, rngs=nnx.Rngs(i)) for i in range(3)
    ]
    with te.autocast(te.DelayedScaling(amax_history_len=4)):
        for i, layer in enumerate(own):
            layer.kernel[...] = layers.kernel[i]
            x = jnp.tanh(layer(x))
            assert (layer.fp8.x[...] == converted.fp8.x[i]).all()
    assert scanned(te.revert(converted), x).shape == (4, 16)


def test_a_recurrent_cell_pushes_at_every_step():
    plain, x = nnx.RNN(nnx.GRUCell(16, 16, rngs=nnx.Rngs(0))), data(2, 5, 16)
    converted = te.convert(plain)
    close_to(converted(x), np.asarray(plain(x), np.float64), 5 * 2 * 4 * 17 * 2.0**-24)
    with te.autocast(te.DelayedScaling()):
        te.grad(lambda net, x: net(x).sum())(converted, x)
    for layer in (converted.cell.dense_h, converted.cell.dense_i):
        pushed = layer.fp8.kernel[:8] > 0
        assert pushed.tolist() == [True] * 5 + [False] * 3
        assert layer.fp8.dy[0] > 0


def test_histories_have_the_length_asked_for():
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert te.convert(layer, amax_history_len=7).fp8.x.shape == (7,)
    recipe = te.DelayedScaling(amax_history_len=5)
    assert te.convert(layer, recipe).fp8.x.shape == (5,)


def test_sharded_parameters_stay_where_they_are():
    mesh = jax.make_mesh((8,), ("d",))
    with jax.set_mesh(mesh):
        layer = nnx.Linear(
            16, 8, kernel_metadata={"out_sharding": ("d", None)}, rngs=nnx.Rngs(0)
        )
        converted = te.convert(layer, te.Float8CurrentScaling())
        assert converted.kernel is layer.kernel
        assert len(converted.kernel[...].sharding.device_set) == 8
        x = jax.device_put(data(8, 16), jax.NamedSharding(mesh, jax.P(None, "d")))
        assert converted(x).shape == (8, 8)
