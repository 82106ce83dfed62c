"""The presets of te.logical_axis_rules: one TransformerLayer on eight devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _collectives import collectives
from _dense import RECIPES, data
from _fused import FAST
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from examples.encoder.model import AXES
from te_flax.ops.products import mxfp8_products

# Shards hold whole blocks of 32, along tokens and along features.
B, S, H, MID, HEADS = 8, 64, 128, 256, 4
PRESETS = {
    "dp": ((8,), ("dp",), {"dp": "dp"}, P("dp")),
    "fsdp": ((8,), ("fsdp",), {"fsdp": "fsdp"}, P("fsdp")),
    "tp": ((4, 2), ("dp", "tp"), {"dp": "dp", "tp": "tp"}, P("dp")),
    "tp, sp": (
        (4, 2),
        ("dp", "tp"),
        {"dp": "dp", "tp": "tp", "sp": "tp"},
        P("dp", "tp"),
    ),
}
# Eight products follow each other; the longest of their sums has B S terms, and a sum
# in another order is off by at most 2^-24 of its absolute terms for each.
ORDER = 8 * B * S * 2.0**-24


def make():
    return te.TransformerLayer(
        H,
        MID,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        enable_relative_embedding=False,
        bias_init=nnx.initializers.normal(0.3),
        **AXES,
        rngs=nnx.Rngs(0),
    )


def new_step():
    """A step that nobody has traced: rules of logical axes are no part of jit's key."""

    @nnx.jit
    def step(layer, x, dy):
        loss = lambda layer, x: jnp.sum(layer(x) * dy)
        return te.value_and_grad(loss, argnums=(0, 1))(layer, x)

    return step


def gemms(layer):
    attention, mlp = layer.self_attention, layer.mlp
    return {"qkv": attention.qkv, "out": attention.out, "wi": mlp.wi, "wo": mlp.wo}


def train(recipe, place):
    """Results and histories of a step, and the compiled program.

    Under delayed scaling it is the second one, whose scales come from the first.
    """
    chosen = RECIPES[recipe] if recipe else te.HIGH_PRECISION
    with te.autocast(chosen), jax.numpy_dtype_promotion("standard"):
        layer = make()
        arguments = layer, place(data((B, S, H))), place(data((B, S, H), 1))
        program = new_step().lower(*arguments).compile(FAST)
        for _ in range(1 + (recipe == "delayed_scaling")):
            loss, (grads, dx) = program(*arguments)
    found = {"loss": loss, "dx": dx}
    found |= {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(grads)}
    histories = {
        (name, history): np.asarray(getattr(part.fp8, history)[...])
        for name, part in gemms(layer).items()
        for history in ("x", "kernel", "dy")
    }
    wide = {name: np.asarray(a, np.float64) for name, a in found.items()}
    return wide, histories, program.as_text() or ""


@functools.cache
def one_device(recipe):
    return train(recipe, jnp.asarray)


@functools.cache
def on_mesh(preset, axis_type, recipe):
    shape, names, kinds, spec = PRESETS[preset]
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(**kinds))
    with jax.set_mesh(mesh), rules:
        return train(recipe, place)


CI = {
    ("tp, sp", AxisType.Auto, "delayed_scaling"),
    ("fsdp", AxisType.Explicit, "delayed_scaling"),
}


def marks(*case):
    return () if case in CI else pytest.mark.slow


CASES = [
    pytest.param(*case, marks=marks(*case))
    for preset in PRESETS
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for recipe in (None, "delayed_scaling", "mxfp8")
    for case in [(preset, axis_type, recipe)]
]


@pytest.mark.parametrize(("preset", "axis_type", "recipe"), CASES)
def test_results_equal_those_of_one_device(preset, axis_type, recipe):
    """In Frobenius norm, each gradient.

    Without a recipe they differ by the order of sums. Under one, such a difference
    moves a value over a rounding boundary once in many; if 1 code in 64 flips, the
    results differ by 1/8 of what quantization changes.
    """
    got, histories, _ = on_mesh(preset, axis_type, recipe)
    want, expected, _ = one_device(recipe)
    plain = one_device(None)[0]
    assert got.keys() == want.keys()
    for name, a in got.items():
        difference = np.linalg.norm(a - want[name])
        bound = ORDER * np.linalg.norm(want[name])
        if recipe:
            bound += np.linalg.norm(want[name] - plain[name]) / 8
        assert difference <= bound, (name, difference, bound)
    for key, history in histories.items():
        exact = key in {("qkv", "x")} or key[1] == "kernel"
        assert (history[:1] > 0).all() == (recipe == "delayed_scaling")
        if exact:  # so the scales, and with them the codes
            np.testing.assert_array_equal(history, expected[key], err_msg=str(key))
        else:  # half a step of the coarsest code, e5m2
            np.testing.assert_allclose(history, expected[key], rtol=2.0**-3)


