"""te.dot_product_attention against jax.nn's, wherever that can express the case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_flax as te
from te_flax.testing.numerics import close_to

RNG = np.random.default_rng(0)
B, T, S, N, K, H = 2, 7, 9, 4, 2, 8


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


Q, KEYS, VALUES = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)
BIAS, MASK = normal(1, N, T, S), jnp.asarray(RNG.random((B, 1, T, S)) < 0.7)
LENGTHS = (jnp.array([3, 7]), jnp.array([9, 4]))
CASES = {
    "plain": ({}, {}),
    "causal": ({"mask_type": "causal"}, {"is_causal": True}),
    "window": ({"window": (3, 2)}, {"local_window_size": (3, 2)}),
    "bias": ({"bias": BIAS}, {"bias": BIAS}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "lengths": (
        {"q_seqlen": LENGTHS[0], "kv_seqlen": LENGTHS[1], "mask_type": "padding"},
        {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]},
    ),
}
ORDER = {"BTNH": (0, 1, 2, 3), "BNTH": (0, 2, 1, 3), "TBNH": (1, 0, 2, 3)}
IMPLEMENTATIONS = ["chunked", "reference"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_equals_jax_nn(case, implementation):
    ours, theirs = CASES[case]

    def loss(f, options):
        def total(q, k, v):
            o = f(q, k, v, **options)
            return jnp.sum(o * jnp.cos(jnp.arange(H, dtype=o.dtype))), o

        return jax.grad(total, (0, 1, 2), has_aux=True)(Q, KEYS, VALUES)

    got = loss(te.dot_product_attention, ours | {"implementation": implementation})
    want = loss(jax.nn.dot_product_attention, theirs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close_to(a, np.asarray(b), 1e-5)


@pytest.mark.parametrize("layout", ORDER)
def test_layouts(layout):
    order = ORDER[layout]
    q, k, v = (jnp.transpose(a, order) for a in (Q, KEYS, VALUES))
    got = te.dot_product_attention(q, k, v, layout=layout, bias=BIAS)
    want = te.dot_product_attention(Q, KEYS, VALUES, bias=BIAS)
    np.testing.assert_array_equal(got, jnp.transpose(want, order))
