"""te.value_and_grad and te.grad take what nnx's take, and deliver to every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fp8_worlds import MODES, RECIPE, WIDTH, Mlp, dense, graph_mode, linear_loss

import te_flax as te

X = jax.random.normal(jax.random.key(0), (4, WIDTH))
DY = jax.random.normal(jax.random.key(1), (4, WIDTH)) * 1e-3


@pytest.fixture(params=MODES)
def mode(request):
    with graph_mode(request.param), te.autocast(RECIPE):
        yield request.param


def pushes(layer):
    """How many entries each history holds."""
    stats = (layer.fp8.x, layer.fp8.kernel, layer.fp8.dy)
    return [int((stat[...] > 0).sum()) for stat in stats]


def assert_same(found, expected):
    found, expected = nnx.as_pure(found), nnx.as_pure(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_equals_nnx_without_a_recipe():
    """Values, gradients and auxiliary output, positional and keyword arguments."""
    model = Mlp()
    loss = lambda model, x, *, dy: (jnp.sum(model(x) * dy), {"mean": model(x).mean()})
    loss2 = lambda model, x, dy: loss(model, x, dy=dy)
    for transform, ours in (
        (nnx.value_and_grad, te.value_and_grad),
        (nnx.grad, te.grad),
    ):
        expected = transform(loss2, has_aux=True)(model, X, DY)
        assert_same(ours(loss2, has_aux=True)(model, X, DY), expected)
        assert_same(ours(loss2, has_aux=True)(model, dy=DY, x=X), expected)
        assert_same(ours(has_aux=True)(loss2)(model, X, DY), expected)


def test_keyword_only_arguments_in_split_modes():
    loss = lambda model, *, dy: jnp.sum(model(X) * dy)
    for name in MODES[1:]:
        with graph_mode(name):
            model = Mlp()
            assert sorted(te.grad(loss)(model, dy=DY)) == ["first", "second"]


def test_tuple_argnums(mode):
    """Two models and an array: each gradient in its place, each model updated."""

    def loss(first, x, second, dy):
        return jnp.sum(second["layer"](jnp.tanh(first(x))) * dy * second["factor"])

    first, second = dense(0), {"layer": dense(1), "factor": jnp.float32(2.0)}
    transform = nnx.jit(te.value_and_grad(loss, argnums=(2, 0, 1)))
    value, grads = transform(first, X, second, DY)
    assert value.shape == ()
    assert list(grads[0]["layer"]) == ["kernel"]
    assert grads[0]["factor"].shape == ()
    assert list(grads[1]) == ["kernel"]
    assert grads[2].shape == X.shape
    assert pushes(first) == pushes(second["layer"]) == [1, 1, 1]
    (only,) = te.grad(loss, argnums=(0,))(first, X, second, DY)
    assert list(only) == ["kernel"]
    # second was no differentiated argument: its dy history waits.
    assert pushes(first) == [2, 2, 2]
    assert pushes(second["layer"]) == [2, 2, 1]


@pytest.mark.parametrize("name", MODES[:2])
def test_a_model_reached_by_two_paths_is_updated_once(name):
    def loss(both, model, layer):
        return jnp.sum((both["a"](X) + both["b"](X) + model(X) + layer(X)) * DY)

    with graph_mode(name), te.autocast(RECIPE):
        model = Mlp()
        both = {"a": model, "b": model}
        argnums = (0, 1, 2)
        grads = te.grad(loss, argnums=argnums)(both, model, model.first)
    # Four forward calls of the first layer, one delivery of their summed mailbox.
    assert pushes(model.first) == [4, 4, 1]
    assert pushes(model.second) == [3, 3, 1]
    assert sorted(grads[0]["a"]) == ["first", "second"]
    assert not grads[0]["b"]
    assert not grads[1]
    assert not grads[2]


def test_wrt_and_diff_state(mode):
    """Only part of a model trains; every layer's dy history is filled all the same."""
    model = Mlp()
    only = nnx.All(nnx.Param, nnx.PathContains("first"))
    grads = te.grad(linear_loss, wrt=only)(model, X, DY)
    assert list(grads) == ["first"]
    grads = te.grad(linear_loss, argnums=nnx.DiffState(0, only))(model, X, DY)
    assert list(grads) == ["first"]
    assert pushes(model.first) == pushes(model.second) == [2, 2, 2]


