"""The results on eight devices are one device's, to the bit, in every order."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _rows import (
    DEVICES,
    FEATURES,
    OUTPUTS,
    SHARD,
    bits,
    call,
    compiled,
    gathered,
    gradients,
    inside,
    line,
    one_device,
    operands,
    place,
    run,
    same,
    wire,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.ops import _extension
from te_flax.ops._gather_order import ORDERS

FP6 = ("mxfp6_e2m3", "mxfp6_e3m2")
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


@pytest.mark.parametrize(
    ("outputs", "quantize"),
    [(outputs, "mxfp8") for outputs in OUTPUTS]
    + [
        (outputs, format) for format in FP6 for outputs in (("quantized",), OUTPUTS[-1])
    ],
)
def test_each_order_gives_the_same_bits(outputs, quantize):
    """And the chosen one sends no more than its table says, on all devices alike."""
    x, gamma = operands()
    want = one_device(x, gamma, outputs, quantize)
    tried = [o for o in dict.fromkeys(ORDERS.values()) if o.makes(outputs)]
    assert ORDERS[outputs] in tried
    mesh = line()
    for order in tried:
        with mock.patch.dict(ORDERS, {outputs: order}):
            program = compiled(
                inside(call(outputs, quantize), mesh), *place(mesh, x, gamma)
            )
        made = program(*place(mesh, x, gamma))
        rows = len(x)
        for device in range(DEVICES):
            part = slice(device * rows, (device + 1) * rows)
            same(jax.tree.map(lambda a, part=part: np.asarray(a)[part], made), want)
        assert " conditional(" not in (program.as_text() or "")  # for platforms
        if order == ORDERS[outputs]:
            assert wire(program) == {"all-gather": gathered(outputs, quantize=quantize)}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("between", [(), (2, 3)], ids=["2d", "4d"])
def test_dtypes_and_ranks(dtype, between):
    x, gamma = operands(dtype, between=between)
    mesh, outputs = line(), ("normed", "quantized", "residual")
    f = inside(call(outputs), mesh, vma=False, results=P())
    made = run(f, *place(mesh, x, gamma))
    same(made, one_device(x, gamma, outputs))
    assert made.quantized.scale.shape == (*x.shape[:-1], FEATURES // 32)
    assert made.quantized.data.dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("quantize", FP6)
def test_packed_codes_know_their_values(quantize):
    x, gamma = operands()
    mesh = line()
    f = inside(call(("normed", "quantized"), quantize), mesh, False, P())
    made = run(f, *place(mesh, x, gamma))
    assert made.quantized.shape == x.shape
    assert made.quantized.data.shape == (*x.shape[:-1], FEATURES * 3 // 4)
    values = made.quantized.dequantize(jnp.float32)
    scale = np.repeat(made.quantized.scale_inv.astype(jnp.float32), 32, axis=-1)
    step = {"mxfp6_e2m3": 0.5, "mxfp6_e3m2": 4.0}[quantize]  # of the largest codes
    error = np.abs(np.asarray(values) - np.asarray(made.normed, np.float32))
    assert (error <= step / 2 * scale).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: t.__name__)
def test_nan_payloads_travel(dtype):
    """As lax.all_gather sends them; on the CPU it loses those of bfloat16 itself."""
    width = jnp.dtype(dtype).itemsize
    unsigned = {2: np.uint16, 4: np.uint32}[width]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2 ** (8 * width), (DEVICES * SHARD, FEATURES), unsigned)
    mesh = line()
    x, gamma = place(mesh, jnp.asarray(raw.view(dtype)), jnp.ones(FEATURES, dtype))

    def plain(x, _):
        return lax.all_gather(x, "tp", tiled=True)

    made = run(inside(call(("residual",)), mesh, False, P()), x, gamma).residual
    np.testing.assert_array_equal(bits(made), raw)
    by_bits = run(inside(plain, mesh, False, P()), x.view(unsigned), gamma)
    np.testing.assert_array_equal(bits(made), by_bits)
    theirs = bits(run(inside(plain, mesh, False, P()), x, gamma))
    kept = raw & 0x7FFF <= 0x7F80 if dtype == jnp.bfloat16 else slice(None)
    np.testing.assert_array_equal(bits(made)[kept], theirs[kept])


@pytest.mark.parametrize("offset", [1.0, 0.5, -2])
def test_weight_offset_is_added_in_float32(offset):
    x, gamma = operands()
    mesh, outputs = line(), ("normed", "quantized")
    f = inside(call(outputs, weight_offset=offset), mesh, False, P())
    made = run(f, *place(mesh, x, gamma))
    same(made, one_device(x, gamma, outputs, offset=float(offset)))


def test_epsilon():
    x, gamma = operands()
    config = te.NormConfig(kind="rmsnorm", epsilon=0.5)
    mesh = line()
    f = inside(call(("normed",), epsilon=0.5), mesh, False, P())
    same(run(f, *place(mesh, x, gamma)).normed, te.norm(x, gamma, config=config))


def test_outputs_are_all_by_default():
    x, gamma = operands()
    mesh = line()

    def f(x, gamma, **options):
        return te.allgather_rms_norm(x, gamma, axis="tp", **options)

    plain = jax.eval_shape(inside(f, mesh), x, gamma)
    assert plain.quantized is None
    assert plain.normed.shape == plain.residual.shape == (DEVICES * len(x), 3, FEATURES)
    quantized = jax.eval_shape(
        inside(lambda x, g: f(x, g, quantize="mxfp8"), mesh), x, gamma
    )
    assert None not in quantized


def test_kernel_rules_and_eager_calls():
    """The reference gives the same bits; an eager shard_map runs as a compiled one."""
    x, gamma = operands()
    mesh, outputs = line(), ("normed", "quantized", "residual")
    f = inside(call(outputs), mesh, results=P("tp"))
    want = run(f, *place(mesh, x, gamma))
    same(f(*place(mesh, x, gamma)), want)
    with te.kernels("norm=reference"):
        program = jax.jit(f).lower(*place(mesh, x, gamma))
    assert "te_flax.norm" not in program.as_text()
    same(program.compile()(*place(mesh, x, gamma)), want)


def test_no_rows():
    x, gamma = operands(rows=0)
    mesh, outputs = line(), ("normed", "quantized", "residual")
    f = inside(call(outputs), mesh)
    made = run(f, *place(mesh, x, gamma))
    assert {a.shape[0] for a in jax.tree.leaves(made)} == {0}
    dx, dgamma = run(gradients(f, x, x), *place(mesh, x, gamma))
    assert dx.shape == x.shape
    assert not dgamma.any()


def test_vmap():
    x, gamma = operands()
    mesh, outputs = line(), ("quantized", "residual")
    f = inside(call(outputs), mesh, False, P())
    made = run(jax.vmap(f, (1, None), 1), *place(mesh, x, gamma))
    same(made, one_device(x, gamma, outputs))


def test_one_device_needs_no_collective():
    x, gamma = operands()
    mesh, outputs = line(size=1), ("normed", "quantized", "residual")
    for f in (call(outputs), inside(call(outputs), mesh)):
        with jax.set_mesh(mesh):
            program = compiled(f, *place(mesh, x, gamma))
        assert not wire(program)
        same(program(*place(mesh, x, gamma)), one_device(x, gamma, outputs))


def test_report_names_the_orders(capsys):
    te.kernel_report()
    printed = capsys.readouterr().out
    for outputs, order in ORDERS.items():
        assert f"  {' + '.join(outputs)}  " in printed
        assert str(order) in printed
    assert str(ORDERS["quantized",]) == "quantized norm, gather"
    assert str(ORDERS["normed", "residual"]) == "gather, norm"


@pytest.mark.parametrize("outputs", OUTPUTS, ids="+".join)
def test_cuda_program(outputs, monkeypatch):
    """One kernel for each step, and what travels is never copied into other types."""
    monkeypatch.setattr(_extension, "has", lambda handler, platform: True)
    x, gamma = operands()
    traced = jax.jit(inside(call(outputs), line())).trace(x, gamma)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@te_flax\.(\w+)", text)
    order = ORDERS[outputs]
    steps = [s for s in (order.first, order.then) if s]
    kernels = {"quantize": "quantize_mxfp8"}
    assert found == [kernels.get(step, "norm_fwd") for step in steps]
    written = [m == "true" for m in re.findall(r"\bh = (\w+)", text)]
    assert written == ["norm" in steps or "normed" in outputs] * len(written)
    assert "bitcast_convert" not in text
    sent = re.findall(r"all_gather\"?\(.*?\) ->\s*tensor<[\dx]+x(\w+)>", text, re.S)
    codes = outputs == ("quantized",)
    assert sorted(sent) == (["f8E4M3FN", "ui8"] if codes else ["bf16"])
