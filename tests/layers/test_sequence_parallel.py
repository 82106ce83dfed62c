"""Sequence parallelism of one column-parallel and one row-parallel DenseGeneral."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _collectives import collectives
from _fused import FAST, RECIPES
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.ops.products import mxfp8_products

DP, TP = 2, 2
B, S, H, MID = 4, 64, 64, 128  # whole blocks of 32 in every shard
SLOW = pytest.mark.slow
TERMS = max(B * S, MID)
TOKENS, SHARDS = f"[{B // DP},{S},{H}]", f"f32[{B // DP},{S // TP},{H}]"
# What is gathered of x forward, of x backward, and of dy.
GATHERS = {
    None: {f"f32{TOKENS}": 2},  # XLA keeps what it has gathered of x
    "delayed_scaling": {f"u8{TOKENS}": 2, f"u8[{H},{B // DP},{S}]": 1},
    "mxfp8": {
        f"u8{TOKENS}": 4,
        f"u8[{B // DP},{S},{H // 32}]": 2,
        f"u8[{B // DP},{S // 32},{H}]": 2,
    },
}


class Block(nnx.Module):
    """What a person would write."""

    def __init__(self):
        self.up = te.DenseGeneral(
            H,
            MID,
            kernel_axes=("embed", "mlp"),
            bias_axes=("mlp",),
            input_axes=("batch", "seqlen", None),
            dot_input_axes=("batch", None, None),
            kernel_init=whole_numbers,
            rngs=nnx.Rngs(0),
        )
        self.down = te.DenseGeneral(
            MID,
            H,
            kernel_axes=("mlp", "embed"),
            input_axes=("batch", None, "mlp"),
            kernel_init=whole_numbers,
            rngs=nnx.Rngs(1),
        )

    def __call__(self, x, out_sharding):
        return self.down(self.up(x), out_sharding=out_sharding)


def whole_numbers(key, shape, dtype):
    """Exact in e4m3, so that no order of sums changes a bit of the first products."""
    return jax.random.randint(key, shape, -7, 8).astype(dtype)


def arrays():
    keys = jax.random.split(jax.random.key(2))
    return [whole_numbers(key, (B, S, H), jnp.float32) for key in keys]


def train(recipe, place=jnp.asarray, out_sharding=None):
    """y, the gradients, and the compiled program of a step."""

    @nnx.jit
    def step(block, x, dy):
        def loss(block, x):
            y = block(x, out_sharding)
            return jnp.sum(y * dy), y

        (_, y), grads = te.value_and_grad(loss, argnums=(0, 1), has_aux=True)(block, x)
        return y, grads

    chosen = RECIPES[recipe] if recipe else te.HIGH_PRECISION
    with te.autocast(chosen), jax.numpy_dtype_promotion("standard"):
        arguments = Block(), *map(place, arrays())
        program = step.lower(*arguments).compile(FAST)
        found = program(*arguments)
    return list(map(np.asarray, jax.tree.leaves(found))), program.as_text() or ""


@pytest.mark.parametrize(
    ("axis_type", "recipe", "products"),
    [
        (AxisType.Auto, "mxfp8", "codes"),
        pytest.param(AxisType.Auto, "delayed_scaling", "codes", marks=SLOW),
        pytest.param(AxisType.Explicit, None, "codes", marks=SLOW),
        (AxisType.Explicit, "mxfp8", "values"),
    ],
)
def test_a_block_gathers_codes_and_scatters_sums(axis_type, recipe, products):
    axes = (axis_type,) * 2
    devices = jax.devices()[: DP * TP]
    mesh = jax.make_mesh((DP, TP), ("d", "t"), axis_types=axes, devices=devices)
    place = lambda a: jax.device_put(a, NamedSharding(mesh, P("d", "t")))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(dp="d", tp="t", sp="t"))
    with mxfp8_products(products):
        want, _ = train(recipe)
        with jax.set_mesh(mesh), rules:
            got, text = train(recipe, place, P("d", "t", None))
    for a, b in zip(got, want, strict=True):
        bound = 0 if recipe == "mxfp8" else TERMS * 2.0**-24 * np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= bound
    moved = {k: n for k, n in collectives(text).items() if k[0] != "all-reduce"}
    gathers = {("all-gather", shape): n for shape, n in GATHERS[recipe].items()}
    assert moved == gathers | {("reduce-scatter", SHARDS): 2}
