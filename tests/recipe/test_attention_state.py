"""The statistics of FP8 attention through training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax.layers._fp8 import attention_fp8

RECIPE = te.DelayedScaling(amax_history_len=3, fp8_attention=True)
SHAPE = (2, 6, 2, 8)
WEIGHT = jnp.linspace(0.5, 1.5, 8)


class Attention(nnx.Module):
    """What an attention layer does with the state, with q, k and v as parameters."""

    def __init__(self):
        normal = np.random.default_rng(0).standard_normal
        self.q, self.k, self.v = (
            nnx.Param(jnp.asarray(normal(SHAPE), jnp.float32)) for _ in range(3)
        )
        self.fp8 = te.Fp8AttentionState(recipe=RECIPE)

    def __call__(self):
        recipe = te.current_recipe()
        fp8 = attention_fp8(recipe, self.fp8)
        arrays = (self.q[...], self.k[...], self.v[...])
        if fp8 is None:
            return te.dot_product_attention(*arrays)
        o, amaxes = te.dot_product_attention(*arrays, fp8=fp8)
        self.fp8.push(amaxes)
        return o


def step(model, scale):
    with te.autocast(RECIPE):
        return te.value_and_grad(lambda m: scale * jnp.sum(m() * WEIGHT))(model)


@pytest.mark.parametrize("mode", ["graph", "simple", "tree"])
def test_a_step_pushes_ten_amaxes(mode):
    with nnx.set_graph_updates(mode == "graph"), nnx.set_graph_mode(mode != "tree"):
        model = Attention()
        run = (lambda f: f) if mode == "tree" else nnx.jit
        for scale in (1.0, 4.0):
            _, grads = run(step)(model, jnp.float32(scale))
            assert sorted(grads) == ["k", "q", "v"]
    state = model.fp8
    forward, dy = np.asarray(state.forward[...]), np.asarray(state.dy[...])
    for i, name in enumerate("qkv"):
        amax = np.abs(getattr(model, name)[...]).max()
        np.testing.assert_array_equal(forward[i], [amax, amax, 0])
    assert (forward[3, :2] <= 1).all()
    assert (dy[:, :2] > 0).all()
    assert (dy[:, 2] == 0).all()
    assert dy[0, 0] == 4 * dy[0, 1]  # do of the two steps
    assert not np.any(state.nonfinite[...])
    assert not np.any(state.mailbox[...])


def test_frozen_statistics_do_not_change():
    model = Attention()
    step(model, 1.0)
    before = nnx.to_pure_dict(nnx.state(model.fp8))
    model.eval()
    step(model, 2.0)
    jax.tree.map(
        np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model.fp8))
    )


def test_recipes_without_it():
    model = Attention()
    for recipe in (te.DelayedScaling(), te.MXFP8BlockScaling()):
        with te.autocast(recipe):
            model()
    assert not np.any(model.fp8.forward[...])
    with te.autocast(te.DelayedScaling(amax_history_len=4, fp8_attention=True)):
        rule = "amax_history_len must be <= 3, the length of the layer's history"
        with pytest.raises(ValueError, match=rule):
            model()


def test_checkpoints():
    model, other = Attention(), Attention()
    step(model, 1.0)
    saved = nnx.state(model, te.checkpoint_filter)
    assert "mailbox" not in saved["fp8"]
    te.restore_state(other, saved)
    np.testing.assert_array_equal(other.fp8.dy[...], model.fp8.dy[...])


def test_gradients_take_their_history_inside_value_and_grad():
    model, flags = Attention(), []

    def loss(m):
        flags.append(m.fp8.tracked)
        return jnp.sum(m.q[...])

    te.value_and_grad(loss)(model)
    assert flags == [True]
    assert not model.fp8.tracked
