"""[sequence, batch, ...] inputs: the same layer on the transposed input."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import UNIT, data
from _fused import FAST, FP4, SCALINGS, context, gemms, hold_every_pair, options
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.testing.numerics import UNIT as ROUNDING
from te_flax.testing.numerics import random_sum_bound, rounding_share

AXES = ("batch", "seqlen", None)
B, S, H, MID = 8, 32, 32, 48


def mlp(turned, names=("gelu",)):
    return te.LayerNormMLP(
        H,
        MID,
        activations=names,
        layernorm_input_axes=AXES,
        dot_1_input_axes=AXES,
        dot_2_input_axes=("batch", "seqlen", "mlp"),
        transpose_batch_sequence=turned,
        rngs=nnx.Rngs(0),
        **options("layernorm"),
    )


def dense(turned):
    return te.LayerNormDenseGeneral(
        H,
        H,
        layernorm_input_axes=AXES,
        dot_input_axes=AXES,
        transpose_batch_sequence=turned,
        rngs=nnx.Rngs(0),
        **options("rmsnorm"),
    )


def norm(turned, kind=te.LayerNorm):
    return kind(H, input_axes=AXES, transpose_batch_sequence=turned, rngs=nnx.Rngs(0))


LAYERS = {
    "LayerNorm": norm,
    "RMSNorm": lambda turned: norm(turned, te.RMSNorm),
    "LayerNormDenseGeneral": dense,
    "LayerNormMLP": mlp,
    "gated": lambda turned: mlp(turned, ("silu", "linear")),
}
# Blocks of dkernel's operands run along the tokens, so they hold others here; random
# rounding draws by position (against float64 in test_layer_norm_mlp.py).
ALONG_TOKENS = {
    "mxfp8": "e4m3",
    "float8_block_scaling": "e4m3",
    "nvfp4_nearest": "e2m1",
}
RECIPES = tuple(SCALINGS | ALONG_TOKENS)
HAS_GEMM = ("LayerNormDenseGeneral", "LayerNormMLP", "gated")


@nnx.jit
def step(layer, x, dy):
    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y * dy), y

    (grads, dx), y = te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, dx, grads


def train(make, turned, recipe, place=lambda x, turned: x):
    """Layer and results of a step, y and dx in batch-first order."""
    layer = make(turned)
    x, dy = data((B, S, H)), data((B, S, H), 1)
    if turned:
        x, dy = x.swapaxes(0, 1), dy.swapaxes(0, 1)
    x, dy = place(x, turned), place(dy, turned)
    with context(recipe):
        run = step
        if recipe in FP4:
            run = step.lower(layer, x, dy).compile(FAST)
        for _ in range(1 + (recipe == "delayed_scaling")):
            y, dx, grads = run(layer, x, dy)
    y, dx = np.asarray(y), np.asarray(dx)
    if turned:
        y, dx = y.swapaxes(0, 1), dx.swapaxes(0, 1)
    return layer, y, dx, nnx.to_pure_dict(grads)


def compare(first, turned, recipe):
    """y and dx to the bit; sums over tokens as far as their order allows."""
    np.testing.assert_array_equal(first[1], turned[1])
    np.testing.assert_array_equal(first[2], turned[2])
    a, b = (jax.tree.leaves_with_path(run[3]) for run in (first, turned))
    for (path, u), (_, v) in zip(a, b, strict=True):
        u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
        if recipe in ALONG_TOKENS and "kernel" in str(path):
            # Blocks run along the tokens: x and dy are rounded apart in the two runs.
            share = rounding_share([UNIT[ALONG_TOKENS[recipe]]] * 4)
            assert np.linalg.norm(u - v) <= share * np.linalg.norm(u), path
            continue
        assert np.max(np.abs(u - v)) <= random_sum_bound(B * S, u), path
    if hasattr(first[0], "fp8") or hasattr(first[0], "wi"):
        for m, n in zip(gemms(first[0]), gemms(turned[0]), strict=True):
            for name in ("x", "kernel", "dy"):
                pair = (np.asarray(getattr(k.fp8, name)[...]) for k in (m, n))
                np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize(
    ("name", "recipe"),
    # Under delayed scaling every layer, for its histories; other recipes take turns.
    [(n, None) for n in LAYERS]
    + [(n, "delayed_scaling") for n in HAS_GEMM]
    + list(zip(itertools.cycle(HAS_GEMM), RECIPES[1:])),
)
def test_equals_batch_first_on_one_device(name, recipe):
    first, second = (train(LAYERS[name], turned, recipe) for turned in (False, True))
    compare(first, second, recipe)


CASES = [
    ("gated", "delayed_scaling", "batch", AxisType.Auto),
    ("gated", "delayed_scaling", "sequence", AxisType.Explicit),
    ("gated", "mxfp8", "sequence", AxisType.Auto),
    ("gated", "mxfp8", "batch", AxisType.Explicit),
    ("LayerNormMLP", "current_scaling", "batch", AxisType.Explicit),
    ("LayerNormDenseGeneral", "current_scaling", "sequence", AxisType.Auto),
    ("LayerNormMLP", "nvfp4_nearest", "sequence", AxisType.Explicit),
    ("LayerNormDenseGeneral", "nvfp4_nearest", "batch", AxisType.Auto),
    ("LayerNormDenseGeneral", "float8_block_scaling", "sequence", AxisType.Explicit),
    ("gated", "float8_block_scaling", "batch", AxisType.Auto),
    ("LayerNormMLP", None, "sequence", AxisType.Auto),
    ("LayerNormDenseGeneral", "delayed_scaling", "sequence", AxisType.Auto),
    ("LayerNormDenseGeneral", "mxfp8", "batch", AxisType.Explicit),
    ("LayerNormDenseGeneral", None, "batch", AxisType.Auto),
    ("RMSNorm", None, "batch", AxisType.Explicit),
    ("LayerNorm", None, "sequence", AxisType.Explicit),
]


def test_every_recipe_is_sharded_both_ways():
    _, recipes, sharded, types = zip(*CASES, strict=True)
    assert {*recipes} == {None, *RECIPES}
    hold_every_pair({"recipe": recipes, "sharded": sharded})
    hold_every_pair({"sharded": sharded, "type": types})


@pytest.mark.parametrize(("name", "recipe", "sharded", "axis_type"), CASES)
def test_equals_batch_first_on_eight_devices(name, recipe, sharded, axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    rules = te.logical_axis_rules(**{"dp" if sharded == "batch" else "sp": "d"})

    def place(x, turned):
        first = (sharded == "batch") != turned
        return jax.device_put(x, NamedSharding(mesh, P("d") if first else P(None, "d")))

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        first, second = (
            train(LAYERS[name], turned, recipe, place) for turned in (False, True)
        )
    compare(first, second, recipe)
    single = train(LAYERS[name], False, recipe)
    for got, want in zip(first[1:3], single[1:3], strict=True):
        share = 0.1 if recipe else 256 * ROUNDING  # codes may flip behind a GEMM
        assert np.linalg.norm(got - want) <= share * np.linalg.norm(want)
