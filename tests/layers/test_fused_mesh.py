"""The fused layers on meshes: FSDP, tensor and sequence parallel, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import data, grid
from _fused import FAST, FP4, check, context, flat, gemms, options, rules, wide
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.testing import chain

B, S, H, MID = 8, 32, 64, 96
MESHES = {
    "fsdp": (("dp",), {"fsdp": "dp"}, P("dp")),
    "dp x tp": (("dp", "tp"), {"dp": "dp", "tp": "tp"}, P("dp")),
    "dp x tp, sp": (
        ("dp", "tp"),
        {"dp": "dp", "tp": "tp", "sp": "tp"},
        P("dp", "tp"),
    ),
}
TOKENS = ("batch", "seqlen", None)
NAMES = {
    "scale": "norm.scale",
    "norm_bias": "norm.bias",
    "wi": "wi.kernel",
    "wi_bias": "wi.bias",
    "wo": "wo.kernel",
    "wo_bias": "wo.bias",
    "kernel": "kernel",
    "bias": "bias",
}


def mlp(names):
    gated = (None,) * (len(names) - 1)
    return te.LayerNormMLP(
        H,
        MID,
        activations=names,
        kernel_axes_1=("embed", *gated, "mlp"),
        bias_axes_1=(*gated, "mlp"),
        kernel_axes_2=("mlp", "embed"),
        layernorm_input_axes=TOKENS,
        dot_1_input_axes=("batch", None, None),
        dot_2_input_axes=("batch", None, "mlp"),
        rngs=nnx.Rngs(0),
        **options("layernorm"),
    )


def dense():
    return te.LayerNormDenseGeneral(
        H,
        MID,
        kernel_axes=("embed", "mlp"),
        bias_axes=("mlp",),
        layernorm_input_axes=TOKENS,
        dot_input_axes=("batch", None, None),
        rngs=nnx.Rngs(0),
        **options("rmsnorm1p"),
    )


def make():
    layers = {"dense": dense(), "gelu": mlp(("gelu",))}
    return nnx.Dict(**layers, gated=mlp(("silu", "linear")))


@nnx.jit(static_argnums=3)
def step(layers, x, cotangents, outs):
    found = {}
    for name, dy in cotangents.items():

        def loss(layer, x, dy=dy, name=name):
            y = layer(x, out_sharding=outs and dict(outs)[name])
            return jnp.sum(y * dy), y

        run = te.grad(loss, argnums=(0, 1), has_aux=True)
        (grads, dx), y = run(layers[name], x)
        found[name] = {"y": y, "dx": dx}, grads
    return found


def arrays():
    wide_dy = data((B, S, MID), 1)
    return data((B, S, H)), {
        "dense": wide_dy,
        "gelu": data((B, S, H), 2),
        "gated": data((B, S, H), 3),
    }


def balls(name, layer, x, dy, recipe):
    """What the results of one device must lie in."""
    p = wide(nnx.state(layer, nnx.Param), **NAMES)
    shaped = lambda k, v: v.reshape(-1 if "bias" in k or k == "scale" else (len(v), -1))
    p = {k: shaped(k, v) for k, v in p.items()}
    if name == "dense":
        kw = {"kind": "rmsnorm", "zero_centered_gamma": True}
        rule = rules(layer, recipe)[0]
        return chain.layernorm_dense(flat(x), p, flat(dy), rule=rule, **kw)
    kw = {"kind": "layernorm", "activations": layer.activations}
    return chain.layernorm_mlp(flat(x), p, flat(dy), rules=rules(layer, recipe), **kw)


A, E = AxisType.Auto, AxisType.Explicit
# Every mesh with both types of axis, delayed scaling on each, and every recipe.
CI = (
    ("fsdp", "delayed_scaling", A),
    ("fsdp", "nvfp4", A),
    ("fsdp", "mxfp8", E),
    ("fsdp", "mxfp6", E),
    ("dp x tp", "float8_block_scaling", A),
    ("dp x tp", "delayed_scaling", E),
    ("dp x tp", "current_scaling", E),
    ("dp x tp, sp", "delayed_scaling", A),
    ("dp x tp, sp", None, E),
    ("dp x tp, sp", "nvfp4_nearest", E),
)
NIGHTLY = (
    ("fsdp", None, A),
    ("fsdp", "delayed_scaling", E),
    ("dp x tp", "mxfp8", A),
    ("dp x tp", "delayed_scaling", A),
    ("dp x tp, sp", "current_scaling", A),
    ("dp x tp, sp", "delayed_scaling", E),
)
CASES = [*CI, *(pytest.param(*case, marks=pytest.mark.slow) for case in NIGHTLY)]


@pytest.mark.parametrize(("mesh_name", "recipe", "axis_type"), CASES)
def test_sharded_stays_in_the_balls_of_one_device(mesh_name, recipe, axis_type):
    check_sharded(mesh_name, recipe, axis_type)


def check_sharded(mesh_name, recipe, axis_type, devices=8):
    names, kinds, spec = MESHES[mesh_name]
    mesh = jax.make_mesh(
        grid(names, devices), names, axis_types=(axis_type,) * len(names)
    )
    x, cotangents = arrays()
    tp = "tp" if "tp" in kinds else None
    outs = {"dense": P("dp", None, tp), "gelu": spec, "gated": spec}
    with (
        jax.set_mesh(mesh),
        nnx.logical_axis_rules(te.logical_axis_rules(**kinds)),
        context(recipe),
    ):
        layers = make()
        if recipe in FP4:  # one layer: these programs are large
            layers = nnx.Dict(gated=layers["gated"])
            cotangents = {"gated": cotangents["gated"]}
        assert any(layers["gated"].wi.kernel[...].sharding.spec)
        place = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
        placed = {n: place(dy, outs[n]) for n, dy in cotangents.items()}
        for _ in range(1 + (recipe == "delayed_scaling")):
            read = nnx.state(layers, (te.Fp8Stat, te.Fp8Rounding))
            before = jax.tree.map(np.asarray, read)
            args = layers, place(x, spec), placed, tuple(outs.items())
            if recipe in FP4:
                found = step.lower(*args).compile(FAST)(*args[:3])
            else:
                found = step(*args)
    nnx.update(layers, before)  # the amaxes and keys that the last step read
    for name, (results, grads) in found.items():
        dy = cotangents[name]
        want = balls(name, layers[name], x, dy, recipe)
        got = results | wide(grads, **NAMES)
        if recipe == "mxfp8" and "sp" in kinds:  # a shard's blocks hold other tokens
            got = {n: v for n, v in got.items() if n not in ("wi", "wo", "kernel")}
        check(got, want, want, None, f"{mesh_name} {name}")
    if recipe == "delayed_scaling":
        amaxes_are_those_of_one_device(layers, x, cotangents)


def amaxes_are_those_of_one_device(layers, x, cotangents):
    """Behind no GEMM they are equal to the bit, so the codes are."""
    single = make()
    with context("delayed_scaling"):
        step(single, x, cotangents, None)
    for name, layer in layers.items():
        first, *rest = zip(gemms(layer), gemms(single[name]), strict=True)
        same = [(first, ("x", "kernel")), *((pair, ("kernel",)) for pair in rest)]
        same.append(((first, *rest)[-1], ("dy",)))
        for (a, b), histories in same:
            for history in histories:
                pair = (np.asarray(getattr(m.fp8, history)[...]) for m in (a, b))
                np.testing.assert_array_equal(*pair)
