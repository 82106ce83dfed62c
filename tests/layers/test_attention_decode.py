"""Decoding with a cache: agreement with the full forward, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from _attention import block, decoded, forward, mha
from _dense import data
from flax import nnx
from jax.experimental import checkify

from te_flax.testing.numerics import close_to

B, T, F = 2, 6, 32
X = data((B, T, F))
CAUSAL = {"attn_mask_type": "causal"}
# test_transformer_layer.py has packed and grouped kernels, both kinds of RoPE, relative
# biases, a window to the left, a sink and cross attention.
CASES = {
    "grouped": {"num_kv_heads": 1, "normalize_qk": True, "enable_rotary_pos_emb": True},
    "apart": {"fuse_qkv_params": False, "window_size": (2, 0)},
    "alibi": {"alibi_slopes": True},
    "slopes": {"alibi_slopes": jnp.array([0.5, 0.0, 0.1, 2.0]), "num_kv_heads": 2},
    "type": {"attn_mask_type": "padding_causal", "softmax_type": "off_by_one"},
}


@pytest.mark.parametrize("name", CASES)
def test_token_by_token(name):
    layer = mha(**CAUSAL | CASES[name])
    mask = jnp.ones((B, 1, T, T)) if name == "type" else None
    full = forward(layer, X, mask=mask)
    bound = 2.0**-20 * float(jnp.abs(full).max())
    close_to(decoded(layer, X, chunks=(3, 3)), np.asarray(full), bound)


def test_the_cache_is_that_of_nnx():
    """Names, kinds and contents."""
    theirs = nnx.MultiHeadAttention(4, F, decode=True, rngs=nnx.Rngs(0))
    ours = mha(fuse_qkv_params=False, decode=True)
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    for layer in (theirs, ours):
        layer.init_cache(X.shape)
        layer(X[:, :1])
        layer(X[:, 1:2])
    want, got = (nnx.state(layer, nnx.Cache) for layer in (theirs, ours))
    assert int(got["cache_index"][...]) == 2
    for name in ("cached_key", "cached_value"):
        close_to(got[name][...], np.asarray(want[name][...]), 2.0**-20)


def test_a_mask_hides_slots_of_the_cache():
    layer = mha(**CAUSAL)
    hidden = jnp.arange(T) != 1
    seen = jnp.broadcast_to(hidden, (B, 1, 1, T))
    full = layer(X, mask=seen)
    layer.init_cache(X.shape)
    got = [layer(X[:, i : i + 1], mask=seen, decode=True) for i in range(3)]
    bound = 2.0**-20 * float(jnp.abs(full).max())
    close_to(jnp.concatenate(got, 1), np.asarray(full[:, :3]), bound)


def test_a_narrow_cache_rounds_keys_and_values():
    layer = mha(**CAUSAL)
    full = layer(X)
    layer.init_cache(X.shape, jnp.bfloat16)
    got = layer(X, decode=True)
    assert got.dtype == full.dtype
    error = jnp.linalg.norm(got - full) / jnp.linalg.norm(full)
    assert 0 < error < 2.0**-7


def test_a_full_cache():
    layer = mha(**CAUSAL, decode=True)
    layer.init_cache((B, 2, F))
    layer(X[:, :2])
    text = (
        "^MultiHeadAttention: the tokens must be <= the cache's length 2, got 3; call"
    )
    with pytest.raises(ValueError, match=text):
        layer(X[:, :1])
    run = nnx.jit(lambda layer, x: layer(x))
    assert np.isnan(run(layer, X[:, :1])).all()
    layer.init_cache((B, 2, F))
    assert np.isfinite(run(layer, X[:, :1])).all()  # the index starts anew
    graph, state = nnx.split(layer)

    def pure(state, x):
        return nnx.merge(graph, state, copy=True)(x)

    errors, _ = checkify.checkify(pure)(state, X[:, :2])
    with pytest.raises(Exception, match="must be <= the cache's length 2, got 3"):
        errors.throw()


@pytest.mark.parametrize("make", [mha, block])
def test_no_cache(make):
    text = "the layer must hold a cache to decode, got none; call init_cache first"
    with pytest.raises(ValueError, match=text):
        make()(X, decode=True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: m.init_cache((4,)), "input_shape must have at least 2 dims >= 1"),
        (lambda m: m.init_cache((2, 0, 4)), "input_shape must have at least 2 dims"),
        (lambda m: m.init_cache("shape"), "input_shape must be a tuple of ints"),
        (lambda m: m.init_cache((2, 4, F), jnp.int8), "dtype must be None or one of"),
        (
            lambda m: m(X[:, :0], decode=True),
            "the tokens must be >= 1 in decoding",
        ),
        (lambda m: m(X, decode=True), "inputs must fit the cache of keys of shape"),
        (lambda m: m(X[:1, :1], decode=True), "inputs must fit the cache of keys of"),
        (
            lambda m: m(X[:, :1], decode=True, segment_ids=jnp.ones((B, 1), int)),
            "segment_ids must be None in decoding, got .*; pass mask= for the cache",
        ),
        (
            lambda m: m(X[:, :1], decode=True, kv_seqlen=jnp.ones(B, int)),
            "kv_seqlen must be None in decoding",
        ),
    ],
)
def test_what_decoding_does_not_take(call, text):
    layer = mha(**CAUSAL)
    layer.init_cache((B, 4, F))
    with pytest.raises((ValueError, TypeError), match=f"^MultiHeadAttention: {text}"):
        call(layer)


@pytest.mark.parametrize(
    "options", [{"attention_type": "cross"}, {"fuse_qkv_params": False}], ids=str
)
def test_other_keys_are_not_cached(options):
    layer = mha(**options)
    layer.init_cache(X.shape)
    text = "^MultiHeadAttention: inputs_k must be None in decoding, .*; pass decode=Fa"
    with pytest.raises(ValueError, match=text):
        layer(X[:, :1], X, decode=True)


def test_a_function_of_the_scores_counts_tokens_of_the_call():
    layer = mha(score_mod=lambda scores, b, n, t, s: scores)
    layer.init_cache(X.shape)
    with pytest.raises(ValueError, match="score_mod must be None in decoding"):
        layer(X, decode=True)
