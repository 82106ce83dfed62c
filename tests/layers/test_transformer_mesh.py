"""The presets of te.logical_axis_rules: one TransformerLayer on eight devices."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _collectives import collectives
from _dense import RECIPES, data, grid
from _fused import FAST
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from examples.encoder.model import AXES
from te_flax.ops.products import mxfp8_products
from te_flax.testing.numerics import product_mode, product_noise

# Shards hold whole blocks of 32, along tokens and along features, and no kernel is a
# batch of activations.
B, S, H, MID, HEADS = 8, 64, 128, 256, 4
PRESETS = {
    "dp": (("dp",), {"dp": "dp"}, P("dp")),
    "fsdp": (("fsdp",), {"fsdp": "fsdp"}, P("fsdp")),
    "tp": (("dp", "tp"), {"dp": "dp", "tp": "tp"}, P("dp")),
    "tp, sp": (
        ("dp", "tp"),
        {"dp": "dp", "tp": "tp", "sp": "tp"},
        P("dp", "tp"),
    ),
}
# Eight products follow each other; the longest of their sums has B S terms, and a sum
# in another order is off by at most 2^-24 of its absolute terms for each.
ORDER = 8 * B * S * 2.0**-24
# Of eight products in both runs, forward of at most 256 terms and backward split.
NOISE = 16**0.5 * product_noise(256, "split")


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


def make_step():
    """A step to trace anew: jax's cache knows the mesh, not the rules of its axes."""

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
        program = make_step().lower(*arguments).compile(FAST)
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
def on_mesh(preset, axis_type, recipe, devices=8):
    names, kinds, spec = PRESETS[preset]
    mesh = jax.make_mesh(
        grid(names, devices), names, axis_types=(axis_type,) * len(names)
    )
    place = lambda a: jax.device_put(a, NamedSharding(mesh, spec))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(**kinds))
    with jax.set_mesh(mesh), rules:
        return train(recipe, place)


CI = {
    ("tp, sp", AxisType.Auto, "delayed_scaling"),
    ("tp, sp", AxisType.Auto, "mxfp8"),
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
    check_results(preset, axis_type, recipe)


def check_results(preset, axis_type, recipe, devices=8):
    """In Frobenius norm, each gradient.

    Without a recipe they differ by the order of sums. Under one, such a difference
    moves a value over a rounding boundary once in many; if 1 code in 64 flips, the
    results differ by 1/8 of what quantization changes. Where a tensor core truncates,
    each of the eight products of both runs adds its noise.
    """
    got, histories, _ = on_mesh(preset, axis_type, recipe, devices)
    want, expected, _ = one_device(recipe)
    plain = one_device(None)[0]
    assert got.keys() == want.keys()
    for name, a in got.items():
        difference = np.linalg.norm(a - want[name])
        bound = ORDER * np.linalg.norm(want[name])
        if recipe:
            bound += np.linalg.norm(want[name] - plain[name]) / 8
        if recipe == "delayed_scaling" and product_mode() != "float32":
            bound += NOISE * np.linalg.norm(want[name])
        assert difference <= bound, (name, difference, bound)
    for key, history in histories.items():
        exact = key in {("qkv", "x")} or key[1] == "kernel"
        assert (history[:1] > 0).all() == (recipe == "delayed_scaling")
        if exact:  # so the scales, and with them the codes
            np.testing.assert_array_equal(history, expected[key], err_msg=str(key))
        else:  # half a step of the coarsest code, e5m2
            np.testing.assert_allclose(history, expected[key], rtol=2.0**-3)


def activation(devices, parts=1):
    """A device's part on a mesh with tp, its sequence cut into ``parts``."""
    return f"f32[{B // (devices // 2)},{S // parts},{H}]"


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_collectives_of_dp_and_tp(axis_type):
    check_collectives_of_dp_and_tp(axis_type)


def check_collectives_of_dp_and_tp(axis_type, devices=8):
    """Gradients are summed once; tp sums an activation four times: two each way."""
    for preset, sums in (("dp", 0), ("tp", 4)):
        program = on_mesh(preset, axis_type, "delayed_scaling", devices)[2]
        found = collectives(program, devices)
        assert {kind for kind, _ in found} == {"all-reduce"}
        assert found["all-reduce", activation(devices)] == sums
        others = sum(found.values()) - sums - found["all-reduce", "f32[2]"]
        if preset == "dp" or devices > 2:
            assert others == 1 + 12, found  # the loss and each parameter
        else:
            assert others == 0, found


@pytest.mark.parametrize(
    "axis_type",
    [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)],
)
def test_fsdp_gathers_codes(axis_type):
    check_fsdp_gathers_codes(axis_type)


