"""Dropout, functions of the scores, pages, NaN, vmap: what the oracle leaves open."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cases import (
    CASES,
    DLSE,
    DO,
    FAST,
    KEYS,
    SWAP,
    VALUES,
    B,
    H,
    K,
    N,
    Q,
    S,
    T,
    gradients,
    inputs,
    integers,
    normal,
)

import te_flax as te
from te_flax.functional.attention import blocks
from te_flax.testing.numerics import close_to
from te_flax.testing.oracle_attention import attention, attention_bounds

IMPLEMENTATIONS = ["chunked", "reference"]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)


def attend(*arrays, **options):
    f = lambda *a: te.dot_product_attention(*a, **options)
    return jax.jit(f, compiler_options=FAST)(*arrays)


def kept(implementation, rate, key):
    """The mask of dropout, read off with uniform probabilities and one-hot values."""
    zeros, one_hot = jnp.zeros((B, T, N, H)), jnp.eye(S)[None, :, None]
    values = jnp.broadcast_to(one_hot, (B, S, K, S))
    options = {"dropout_rate": rate, "dropout_key": key}
    o = attend(zeros, KEYS, values, implementation=implementation, **options)
    return np.transpose(np.asarray(o) > 0, SWAP)


def test_dropout_drops_the_same_everywhere(monkeypatch):
    key = jax.random.key(7)
    want = kept("reference", 0.4, jax.random.key_data(key))
    for block in (4, 512):
        monkeypatch.setattr(blocks, "BLOCK", block)
        np.testing.assert_array_equal(kept("chunked", 0.4, key), want)
    assert abs(want.mean() - 0.6) < 4 * np.sqrt(0.24 / want.size)
    heads = want.reshape(B * N, T, S)
    assert len({a.tobytes() for a in heads}) == B * N
    assert all(len({row.tobytes() for row in a}) > T / 2 for a in heads)
    columns = np.swapaxes(heads, 1, 2)
    assert all(len({row.tobytes() for row in a}) > S / 2 for a in columns)


@both
def test_dropout_gradients_use_the_mask_of_the_forward_pass(implementation):
    key = jax.random.key(1)
    case = CASES["causal"] | {"dropout_rate": 0.25, "dropout_key": key}
    got = gradients(case, implementation)
    share = kept(implementation, 0.25, key) / 0.75
    x = inputs(case, kept=share)
    want, bounds = attention(x), attention_bounds(x, np.dtype("float32"), blocks=3)
    for name in ("o", "dq", "dk", "dv"):
        found = np.transpose(got[name], SWAP)
        close_to(found, getattr(want, name), getattr(bounds, name))


def relative(scores, b, n, t, s, table, rates):
    """A bias by distance, a scale by example: the numbers are those of the call."""
    return scores * rates["by_example"][b] + table[n, jnp.abs(t - s)]


@both
def test_score_mod(implementation):
    table, rates = normal(N, T + S), {"by_example": normal(B)}

    def modified(q, k, v, table, rates):
        args = (table, rates)
        return te.dot_product_attention(
            q,
            k,
            v,
            score_mod=relative,
            score_mod_args=args,
            implementation=implementation,
        )

    def plain(q, k, v, table, rates):
        far = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S))
        q = q * rates["by_example"][:, None, None, None]
        return te.dot_product_attention(
            q, k, v, bias=table[:, far], implementation="reference"
        )

    def both_passes(f):
        loss = lambda *a: jnp.sum(f(*a) * DO)
        run = jax.jit(jax.value_and_grad(loss, range(5)), compiler_options=FAST)
        return run(Q, KEYS, VALUES, table, rates)

    got, want = both_passes(modified), both_passes(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close_to(a, np.asarray(b), 1e-5 * max(1, float(jnp.max(jnp.abs(b)))))


@both
def test_score_mod_takes_numbers(implementation):
    def f(q, *factors):
        options = {"score_mod": lambda s, b, n, t, k, x, y: s * x * y}
        o = te.dot_product_attention(
            q, q, q, score_mod_args=factors, implementation=implementation, **options
        )
        return jnp.sum(o)

    run = jax.grad(f)
    np.testing.assert_array_equal(
        run(Q, 2.0, np.float32(3)), run(Q, jnp.float32(2), jnp.float32(3))
    )


@both
def test_an_infinite_sink_leaves_nothing(implementation):
    sink = normal(N).at[1].set(jnp.inf)
    got = gradients({"softmax_type": "learnable", "sink": sink}, implementation)
    for name in ("o", "dq"):
        assert not np.any(got[name][:, :, 1])
        assert np.all(np.any(got[name][:, :, [0, 2, 3]], axis=(0, 1, 3)))
    assert float(got["sink"][1]) == 0
    assert all(np.isfinite(a).all() for a in got.values())


def looked_up(scores, b, n, t, s, queries, keys):
    """NaN beyond the tables, and no derivative at 0."""
    found = jnp.take(queries, t) + jnp.take(keys, s)
    return jnp.sqrt(jnp.abs(scores)) + found


def test_score_mod_meets_no_padding():
    k = KEYS[:, :T]  # two blocks of 4 of both sides

    def passes(implementation):
        def f(q, k, *tables):
            options = {"score_mod": looked_up, "score_mod_args": tables}
            o = te.dot_product_attention(
                q, k, k, implementation=implementation, **options
            )
            return jnp.sum(o * Q)

        run = jax.jit(jax.grad(f, range(4)), compiler_options=FAST)
        return run(Q, k, jnp.arange(T) / T, jnp.arange(T) / S)

    for got, want in zip(passes("chunked"), passes("reference"), strict=True):
        close_to(got, np.asarray(want), 1e-5 * max(1, float(jnp.max(jnp.abs(want)))))


ORDER = {"BTNH": (0, 1, 2, 3), "BNTH": SWAP, "TBNH": (1, 0, 2, 3)}


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [("chunked", "BTNH"), ("reference", "BNTH"), ("reference", "TBNH")],
)
def test_pages(implementation, layout):
    size, order = 3, ORDER[layout]
    where = integers([4, 0, 2], [1, 5, -1])
    pages = [jnp.full((6, size, K, H), jnp.nan) for _ in range(2)]
    lengths = jnp.array([9, 5])
    full = [a.reshape(B, S // size, size, K, H) for a in (KEYS, normal(B, S, K, H))]
    for b, row in enumerate(where.tolist()):
        for i, page in enumerate(p for p in row if p >= 0):
            pages = [p.at[page].set(f[b, i]) for p, f in zip(pages, full, strict=True)]
    options = {"kv_seqlen": lengths, "mask_type": "padding", "layout": layout}
    options["implementation"] = implementation
    moved = [jnp.transpose(a, order) for a in (Q, *pages)]
    got = attend(*moved, page_table=(where, where), **options)
    moved = [jnp.transpose(a.reshape(-1, S, K, H), order) for a in full]
    want = attend(jnp.transpose(Q, order), *moved, **options)
    np.testing.assert_array_equal(got, want)


def test_a_key_on_no_page_is_nan():
    pages, table = normal(3, 4, K, H), integers([0, 1], [2, -1])
    options = {"page_table": (table, table), "kv_seqlen": jnp.array([8, 5])}
    o = attend(Q, pages, pages, **options)
    assert np.isfinite(o[0]).all()
    assert np.isnan(o[1]).all()


@both
def test_what_is_not_seen_does_not_leak(implementation):
    """NaN and Inf in padding, behind a causal mask and in the other's queries."""
    bad_k = KEYS.at[0, 5].set(jnp.nan).at[1, :].set(jnp.inf)
    bad_v = VALUES.at[0, 5].set(jnp.inf).at[1, :].set(jnp.nan)
    bad_q = Q.at[0, 6].set(jnp.nan).at[1].set(jnp.nan)
    lengths = {"q_seqlen": jnp.array([6, 7]), "kv_seqlen": jnp.array([9, 0])}
    case = {"mask_type": "padding_causal", **lengths}
    got = gradients(case, implementation, (bad_q, bad_k, bad_v))
    clean = gradients(case, implementation)
    sees = np.zeros((B, T), bool)
    sees[0, 5] = True  # the only query of its example that may see key 5
    for name in ("o", "dq"):
        assert np.isnan(np.asarray(got[name])[sees]).all()
        np.testing.assert_array_equal(
            np.asarray(got[name])[~sees], np.asarray(clean[name])[~sees]
        )
    for name in ("dk", "dv"):  # keys that no poisoned query sees
        np.testing.assert_array_equal(got[name][:, 6:], clean[name][:, 6:])
        assert not np.isnan(got[name][1]).any()


