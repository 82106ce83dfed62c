"""Calls that cannot mean anything are refused with what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cases import KEYS, VALUES, B, H, K, N, Q, S, T

import te_flax as te

LENGTHS = jnp.array([3, 7])
THREE = [0, 1, 1]
PACKED = jnp.array([[3, 4], [7, -1]])
PAGES = (jnp.zeros((B, 2), jnp.int32),) * 2


def ids(value):
    return (jnp.full((B, T), value), jnp.ones((B, S), jnp.int32))


VALUE_ERRORS = {
    "layout must be one of 'BTNH', 'BNTH', 'TBNH', got 'NHTB'": {"layout": "NHTB"},
    "k must have a number of heads that divides that of q": {
        "k": KEYS[:, :, THREE],
        "v": VALUES[:, :, THREE],
    },
    "k must have the head_dim of q": {"k": KEYS[..., :4]},
    "k must have the batch of q": {"k": KEYS[:1], "v": VALUES[:1]},
    "v must have as many T as k": {"v": VALUES[:, :4]},
    "q must have the 4 dims BTNHH": {"q": Q[0]},
    r"mask must broadcast to \[B, N, T, S\] = \(2, 4, 7, 9\), got shape \(4, 7, 8\)": {
        "mask": jnp.ones((N, T, S - 1), bool)
    },
    r"bias must broadcast to .*got shape \(1, 1, 1, 7, 9\)": {
        "bias": jnp.ones((1, 1, 1, T, S))
    },
    "mask_type must be one of": {"mask_type": "causal_left"},
    "mask_type must come with q_seqlen, kv_seqlen or segment_ids": {
        "mask_type": "padding"
    },
    "window must have integers >= -1, got": {"window": (-2, 0)},
    "window must be None, an integer or": {"window": (1, 2, 3)},
    "scale must be a finite Python number": {"scale": float("nan")},
    "softmax_type must be one of": {"softmax_type": "off-by-one"},
    "sink must be given if and only if": {"softmax_type": "learnable"},
    r"sink must have shape \(4,\)": {"softmax_type": "learnable", "sink": jnp.ones(K)},
    r"alibi_slopes must have shape \(4,\)": {"alibi_slopes": jnp.ones(3)},
    "dropout_rate must be a Python number >= 0 and < 1": {"dropout_rate": 1.0},
    "dropout_key must be given where dropout_rate > 0": {"dropout_rate": 0.5},
    "max_segments must be None or an integer >= 1": {"max_segments": 0},
    r"segment_ids must lie in \[0, 3\], got 4": {
        "segment_ids": ids(4),
        "max_segments": 3,
    },
    r"segment_ids must lie in \[0, 2147483647\], got -1": {"segment_ids": ids(-1)},
    r"segment_ids must have shape \(2, 9\), got shape \(2, 7\); pass a pair": {
        "segment_ids": jnp.ones((B, T), jnp.int32)
    },
    "segment_ids must be None where q_seqlen or kv_seqlen is given": {
        "segment_ids": ids(1),
        "q_seqlen": LENGTHS,
    },
    "positions must be an array or a pair": {"positions": (LENGTHS,) * 3},
    r"q_seqlen must lie in \[0, 7\], got 8": {"q_seqlen": LENGTHS + 1},
    r"kv_seqlen must have shape \[B\] or \[B, M\]": {
        "kv_seqlen": jnp.ones(3, jnp.int32)
    },
    r"q_seqlen, kv_seqlen must be \[B, M\] for queries and keys alike": {
        "q_seqlen": PACKED,
        "kv_seqlen": LENGTHS,
    },
    "offsets must come with q_seqlen and kv_seqlen": {"offsets": (LENGTHS, LENGTHS)},
    r"offsets must have shape \(2, 3\)": {
        "offsets": (PACKED, PACKED),
        "q_seqlen": PACKED,
        "kv_seqlen": PACKED,
    },
    "score_mod_args must be empty without score_mod": {"score_mod_args": (LENGTHS,)},
    "page_table must come with kv_seqlen": {"page_table": PAGES},
    r"page_table must lie in \[-1, 1\], got 2": {
        "page_table": (PAGES[0], PAGES[1] + 2),
        "kv_seqlen": LENGTHS,
    },
    r"page_table must be \[B, pages\] of keys and values alike": {
        "page_table": (PAGES[0], PAGES[1][:, :1]),
        "kv_seqlen": LENGTHS,
    },
}
TYPE_ERRORS = {
    "q must be float32, bfloat16 or float16, got int32": {"q": Q.astype(jnp.int32)},
    "k must have the dtype of q, float32": {"k": KEYS.astype(jnp.bfloat16)},
    "q must be float32, bfloat16 or float16 while jax_enable_x64": {
        "q": np.ones((B, T, N, H))
    },
    "mask must be boolean or floating": {"mask": jnp.ones((T, S), jnp.int32)},
    "dropout_key must be one random key, got 3; pass jax.random.key": {
        "dropout_rate": 0.5,
        "dropout_key": 3,
    },
    r"dropout_key must be one random key, got float32 \(2,\)": {
        "dropout_rate": 0.5,
        "dropout_key": jnp.ones(2),
    },
    "bias must be floating": {"bias": jnp.ones((T, S), jnp.int32)},
    "q_seqlen must be int32": {"q_seqlen": jnp.ones(B)},
    "score_mod must be callable": {"score_mod": "tanh"},
    "score_mod_args must be a tuple": {
        "score_mod": lambda s, *_: s,
        "score_mod_args": LENGTHS,
    },
}


def refused(error, match, changes):
    arrays = {"q": Q, "k": KEYS, "v": VALUES} | changes
    with pytest.raises(error, match=match):
        te.dot_product_attention(**arrays)


@pytest.mark.parametrize("match", VALUE_ERRORS)
def test_values(match):
    refused(ValueError, match, VALUE_ERRORS[match])


@pytest.mark.parametrize("match", TYPE_ERRORS)
def test_types(match):
    refused(TypeError, match, TYPE_ERRORS[match])


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize(("b", "t", "s"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_attend_to(implementation, b, t, s):
    q, k = jnp.ones((b, t, N, H)), jnp.ones((b, s, K, H))
    options = {"mask_type": "causal", "implementation": implementation}
    o, lse = te.dot_product_attention(q, k, k, return_residual=True, **options)
    assert o.shape == q.shape
    assert not np.any(o)
    assert lse.shape == (b, N, t)


def test_numbers_of_numpy():
    key = jax.random.key(0)
    got, want = (
        te.dot_product_attention(
            Q, KEYS, VALUES, window=window, dropout_rate=rate, dropout_key=key
        )
        for window, rate in ((np.int64(2), np.float32(0.5)), (2, 0.5))
    )
    np.testing.assert_array_equal(got, want)


def test_no_heads_have_no_slopes():
    q, k = jnp.ones((B, T, 0, H)), jnp.ones((B, S, 1, H))
    o = te.dot_product_attention(q, k, k, alibi_slopes=True)
    assert np.shape(o) == q.shape


def test_numbers_are_not_looked_at_under_jit():
    f = lambda n: te.dot_product_attention(Q, KEYS, VALUES, q_seqlen=n)
    assert jax.jit(f)(LENGTHS + 1).shape == (*Q.shape[:3], VALUES.shape[-1])