def check_fsdp_gathers_codes(axis_type, devices=8):
    """Each kernel once for each of its two copies; XLA's CPU sends FP8 as f16.

    On Auto axes nothing asks for gradients in pieces, so their sums are whole.
    """
    program = on_mesh("fsdp", axis_type, "delayed_scaling", devices)[2]
    found = collectives(program, devices)
    gathers = {shape: n for (kind, shape), n in found.items() if kind == "all-gather"}
    assert sum(gathers.values()) == 8, gathers
    assert all(re.match("f8e4m3fn|f16", shape) for shape in gathers)
    scattered = sum(n for (kind, _), n in found.items() if kind == "reduce-scatter")
    assert scattered == (4 if axis_type == AxisType.Explicit else 0), found
    kinds = {"all-gather", "all-reduce"} | ({"reduce-scatter"} if scattered else set())
    assert {kind for kind, _ in found} == kinds


# Gathered under sequence parallelism: x of two products and dy of two others. Per
# tensor the codes of dy serve both gradients; in blocks each copy has its own codes.
# Without codes XLA keeps what it has gathered of x.
SP_GATHERS = {
    None: {"f32[{b},{s},{h}]": 4},
    "delayed_scaling": {"u8[{b},{s},{h}]": 4, "u8[{h},{b},{s}]": 2},
    "mxfp8": {
        "u8[{b},{s},{h}]": 8,
        "u8[{b},{s},{h_blocks}]": 4,
        "u8[{b},{s_blocks},{h}]": 4,
    },
}
SP_CASES = [
    (axis_type, recipe, products)
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for recipe in SP_GATHERS
    for products in ("codes", "values")[: 1 + (recipe == "mxfp8")]
]


@pytest.mark.parametrize(
    ("axis_type", "recipe", "products"),
    [pytest.param(*case, marks=marks("tp, sp", *case[:2])) for case in SP_CASES],
)
def test_sp_scatters_sums_and_gathers_codes(axis_type, recipe, products):
    check_sp_scatters_sums_and_gathers_codes(axis_type, recipe, products)


def check_sp_scatters_sums_and_gathers_codes(axis_type, recipe, products, devices=8):
    """Forward 2 and backward 2 sums; no kernel moves, and nothing changes its split.

    Codes travel as bytes on CPU devices and as they are on GPUs.
    """
    with mxfp8_products(products):
        train = on_mesh if products == "codes" else on_mesh.__wrapped__
        text = train("tp, sp", axis_type, recipe, devices)[2]
    found = collectives(text, devices)
    moved = {each: n for each, n in found.items() if each[0] != "all-reduce"}
    assert moved.pop(("reduce-scatter", activation(devices, 2))) == 4
    gathers = Counter()
    for (kind, shape), n in moved.items():
        assert kind == "all-gather", moved
        gathers[re.sub(r"^f8e\w+", "u8", shape)] += n
    b = B // (devices // 2)
    if recipe == "mxfp8":  # of qkv, which has its heads behind three parts
        for n in (str(H), f"{b},{S}"):
            for dims in (f"[{n},3,{HEADS}]", f"[{n},{3 * HEADS}]"):
                gathers.pop(f"u8{dims}", None)
    sizes = {"b": b, "s": S, "h": H, "h_blocks": H // 32, "s_blocks": S // 32}
    want = {shape.format(**sizes): n for shape, n in SP_GATHERS[recipe].items()}
    assert gathers == want
