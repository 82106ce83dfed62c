"""te.record: statistics of the operands while a model trains."""

import csv
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import te_flax as te
from te_flax import plot
from te_flax.recipe.record import record_operands, start_recording
from te_flax.recipe.state import Fp8RecordMailbox
from tests._models import RECIPES, data

DELAYED = te.DelayedScaling(amax_history_len=4)
X, Y = data(32, 16), data(32, 8, seed=1)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = te.DenseGeneral(16, 32, amax_history_len=4, rngs=rngs)
        self.down = te.DenseGeneral(32, 8, amax_history_len=4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def _train(net, file, recipe=DELAYED, steps=5, grad=te.value_and_grad, **options):
    optimizer = nnx.Optimizer(net, optax.sgd(1e-2), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(net, optimizer):
        traces.append(0)
        loss = lambda net: jnp.mean((net(X) - Y) ** 2)
        value, grads = grad(loss)(net)
        optimizer.update(net, grads)
        return value

    with te.autocast(recipe), te.record(file, net, **options) as recorder:
        for _ in range(steps):
            step(net, optimizer)
            recorder.step()
    return len(traces)


def _read(file) -> list[dict[str, Any]]:
    text = file.read_text()
    if file.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("mode", ["graph", "simple", "tree"])
def test_training_is_recorded_in_every_graph_mode(tmp_path, mode):
    with nnx.set_graph_updates(mode != "simple"), nnx.set_graph_mode(mode != "tree"):
        net = Net(nnx.Rngs(0))
        traces = _train(net, tmp_path / "run.jsonl", every=2)
    rows = _read(tmp_path / "run.jsonl")
    assert traces == 2  # one with, one without the record
    assert [r["step"] for r in rows[::6]] == [0, 2, 4]
    expected = [(p, r) for p in ("up", "down") for r in ("x", "kernel", "dy")]
    assert [(r["path"], r["role"]) for r in rows[:6]] == expected
    amax = float(jnp.max(jnp.abs(X)))
    assert rows[0]["amax"] == np.float32(amax)
    assert rows[0]["scale"] == 1.0
    np.testing.assert_allclose(rows[6]["scale"], 448 / amax, rtol=3 * 2**-24)
    dy = [r for r in rows if r["role"] == "dy" and r["path"] == "down"]
    assert dy[-1]["amax"] == float(net.down.fp8.dy[0])
    assert all(value is not None for row in rows for value in row.values())
    assert net.up.fp8.record is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_numbers_are_those_of_the_quantizer(tmp_path, recipe):
    net = Net(nnx.Rngs(0))
    net.up.kernel[...] = net.up.kernel[...] * jnp.exp(4 * data(16, 32))
    kernel = net.up.kernel[...]
    _train(net, tmp_path / "run.jsonl", RECIPES[recipe], steps=1)
    row = _read(tmp_path / "run.jsonl")[1]
    quantizer: Any = RECIPES[recipe].quantizers().kernel
    scale = quantizer.scale(jnp.float32(0)) if recipe == "delayed_scaling" else None
    how = {"k_ndim": 1, "rowwise": False, "colwise": True, "scale": scale}
    codes = quantizer(kernel, **how).colwise.dequantize()
    assert row["flushed"] == np.float32(jnp.mean((codes == 0) & (kernel != 0)))
    assert row["flushed"] > 0
    assert row["nonfinite"] == 0
    rows = _read(tmp_path / "run.jsonl")
    assert [r["role"] for r in rows] == ["x", "kernel", "dy"] * 2
    assert all(value is not None for row in rows for value in row.values())
    assert plot.read(tmp_path / "run.jsonl") == rows


def test_recording_changes_no_bit_of_the_training(tmp_path):
    nets = [Net(nnx.Rngs(0)), Net(nnx.Rngs(0))]
    _train(nets[0], tmp_path / "a.csv", every=1)
    _train(nets[1], tmp_path / "b.csv", every=1000)
    states = [jax.tree.leaves(nnx.state(net)) for net in nets]
    assert nnx.graphdef(nets[0]) == nnx.graphdef(nets[1])
    for a, b in zip(*states, strict=True):
        assert (a == b).all()


def test_plain_gradients_record_all_but_dy(tmp_path):
    _train(Net(nnx.Rngs(0)), tmp_path / "run.csv", grad=nnx.value_and_grad, steps=2)
    rows = _read(tmp_path / "run.csv")
    assert {row["role"] for row in rows} == {"x", "kernel"}
    assert list(rows[0]) == [
        "step",
        "path",
        "role",
        "amax",
        "scale",
        "saturated",
        "flushed",
        "nonfinite",
    ]


def test_while_nobody_records_nothing_is_computed():
    plain = te.DenseGeneral(16, 8, rngs=nnx.Rngs(0))
    layer = te.DenseGeneral(16, 8, rngs=nnx.Rngs(0))
    jaxpr = lambda layer: str(jax.make_jaxpr(lambda x: nnx.clone(layer)(x))(X))
    with te.autocast(te.Float8CurrentScaling()):
        assert jaxpr(layer) == jaxpr(plain)
        start_recording(layer.fp8)
        assert jaxpr(layer) != jaxpr(plain)


def test_scan_remat_and_vmap(tmp_path):
    make = nnx.vmap(lambda r: te.DenseGeneral(16, 16, amax_history_len=4, rngs=r))
    net = make(nnx.Rngs(0).split(3))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def forward(layer, x):
        return jnp.tanh(layer(x))

    with te.autocast(DELAYED), te.record(tmp_path / "a.jsonl", net) as recorder:
        grads = te.value_and_grad(lambda net, x: forward(net, x).sum())(net, X)[1]
        recorder.step()
        nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(net, 2 * X)
        recorder.step()
    assert grads["kernel"].shape == (3, 16, 16)
    rows = _read(tmp_path / "a.jsonl")
    assert [r["path"] for r in rows[:9:3]] == ["[0]", "[1]", "[2]"]
    kernels = [r["amax"] for r in rows if r["role"] == "kernel"][:3]
    assert kernels == [float(jnp.max(jnp.abs(k))) for k in net.kernel[...]]
    last = [r["amax"] for r in rows if r["step"] == 1 and r["role"] == "x"]
    assert last == [2 * float(jnp.max(jnp.abs(X)))] * 3


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_record_the_whole(recipe, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    net = te.DenseGeneral(16, 8, amax_history_len=4, rngs=nnx.Rngs(0))
    start_recording(net.fp8)
    graphdef, state = nnx.split(net)

    def forward(state, x):
        inner = nnx.merge(graphdef, state, copy=True)
        inner(x)
        return nnx.state(inner)

    how = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P()}
    run = jax.shard_map(forward, mesh=mesh, check_vma=check_vma, **how)
    with te.autocast(RECIPES[recipe]):
        got = jax.jit(run)(state, X)["fp8"]["record"][...]
        net(X)
    np.testing.assert_array_equal(got, net.fp8.record[...])


def test_a_record_is_no_part_of_a_checkpoint(tmp_path):
    net = Net(nnx.Rngs(0))
    want = nnx.to_flat_state(nnx.state(net, te.checkpoint_filter))
    with te.autocast(DELAYED), te.record(tmp_path / "a.csv", net):
        held = nnx.state(net, te.checkpoint_filter)
        assert len(nnx.to_flat_state(held)) == len(want)
        assert len(nnx.to_flat_state(nnx.state(net, te.Fp8Record))) == 2
        assert len(nnx.to_flat_state(nnx.state(net, Fp8RecordMailbox))) == 2
        te.restore_state(net, held)


def test_inspect_shows_the_last_recorded_call(tmp_path):
    net = Net(nnx.Rngs(0))
    with te.autocast(te.MXFP8BlockScaling()), te.record(tmp_path / "a.csv", net):
        net(X)
        row, _, dy = te.inspect(net).rows[:3]
        assert math.isnan(dy.amax)  # no backward pass yet
        te.grad(lambda net: jnp.sum(net(X)))(net)
        rows = {(r.path, r.role): r for r in te.inspect(net).rows}
    assert (row.path, row.role) == ("up", "x")
    assert row.amax == float(jnp.max(jnp.abs(X)))
    assert row.saturated == 0
    assert not math.isnan(row.flushed)
    last = rows["down", "dy"]
    assert (last.amax, last.scale, last.saturated, last.flushed) == (1.0, 256.0, 0, 0)
    assert math.isnan(te.inspect(net).rows[-1].amax)
    assert str(te.inspect(net)).splitlines()[-1].split()[2:] == ["-"] * 5 + ["0"]


def test_a_run_is_continued(tmp_path):
    file = tmp_path / "run.csv"
    net = Net(nnx.Rngs(0))
    _train(net, file, steps=2)
    _train(net, file, steps=2, first_step=2)
    steps = [int(row["step"]) for row in _read(file)]
    assert sorted(set(steps)) == [0, 1, 2, 3]
    _train(net, file, steps=1)
    assert {row["step"] for row in _read(file)} == {"0"}


def test_an_operand_may_be_left_out():
    layer = te.DenseGeneral(16, 8, rngs=nnx.Rngs(0))
    start_recording(layer.fp8)
    record_operands(layer.fp8, te.MXFP8BlockScaling(), kernel=layer.kernel[...])
    assert np.isnan(layer.fp8.record[0]).all()
    assert not np.isnan(layer.fp8.record[1]).any()


ERRORS = [
    ("run.txt", {}, "record: file must end in .csv or .jsonl, got"),
    ("run.csv", {"every": 0}, "record: every must be an int >= 1, got 0"),
    ("run.csv", {"every": True}, "record: every must be an int >= 1, got True"),
    ("run.csv", {"first_step": -1}, "record: first_step must be an int >= 0, got -1"),
]


@pytest.mark.parametrize(("name", "options", "text"), ERRORS)
def test_errors(tmp_path, name, options, text):
    with pytest.raises(ValueError, match="record: ") as error:
        te.Recorder(tmp_path / name, Net(nnx.Rngs(0)), **options)
    assert text in str(error.value)
    assert not (tmp_path / name).exists()


def test_models_that_nothing_can_be_recorded_of(tmp_path):
    text = "record: model must hold a layer of te_flax with a GEMM"
    with pytest.raises(ValueError, match=text), te.record(tmp_path / "a.csv", {}):
        pass
    net = Net(nnx.Rngs(0))
    text = "record: model must run a layer under a recipe between two calls of step"
    with pytest.raises(ValueError, match=text):
        _train(net, tmp_path / "a.csv", None)
    assert net.up.fp8.record is None


@pytest.mark.parametrize("fused", [True, False])
def test_what_fused_layers_quantize_is_recorded(tmp_path, fused):
    """x of each GEMM, though the layer never holds it: norm(x), the activation."""
    names = "gelu" if fused else nnx.gelu
    model = te.LayerNormMLP(16, 32, activations=names, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 16))
    recipe = te.Float8CurrentScaling()
    with te.record(tmp_path / "run.jsonl", model) as recorder, te.autocast(recipe):
        model(x)
        recorder.step()
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    amax = {row["path"]: row["amax"] for row in lines if row["role"] == "x"}
    h = model.norm(x)
    with te.autocast(recipe):
        mid = nnx.gelu(model.wi(h))
    assert amax["wi"] == float(jnp.abs(h).max())
    assert abs(amax["wo"] - float(jnp.abs(mid).max())) < 1e-5