def test_allow_int(mode):
    loss = lambda model, index: model(X)[index].sum()
    transform = te.grad(loss, argnums=(0, 1), allow_int=True)
    grads = transform(dense(), jnp.int32(1))
    assert grads[1].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="int32"):
        te.grad(loss, argnums=(0, 1))(dense(), jnp.int32(1))


def test_other_state_is_written_back(mode):
    """A BatchNorm in a differentiated and in another argument, and a parameter."""

    class Normed(nnx.Module):
        def __init__(self):
            self.norm, self.layer = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), dense()
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            self.scale[...] = self.scale[...] * 2
            return self.layer(self.norm(x)) * self.scale[...]

    def loss(model, other):
        return jnp.sum(model(other.norm(X)) * DY)

    model, other = Normed(), Normed()
    te.grad(loss)(model, other)
    for module in (model, other):
        assert np.asarray(module.norm.mean[...]).any()
    assert float(model.scale[...]) == 2.0
    assert float(other.scale[...]) == 1.0


def test_graph_changes_propagate_in_graph_mode():
    model = dense()

    def loss(model):
        model.seen = nnx.Intermediate(X)
        return model(X).sum()

    te.grad(loss)(model)
    (seen,) = jax.tree.leaves(nnx.state(model, nnx.Intermediate))
    np.testing.assert_array_equal(seen, X)


def test_graph_options_are_passed_on():
    """graph=False and graph_updates=False on one call, whatever the mode."""
    for options in ({"graph": False}, {"graph_updates": False}):
        with te.autocast(RECIPE):
            model = Mlp()
            grads = te.grad(linear_loss, **options)(model, X, DY)
        assert sorted(grads) == ["first", "second"]
        assert pushes(model.first) == [1, 1, 1]
    shared = dense()
    with pytest.raises(ValueError, match="shared"):
        te.grad(lambda a, b: a(X).sum(), graph=False)(shared, shared)


def test_nested_transforms(mode):
    """A gradient inside the loss delivers to its own model copy and restores flags."""
    inner, outer = dense(0), dense(1)

    def loss(outer, inner):
        te.grad(linear_loss)(inner, X, DY)
        assert not inner.fp8.tracked
        assert outer.fp8.tracked
        return jnp.sum(outer(inner(X)) * DY)

    te.grad(loss)(outer, inner)
    assert pushes(outer) == [1, 1, 1]
    assert pushes(inner) == [2, 2, 1]
    assert not outer.fp8.tracked


def test_flags_are_restored_after_an_error(mode):
    model = dense()

    def loss(model):
        assert model.fp8.tracked
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        te.grad(loss)(model)
    with pytest.raises(RuntimeError, match="stop"), te.track_gradients(model):
        loss(model)
    assert not model.fp8.tracked


def test_absorb_by_hand_equals_value_and_grad(mode):
    """Same loss, same gradients, same state, bit for bit."""
    ours, theirs = Mlp(), Mlp()
    wanted = te.diff_filter(nnx.Param)

    @nnx.jit
    def by_hand(model):
        graphdef, diff, rest = nnx.split(model, wanted, ...)

        def loss(diff):
            inner = nnx.merge(graphdef, diff, rest, copy=True)
            with te.track_gradients(inner):
                value = linear_loss(inner, X, DY)
            return value, nnx.state(inner, nnx.Not(wanted))

        (value, rest_), grads = jax.value_and_grad(loss, has_aux=True)(diff)
        nnx.update(model, rest_)
        return value, te.absorb(model, grads)

    step = nnx.jit(lambda model: te.value_and_grad(linear_loss)(model, X, DY))
    for _ in range(3):
        assert_same(by_hand(theirs), step(ours))
    assert_same(nnx.state(theirs), nnx.state(ours))
    assert pushes(ours.first) == [3, 3, 3]


