"""Attention over any number of batch dims, batch first and sequence first."""

import jax.numpy as jnp
import numpy as np
import pytest
from _attention import mha
from _dense import data
from flax import nnx

import te_flax as te

T, F = 4, 16
X = data((2, 3, T, F))


def attend(**options):
    return te.DotProductAttention(2, 8, rngs=nnx.Rngs(0), **options)


def equal(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_sequence_first_attention(batch):
    x = data((*batch, 6, 2, 8))
    first = jnp.moveaxis(x, -3, 0)
    got = attend(transpose_batch_sequence=True)(first, first, first)
    equal(jnp.moveaxis(got, 0, -3), attend()(x, x, x))


def test_sequence_first_layer_and_its_cache():
    causal = {"attn_mask_type": "causal", "enable_rotary_pos_emb": True}
    want = mha(2, F, **causal)(X)
    layer = mha(2, F, transpose_batch_sequence=True, **causal)
    x = jnp.moveaxis(X, 2, 0)
    equal(jnp.moveaxis(layer(x), 0, 2), want)
    layer.init_cache(x.shape)
    assert layer.cached_key.shape == (T, 6, 2, 8)
    got = jnp.concatenate([layer(x[:2], decode=True), layer(x[2:], decode=True)])
    equal(jnp.moveaxis(got, 0, 2), want)


ARGUMENTS = {
    "segment_ids": jnp.asarray([1, 1, 2, 2]) + jnp.zeros((2, 3, 1), int),
    "positions": jnp.arange(24).reshape(2, 3, T) * 7 % 5,
    "q_seqlen": jnp.asarray([[1, 2, 3], [4, 3, 2]]),
    "kv_seqlen": jnp.asarray([[1, 2, 3], [4, 3, 2]]),
    "mask": jnp.arange(T) < jnp.arange(1, 7).reshape(2, 3, 1, 1, 1),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("turned", [False, True])
def test_arguments_have_the_dims_of_the_batch(name, turned):
    options = {"attn_mask_type": "causal", "enable_rotary_pos_emb": True}
    layer, given = mha(2, F, **options), ARGUMENTS[name]
    want = layer(X.reshape(6, T, F), **{name: given.reshape(6, *given.shape[2:])})
    want = want.reshape(X.shape)
    if turned:
        layer = mha(2, F, transpose_batch_sequence=True, **options)
        got = jnp.moveaxis(layer(jnp.moveaxis(X, 2, 0), **{name: given}), 0, 2)
    else:
        got = layer(X, **{name: given})
    equal(got, want)
    assert not np.allclose(got, layer(X) if not turned else want + 1)


def test_what_does_not_fit():
    text = r"^MultiHeadAttention: inputs_k must have the batch dims \(2, 3\), got sha"
    layer = mha(2, F, attention_type="cross")
    with pytest.raises(ValueError, match=text):
        layer(X, X[:, :2])
    text = r"^MultiHeadAttention: segment_ids must have the batch dims \(2, 3\)"
    with pytest.raises(ValueError, match=text):
        layer(X, X, segment_ids=jnp.ones((2, 2, T), int))


def test_a_key_drops_nothing_in_evaluation():
    layer = mha(2, F, dropout_rate=0.5)
    layer.eval()
    x = X[0]
    assert (layer(x, rngs=nnx.Rngs(3)) == layer(x)).all()
    layer.train()
    assert not (layer(x, rngs=nnx.Rngs(3)) == layer(x, deterministic=True)).all()


def test_positions_are_an_array_or_a_pair():
    layer, x = mha(2, F, enable_rotary_pos_emb=True), X[0]
    pair = [jnp.arange(T), jnp.arange(T) + 1]
    assert (layer(x, positions=pair) == layer(x, positions=tuple(pair))).all()
    for wrong in (pair * 2, jnp.arange(T + 1)):
        with pytest.raises(ValueError, match=r"^MultiHeadAttention: positions must"):
            layer(x, positions=wrong)
