"""te.convert and te.revert of nnx.MultiHeadAttention and its projections."""

import io
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to
from tests._models import at, data

FP8 = te.Float8CurrentScaling()
PARTS = ("query", "key", "value", "out")


class Model(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, **options)

    def __call__(self, x, **call):
        return self.attention(self.up(x), **call)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "use_bias": False}, {"normalize_qk": True}],
    ids=str,
)
def test_it_shares_variables_and_is_equal_to_rounding(options):
    plain = Model(decode=False, **options)
    converted = te.convert(plain)
    assert type(converted.attention) is te.MultiHeadAttention
    for name in PARTS:
        old, new = at(plain, f"attention/{name}"), at(converted, f"attention/{name}")
        assert type(new) is te.DenseGeneral
        assert new.kernel is old.kernel
    paths = [
        [path for path, _ in nnx.to_flat_state(nnx.state(m, nnx.Param))]
        for m in (plain, converted)
    ]
    assert paths[0] == paths[1]
    x = data(2, 8, 8)
    mask = nnx.make_causal_mask(jnp.ones((2, 8)))
    for call in ({}, {"is_causal": True}, {"mask": mask}):
        want = plain(x, **call)
        bound = 2.0**-18 * float(jnp.abs(want).max())
        close_to(converted(x, **call), np.asarray(want), bound)
    with te.autocast(FP8):
        assert not (converted(x) == plain(x)).all()


def test_it_is_reverted_to_the_bit():
    plain = Model(decode=False, normalize_qk=True)
    for converted in (te.convert(plain), nnx.merge(*nnx.split(te.convert(plain)))):
        reverted = te.revert(converted)
        assert type(reverted.attention) is nnx.MultiHeadAttention
        assert (reverted(data(2, 8, 8)) == plain(data(2, 8, 8))).all()
    assert nnx.graphdef(te.revert(te.convert(plain))) == nnx.graphdef(plain)


def test_a_cache_stays():
    plain = nnx.MultiHeadAttention(4, 16, decode=True, rngs=nnx.Rngs(0))
    plain.init_cache((2, 4, 16))
    x = data(2, 4, 16)
    plain(x[:, :1])
    converted = te.convert(plain)
    assert converted.cached_key is plain.cached_key
    want = plain(x[:, 1:2])
    plain.cache_index[...] -= 1
    close_to(converted(x[:, 1:2]), np.asarray(want), 2.0**-19)
    assert int(plain.cache_index[...]) == 2


@pytest.mark.parametrize(
    ("rules", "attention", "parts"),
    [
        ([("attention", FP8)], True, PARTS),
        ([("attention/*", FP8)], False, PARTS),
        ([("attention/query", FP8)], False, ("query",)),
        ([("attention", FP8), ("attention/out", "skip")], True, PARTS[:3]),
        ([("*", FP8), ("attention", "skip")], False, ()),
    ],
    ids=str,
)
def test_patterns(rules, attention, parts):
    found = te.convert(Model(decode=False), rules).attention
    assert (type(found) is te.MultiHeadAttention) == attention
    for name in PARTS:
        part = getattr(found, name)
        assert (type(part) is te.DenseGeneral) == (name in parts), name
        assert name not in parts or part.recipe == FP8
    assert found(data(2, 8, 16)).shape == (2, 8, 16)


def test_dropout_keeps_its_rate_stream_and_mode():
    plain, x = Model(decode=False, dropout_rate=0.5), data(2, 8, 8)
    converted = te.convert(plain)
    layer: Any = converted.attention
    assert type(layer) is te.MultiHeadAttention
    assert layer.rngs.count is plain.attention.rngs.count
    assert not (converted(x) == converted(x)).all()
    assert int(plain.attention.rngs.count[...]) == 2
    assert nnx.graphdef(te.revert(converted)) == nnx.graphdef(plain)
    converted.eval()
    want = plain(x, deterministic=True)
    close_to(converted(x), np.asarray(want), 2.0**-18 * float(jnp.abs(want).max()))
    assert (te.revert(converted)(x) == want).all()


def test_dropout_without_a_stream_needs_one_in_the_call():
    converted = te.convert(Model(decode=False, dropout_rate=0.5, keep_rngs=False))
    converted.train()
    x = data(2, 8, 8)
    assert not (converted(x, rngs=nnx.Rngs(1)) == converted(x, rngs=nnx.Rngs(2))).all()
    with pytest.raises(ValueError, match="rngs must be given to a layer that keeps no"):
        converted(x)


REASONS = {
    "its attention_fn is not": {"attention_fn": lambda q, k, v, **_: v},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_stays_and_why(reason):
    converted = te.convert(Model(decode=False, **REASONS[reason]))
    assert type(converted.attention) is nnx.MultiHeadAttention
    assert type(converted.attention.query) is te.DenseGeneral
    rows = {row.path: row for row in te.report(converted, file=io.StringIO()).rows}
    assert reason in rows["attention"].why
