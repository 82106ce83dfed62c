"""te.record and te.inspect of FP8 attention: its ten arrays, as a GEMM's three."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax import plot
from te_flax.quantize.statistics import statistics

RECIPE = te.DelayedScaling(amax_history_len=4, fp8_attention=True)
FORWARD, BACKWARD = ["q", "k", "v", "s", "o"], ["do", "dp", "dq", "dk", "dv"]


class Net(nnx.Module):
    """One attention, with q, k and v as parameters."""

    def __init__(self):
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 2, 8))
        # Few keys are seen well, so that most probabilities flush.
        self.q, self.k, self.v = (
            nnx.Param(jnp.asarray(a, jnp.float32)) for a in (9 * q, k, v)
        )
        self.attend = te.DotProductAttention(
            2, 8, amax_history_len=4, attn_mask_type="causal", rngs=nnx.Rngs(0)
        )

    def __call__(self):
        return self.attend(self.q[...], self.k[...], self.v[...])


def loss(net):
    return 3 * jnp.sum(net() ** 2)


def by_role(rows):
    return {row["role"]: row for row in rows}


def test_a_run_is_recorded_and_inspected(tmp_path):
    net, file, seen = Net(), tmp_path / "run.jsonl", []
    step = nnx.jit(te.grad(loss))
    with te.autocast(RECIPE), te.record(file, net) as recorder:
        for _ in range(2):
            step(net)
            seen.append(te.inspect(net).rows)
            recorder.step()
    rows = plot.read(file)
    assert [r["role"] for r in rows] == 2 * (FORWARD + BACKWARD)
    assert {r["path"] for r in rows} == {"attend"}
    numbers = list(te.OperandRow._fields[2:-1])
    assert [[r[n] for n in numbers] for r in rows] == [
        [getattr(r, n) for n in numbers] for found in seen for r in found
    ]
    first, last = by_role(rows[:10]), by_role(rows[10:])
    histories = zip(
        FORWARD + BACKWARD,
        [*net.attend.fp8.forward[...], *net.attend.fp8.dy[...]],
        strict=True,
    )
    for role, history in histories:
        assert [last[role]["amax"], first[role]["amax"]] == list(history[:2])
        assert first[role]["scale"] == 1
        scale = 448 / first[role]["amax"]
        np.testing.assert_allclose(last[role]["scale"], scale, rtol=3 * 2**-24)
        assert first[role]["nonfinite"] == 0
    assert first["q"]["amax"] == float(jnp.max(jnp.abs(net.q[...])))
    assert first["s"]["flushed"] > last["s"]["flushed"] > 0
    assert first["do"]["flushed"] <= first["dp"]["flushed"] < 1
    assert net.attend.fp8.record is None


def test_the_numbers_are_those_of_the_quantizer(tmp_path):
    """Also of an attention whose statistics are frozen."""
    net = Net()
    q = net.q[...].at[0, 0, 0, :2].set(jnp.array([1e-4, 1e4]))
    net.q[...] = q.at[1, 0, 0, 0].set(jnp.nan)
    net.eval()
    with te.autocast(RECIPE), te.record(tmp_path / "run.jsonl", net) as recorder:
        nnx.jit(lambda net: net())(net)
        recorder.step()
    rows = plot.read(tmp_path / "run.jsonl")
    assert [r["role"] for r in rows] == FORWARD
    q = q.at[1, 0, 0].set(0)  # a NaN goes around the products, to s and o
    one = te.Scale(jnp.float32(1), jnp.float32(1))
    how = {"k_ndim": 1, "rowwise": True, "colwise": False, "scale": one}
    made = jax.jit(lambda q: statistics(q, RECIPE.quantizers().x(q, **how).rowwise))(q)
    assert [rows[0][n] for n in made._fields] == list(map(float, made))
    assert rows[0]["saturated"] == rows[0]["flushed"] == np.float32(1 / q.size)
    assert [r["nonfinite"] for r in rows] == [0, 0, 0, 1, 8]
    assert not np.any(net.attend.fp8.forward[...])


def test_attention_is_listed_where_something_is_known(tmp_path):
    net = nnx.Dict(layer=Net())
    with te.autocast(te.DelayedScaling()):
        assert te.inspect(net).rows == ()
    with te.autocast(RECIPE):
        rows = te.inspect(net).rows
    assert [r.role for r in rows] == FORWARD + BACKWARD
    assert {r.path for r in rows} == {"layer/attend"}
    assert all(r.scale == 1 and math.isnan(r.amax) for r in rows)
    rule = "run a layer under a recipe between two calls of step"
    with te.record(tmp_path / "run.csv", net) as recorder:
        with te.autocast(te.MXFP8BlockScaling()):
            nnx.jit(lambda net: net["layer"]())(net)
        with pytest.raises(ValueError, match=rule):
            recorder.step()


def test_stacked_attentions():
    make = lambda r: te.DotProductAttention(2, 8, amax_history_len=4, rngs=r)
    layers = nnx.vmap(make)(nnx.Rngs(0).split(3))
    amaxes = jnp.arange(1.0, 16).reshape(3, 5, 1)
    layers.fp8.forward[...] = layers.fp8.forward[...] + amaxes
    layers.fp8.nonfinite[...] = layers.fp8.nonfinite[...].at[2, 4].set(7)
    with te.autocast(RECIPE):
        rows = te.inspect(layers).rows
    assert [r.path for r in rows[::10]] == ["[0]", "[1]", "[2]"]
    assert [r.amax for r in rows if r.role in FORWARD] == list(range(1, 16))
    for row in rows:
        scale = 1 if row.role in BACKWARD else 448 / row.amax
        np.testing.assert_allclose(row.scale, scale, rtol=3 * 2**-24)
        assert row.bad_pushes == 7 * (row.path == "[2]" and row.role in ("o", "dv"))