ACTIVATION = f"f32[{B // 4},{S},{H}]"


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_collectives_of_dp_and_tp(axis_type):
    """Gradients are summed once; tp sums an activation four times: two each way."""
    for preset, sums in (("dp", 0), ("tp", 4)):
        found = collectives(on_mesh(preset, axis_type, "delayed_scaling")[2])
        assert {kind for kind, _ in found} == {"all-reduce"}
        assert found["all-reduce", ACTIVATION] == sums
        others = sum(found.values()) - sums - found["all-reduce", "f32[2]"]
        assert others == 1 + 12, found  # the loss and each parameter


@pytest.mark.parametrize("axis_type", [AxisType.Explicit])
def test_fsdp_gathers_codes(axis_type):
    """Each kernel once for each of its two copies; XLA's CPU sends FP8 as f16."""
    found = collectives(on_mesh("fsdp", axis_type, "delayed_scaling")[2])
    gathers = {shape: n for (kind, shape), n in found.items() if kind == "all-gather"}
    assert sum(gathers.values()) == 8, gathers
    assert all(re.match("f8e4m3fn|f16", shape) for shape in gathers)
    scattered = sum(n for (kind, _), n in found.items() if kind == "reduce-scatter")
    assert scattered == 4, found
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce", "reduce-scatter"}


TOKENS = f"[{B // 4},{S},{H}]"
# Gathered under sequence parallelism: x of two products and dy of two others. Per
# tensor the codes of dy serve both gradients; in blocks each copy has its own codes.
# Without codes XLA keeps what it has gathered of x.
SP_GATHERS = {
    None: {f"f32{TOKENS}": 4},
    "delayed_scaling": {f"u8{TOKENS}": 4, f"u8[{H},{B // 4},{S}]": 2},
    "mxfp8": {
        f"u8{TOKENS}": 8,
        f"u8[{B // 4},{S},{H // 32}]": 4,
        f"u8[{B // 4},{S // 32},{H}]": 4,
    },
}
# Scales of qkv alone, which has its heads behind three parts: one byte in 32.
QKV_SCALES = {
    f"u8{dims}"
    for n in (H, f"{B // 4},{S}")
    for dims in (f"[{n},3,{HEADS}]", f"[{n},{3 * HEADS}]")
}


@pytest.mark.parametrize(
    ("axis_type", "recipe", "products"),
    [
        pytest.param(*case, marks=marks("tp, sp", *case[:2]))
        for axis_type in (AxisType.Auto, AxisType.Explicit)
        for recipe in SP_GATHERS
        for products in ("codes", "values")[: 1 + (recipe == "mxfp8")]
        for case in [(axis_type, recipe, products)]
    ],
)
def test_sp_scatters_sums_and_gathers_codes(axis_type, recipe, products):
    """Forward 2 and backward 2 sums; no kernel moves, and nothing changes its split."""
    with mxfp8_products(products):
        text = (on_mesh if products == "codes" else on_mesh.__wrapped__)(
            "tp, sp", axis_type, recipe
        )[2]
    moved = {k: n for k, n in collectives(text).items() if k[0] != "all-reduce"}
    assert moved.pop(("reduce-scatter", f"f32[{B // 4},{S // 2},{H}]")) == 4
    gathers = {shape: n for (kind, shape), n in moved.items() if kind == "all-gather"}
    assert len(gathers) == len(moved), moved
    scales = QKV_SCALES & gathers.keys() if recipe == "mxfp8" else set()
    found = {shape: n for shape, n in gathers.items() if shape not in scales}
    assert found == SP_GATHERS[recipe]