@both
def test_a_query_that_sees_nothing(implementation):
    do = DO.at[1].set(jnp.nan)
    got = gradients(CASES["lengths"], implementation, do=do, dlse=DLSE)
    for name in ("o", "dq", "dk", "dv"):
        assert not np.any(got[name][1]), name
        assert np.isfinite(got[name]).all()
    assert np.isneginf(got["lse"][1]).all()


def poly(scores, b, n, t, k, factor):
    return scores * factor


MAPPED = {  # what varies, and what the call needs beside it
    "q": (Q, {}),
    "v": (VALUES, {}),
    "mask": (jnp.tri(T, S, dtype=bool), {}),
    "alibi_slopes": (normal(N), {"mask_type": "causal"}),
    "sink": (normal(N), {"softmax_type": "learnable"}),
    "segment_ids": (jnp.broadcast_to(jnp.arange(T) // 3 + 1, (B, T)), {"k": Q}),
    "positions": (
        jnp.broadcast_to(jnp.arange(T) % 4, (B, T)),
        {"k": Q, "mask_type": "causal"},
    ),
    "dropout_key": (jax.random.key_data(jax.random.key(1)), {"dropout_rate": 0.5}),
    "score_mod_args": (jnp.float32(2), {"score_mod": poly}),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_one_argument(name):
    """Each entry is that of a call of its own, whatever is mapped."""
    value, more = MAPPED[name]
    more = dict(more)
    q, k = Q, more.pop("k", KEYS)
    if k is Q:  # as many keys as queries
        k = Q[..., :K, :]
    v = VALUES[:, : k.shape[1]]

    def call(a):
        given = {"q": q, "k": k, "v": v} | more
        given[name] = (a,) if name == "score_mod_args" else a
        return te.dot_product_attention(**given, implementation="reference")

    other = value + 1 if name == "dropout_key" else jnp.flip(value)
    stacked = jnp.stack([value, value * 3 if value.ndim == 0 else other])
    got = jax.jit(jax.vmap(call), compiler_options=FAST)(stacked)
    assert not (got[0] == got[1]).all()
    for i in range(2):
        want = jax.jit(call, compiler_options=FAST)(stacked[i])
        close_to(got[i], np.asarray(want), 2.0**-20 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(
    ("implementation", "what"),
    [*(("chunked", n) for n in ("k", "bias", "lengths", "all")), ("reference", "all")],
)
def test_vmap(implementation, what):
    """Over one argument, and over all of them."""
    arrays = {"q": Q, "k": KEYS, "v": VALUES, "bias": normal(N, T, S)}
    arrays["lengths"] = jnp.array([9, 4])
    mapped = {name: what in (name, "all") for name in arrays}
    stacked = {
        name: jnp.stack([a, jnp.flip(a, 0)]) if mapped[name] else a
        for name, a in arrays.items()
    }

    def passes(implementation):
        def loss(floats, lengths):
            o = te.dot_product_attention(
                **floats, kv_seqlen=lengths, implementation=implementation
            )
            return jnp.sum(o * DO)

        return lambda lengths, **floats: jax.value_and_grad(loss)(floats, lengths)

    axes = {name: 0 if m else None for name, m in mapped.items()}
    f = lambda a: passes(implementation)(**a)
    got = jax.jit(jax.vmap(f, (axes,)), compiler_options=FAST)(stacked)
    one_by_one = jax.jit(lambda a: passes("reference")(**a), compiler_options=FAST)
    for i in range(2):
        want = one_by_one({n: a[i] if mapped[n] else a for n, a in stacked.items()})
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            close_to(a[i], np.asarray(b), 1e-5 * max(1, float(jnp.max(jnp.abs(b)))))


def test_slopes_are_the_published_ones():
    options = {"implementation": "reference", "mask_type": "causal"}
    slopes = jnp.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    np.testing.assert_array_equal(
        attend(Q, KEYS, VALUES, alibi_slopes=True, **options),
        attend(Q, KEYS, VALUES, alibi_slopes=slopes, **options),
    )