def test_absorb_takes_pure_gradients():
    model = dense()
    with te.autocast(RECIPE):
        graphdef, diff, rest = nnx.split(model, te.diff_filter(nnx.Param), ...)
        loss = lambda pure: linear_loss(
            nnx.merge(graphdef, nnx.State(pure), rest, copy=True), X, DY
        )
        pure = nnx.to_pure_dict(diff)
        grads = te.absorb(model, jax.grad(loss)(pure))
    assert list(grads) == ["kernel"]
    assert pushes(model) == [0, 0, 1]


def test_absorb_errors():
    model = dense()
    params = nnx.state(model, nnx.Param)
    match = r"absorb: grads must hold .*; differentiate with respect to te.diff_filter"
    with pytest.raises(ValueError, match=match):
        te.absorb(model, params)
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert_same(te.absorb(linear, nnx.state(linear)), nnx.state(linear))


def test_absorb_needs_the_mailbox_of_every_layer():
    """One of two models was differentiated without its mailboxes."""
    models = (dense(0), {"b": Mlp(1, 2)}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    wanted = te.diff_filter(nnx.Param)

    def states(*filters):
        nodes = (models[0], models[1]["b"], models[2])
        first, second, third = (
            jax.tree.map(jnp.ones_like, nnx.state(m, f))
            for m, f in zip(nodes, filters, strict=True)
        )
        return first, {"b": second}, third

    good = states(wanted, wanted, nnx.Param)
    for bad, missing in (
        (
            states(wanted, nnx.Param, nnx.Param),
            r"none for \[1\]\['b'\]/first/fp8/mailbox, .*/second",
        ),
        (states(nnx.Param, wanted, nnx.Param), r"none for \[0\]/fp8/mailbox;"),
        (
            (good[0], {"b": nnx.State({"first": good[1]["b"]["first"]})}, good[2]),
            r"none for \[1\]\['b'\]/second/fp8",
        ),
    ):
        with pytest.raises(ValueError, match=f"absorb: grads .*{missing}"):
            te.absorb(models, bad)
    assert pushes(models[0]) == pushes(models[1]["b"].first) == [0, 0, 0]
    te.absorb(models, good)
    assert pushes(models[0]) == pushes(models[1]["b"].second) == [0, 0, 1]


@pytest.mark.parametrize("argnums", [(0, 0), 3, (0, -3), (1, -2)])
def test_argnums_errors(argnums):
    match = "value_and_grad: argnums must be distinct positions of the 3 positional"
    with pytest.raises(ValueError, match=match):
        te.value_and_grad(linear_loss, argnums=argnums)(dense(), X, DY)


@pytest.mark.parametrize("argnums", ["m", 1.0, (0, "m"), None])
def test_argnums_type_errors(argnums):
    match = "value_and_grad: argnums must be an int, an nnx.DiffState or a sequence"
    with pytest.raises(TypeError, match=match):
        te.value_and_grad(linear_loss, argnums=argnums)
    with pytest.raises(TypeError, match="grad: argnums must be an int"):
        te.grad(argnums=argnums)


def test_errors_before_any_call():
    for name in ("value_and_grad", "grad"):
        with pytest.raises(TypeError, match=f"^{name}: f must be a function, got 3; "):
            getattr(te, name)(3)
    for f in (None, linear_loss):
        match = "^grad: options must be among argnums, has_aux, .*, got 'has_auxx'; "
        with pytest.raises(TypeError, match=match):
            te.grad(f, has_auxx=True)


def test_bound_method_error():
    match = "value_and_grad: f must be a function of the model, got the bound method"
    with pytest.raises(ValueError, match=match):
        te.value_and_grad(dense().__call__)
