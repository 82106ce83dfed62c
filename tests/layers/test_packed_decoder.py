"""Packed sequences in a decoder layer: no segment reads what another one encoded."""

import jax.numpy as jnp
import numpy as np
import pytest
from _attention import block
from _dense import data

IDS = jnp.array([[1, 1, 1, 2, 2, 2]])
KEY_IDS = jnp.array([[1, 1, 2, 2, 2]])
POSITIONS, KEY_POSITIONS = jnp.array([[0, 1, 2] * 2]), jnp.array([[0, 1, 0, 1, 2]])
X, ENCODED = data((1, 6, 16)), data((1, 5, 16), 1)


def decoder(**options):
    quiet = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return block(16, 32, 2, layer_type="decoder", **quiet, **options)


def test_it_equals_each_segment_alone():
    layer = decoder(enable_rotary_pos_emb=True, enable_relative_embedding=False)
    got = layer(
        X,
        ENCODED,
        segment_ids=IDS,
        encoded_segment_ids=KEY_IDS,
        positions=POSITIONS,
        encoded_positions=KEY_POSITIONS,
    )
    parts = ((slice(0, 3), slice(0, 2)), (slice(3, 6), slice(2, 5)))
    alone = [layer(X[:, q], ENCODED[:, k]) for q, k in parts]
    want = jnp.concatenate(alone, 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-18)


def test_alibi_is_for_the_self_attention():
    layer = decoder(alibi_slopes=True)
    assert layer.self_attention.core_attention.alibi_slopes is True
    assert layer.cross_attention.core_attention.alibi_slopes is None


def test_a_mask_serves_too():
    layer = decoder()
    both = {"segment_ids": IDS, "encoded_segment_ids": KEY_IDS}
    mask = (IDS[..., None] == KEY_IDS[:, None])[:, None]
    got = layer(X, ENCODED, None, mask, segment_ids=IDS)
    np.testing.assert_array_equal(got, layer(X, ENCODED, **both))


@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        ("decoder", {"segment_ids": IDS}, "be given to a decoder layer with segment_"),
        ("decoder", {"encoded_segment_ids": KEY_IDS}, "be given with segment_ids"),
        ("encoder", {"encoded_segment_ids": IDS}, "be given to a decoder layer alone"),
    ],
)
def test_what_is_refused(kind, call, text):
    layer = decoder() if kind == "decoder" else block(16, 32, 2)
    inputs = (X, ENCODED)[: 1 + (kind == "decoder")]
    text = f"^TransformerLayer: encoded_segment_ids must {text}"
    with pytest.raises(ValueError, match=text):
        layer(*inputs, **call)
