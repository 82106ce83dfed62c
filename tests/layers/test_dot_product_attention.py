"""DotProductAttention alone and inside flax.nnx's layer; positions as formulas."""

from typing import Any

import _plain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import data
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to

B, T, N, H = 2, 6, 4, 8
Q, K, V = (data((B, T, N, H), i) for i in range(3))
BIAS = data((1, N, T, T), 3)
SCALE = H**-0.5


def attend(**kwargs):
    return te.DotProductAttention(N, H, rngs=nnx.Rngs(0), **kwargs)


def close(got, want):
    close_to(got, np.asarray(want), 2.0**-20 * float(jnp.abs(want).max()))


def test_as_the_attention_of_nnx():
    """Masks, causal masks and dropout arrive through its arguments."""
    x = data((B, T, 32))
    make = lambda **o: nnx.MultiHeadAttention(
        N, 32, decode=False, rngs=nnx.Rngs(0), **o
    )
    ours, theirs = make(attention_fn=attend()), make()
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    for call in ({}, {"mask": mask}, {"is_causal": True}):
        close(ours(x, **call), theirs(x, **call))
    dropping = make(attention_fn=attend(), dropout_rate=0.5)
    dropping.train()
    assert not (dropping(x) == dropping(x)).all()
    dropping.eval()
    close(dropping(x), theirs(x))


def test_kinds_of_bias():
    want = te.dot_product_attention(Q, K, V, bias=BIAS)
    for kind in (None, "post_scale_bias"):
        close(attend(attn_bias_type=kind)(Q, K, V, BIAS), want)
    scaled = te.dot_product_attention(Q, K, V, bias=BIAS * SCALE)
    close(attend(attn_bias_type="pre_scale_bias")(Q, K, V, BIAS), scaled)


@pytest.mark.parametrize("slopes", [True, (0.5, 0.0, 0.25, 2.0)], ids=str)
def test_alibi(slopes):
    given = slopes if slopes is True else jnp.array(slopes)
    want = te.dot_product_attention(Q, K, V, alibi_slopes=given)
    close(attend(alibi_slopes=slopes)(Q, K, V), want)
    assert not jnp.allclose(attend(alibi_slopes=False)(Q, K, V), want)


def test_a_mask_of_padding_takes_the_place_of_lengths():
    seen = jnp.broadcast_to(jnp.arange(T) < 4, (B, 1, T, T))
    lengths = {"kv_seqlen": jnp.array([4, 4]), "q_seqlen": jnp.array([T, T])}
    layer = attend(attn_mask_type="padding_causal")
    close(layer(Q, K, V, mask=seen), layer(Q, K, V, **lengths))


def test_wide_logits_keep_the_dtype():
    narrow = [a.astype(jnp.bfloat16) for a in (Q, K, V)]
    exact: Any = te.dot_product_attention(*(a.astype(jnp.float32) for a in narrow))
    wide = attend(float32_logits=True)(*narrow)
    assert wide.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide, exact.astype(jnp.bfloat16))


def test_any_number_of_batch_dims():
    many = [jnp.stack([a, a + 1]) for a in (Q, K, V)]
    close(attend()(*many)[1], attend()(*(a[1] for a in many)))
    close(attend()(*(a[0] for a in (Q, K, V))), attend()(Q, K, V)[0])


@pytest.mark.parametrize(
    ("dims", "first"), [((2,), False), ((), False), ((2, 1), False), ((2, 1), True)]
)
def test_pages_of_keys_and_values(dims, first):
    """Under any number of dims of the batch; they have none themselves."""
    pages = [data((4, 3, N, H), i) for i in (3, 4)]
    tables = jnp.array([[3, 1], [0, 2]]), jnp.array([[2, 0], [1, -1]])
    lengths = jnp.array([6, 3])
    k, v = (jnp.take(a, t, axis=0) for a, t in zip(pages, tables, strict=True))
    k, v = k.reshape(B, T, N, H), v.reshape(B, T, N, H)
    want = te.dot_product_attention(Q, k, v, kv_seqlen=lengths)
    take = lambda a: a.reshape(*dims, *a.shape[1:]) if dims else a[0]
    swap = lambda a, axis: jnp.moveaxis(a, axis, 0) if first else a
    layer = attend(transpose_batch_sequence=first)
    got = layer(
        swap(take(Q), len(dims)),
        *(swap(a, 1) for a in pages),
        page_table=tuple(map(take, tables)),
        kv_seqlen=take(lengths),
    )
    close(got, swap(take(want), len(dims)))


def test_dropout_follows_its_stream_and_the_mode():
    layer = attend(dropout_rate=0.5, dropout_rng_name="own")
    assert not (layer(Q, K, V) == layer(Q, K, V)).all()
    key = jax.random.key(1)
    first = layer(Q, K, V, dropout_rng=key)
    assert (layer(Q, K, V, dropout_rng=key) == first).all()
    layer.eval()
    close(layer(Q, K, V), te.dot_product_attention(Q, K, V))
    with pytest.raises(ValueError, match="rngs must hold the stream 'own'"):
        te.DotProductAttention(
            N, H, dropout_rate=0.5, dropout_rng_name="own", rngs=nnx.Rngs(params=0)
        )


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH", "TBNH"])
def test_rotary_embedding_turns_complex_numbers(method, layout):
    order = ["BTNH".index(d) for d in layout]
    options = {
        "rotary_pos_emb_windows": (2, 300),
        "rotary_pos_emb_group_method": method,
    }
    want = np.transpose(_plain.rotate(np.asarray(Q, np.float64), options), order)
    run = lambda p: te.rotary_embedding(
        jnp.transpose(Q, order), p, windows=(2, 300), group_method=method, layout=layout
    )
    for positions in (None, jnp.arange(T), jnp.broadcast_to(jnp.arange(T), (B, T))):
        # Angles of up to 6 radians are off by 2^-22.
        close_to(run(positions), want, 2.0**-20 * np.abs(want).max())
    assert not (run(jnp.arange(T) + 1) == run(None)).all()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("t", "s"), [(1, 1), (1, 300), (7, 1), (40, 150), (150, 40)])
def test_relative_position_biases_are_those_of_t5(t, s, bidirectional):
    layer = te.RelativePositionBiases(32, 128, N, rngs=nnx.Rngs(0))
    buckets = _plain.buckets(t, s, bidirectional)
    want = np.asarray(layer.embedding)[None][:, :, buckets]
    np.testing.assert_array_equal(layer(t, s, bidirectional), want)
    moved = {"q_positions": jnp.arange(t) + 5, "k_positions": jnp.arange(s) + 5}
    np.testing.assert_array_equal(layer(t, s, bidirectional, **moved), want)
    grads = nnx.grad(lambda m: jnp.sum(m(t, s, bidirectional)))(layer)
    count = np.bincount(buckets.ravel(), minlength=32)
    np.testing.assert_array_equal(grads["embedding"][...], np.tile(count, (N, 1)))


def test_relative_biases_add_up_their_gradient_in_float32():
    """A sum of ones in bfloat16 ends at 256."""
    t = 600
    layer = te.RelativePositionBiases(32, 128, 1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    count = np.bincount(_plain.buckets(t, t, True).ravel(), minlength=32)
    for given in ({}, {"q_positions": jnp.arange(t)}):
        biases = lambda m, given=given: m(t, t, **given).astype(jnp.float32)
        grads = jax.jit(nnx.grad(lambda m, f=biases: jnp.sum(f(m))))(layer)
        np.testing.assert_array_equal(grads["embedding"][...][0], count)
