"""DenseGeneral on meshes: the same codes as on one device, sums within the bound."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _collectives import collectives
from _dense import RECIPES, data, grid
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.testing.numerics import (
    product_bound,
    product_mode,
    sharded_bound,
    sum_bound,
)

# mesh axes, rules, and per kind of layer the sharding of x and of dy.
PLAIN = {"column": (P("dp"), P("dp")), "row": (P("dp"), P("dp"))}
TENSOR = {
    "column": (P("dp"), P("dp", None, "tp")),
    "row": (P("dp", None, "tp"), P("dp")),
}
SEQUENCE = {
    "column": (P("dp", "tp"), P("dp", None, "tp")),
    "row": (P("dp", None, "tp"), P("dp", "tp")),
}
BOTH = ("dp", "tp")
MESHES = {
    "dp": (("dp",), {"dp": "dp"}, PLAIN),
    "fsdp": (("dp",), {"fsdp": "dp"}, PLAIN),
    "tp, dp of size 1": (BOTH, {"dp": "dp", "tp": "tp"}, TENSOR),
    "dp x tp": (BOTH, {"dp": "dp", "tp": "tp"}, TENSOR),
    "dp x tp, sp": (BOTH, {"dp": "dp", "tp": "tp", "sp": "tp"}, SEQUENCE),
}
KINDS = {"column": (64, 128, ("embed", "mlp")), "row": (128, 64, ("mlp", "embed"))}


def step(layer, x, dy, out_sharding=None):
    """y, gradients and dx of one step."""

    def loss(layer, x):
        y = layer(x, out_sharding=out_sharding)
        return jnp.sum(y * dy), y

    (grads, dx), y = te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return {
        "y": y,
        "dx": dx,
        "kernel": grads["kernel"][...],
        "bias": grads["bias"][...],
    }


def product(recipe, *, forward):
    """How a GPU sums these products; delayed and current scaling split those of dy."""
    if jax.default_backend() == "cpu" or recipe in (None, "mxfp8"):
        return product_mode(fp8=False)
    return "fast" if forward else "split"


def bounds(layer, x, dy, recipe):
    """Twice that of a product, the operands grown by what quantization may add."""

    def grow(a):
        a = np.abs(np.asarray(a, np.float64))
        return a * 1.125 + 2.0**-9 * a.max() if recipe else a

    k = grow(layer.kernel[...])
    tokens = x.shape[0] * x.shape[1]
    a, g = grow(x).reshape(tokens, -1), grow(dy).reshape(tokens, -1)
    bias = np.abs(np.asarray(dy, np.float64)).reshape(tokens, -1).sum(0)

    def twice(length, size, *, forward=False):
        how = product(recipe, forward=forward)
        return sharded_bound(product_bound(length, size, 3, mode=how))

    return {
        "y": twice(k.shape[0], a @ k, forward=True).reshape(*x.shape[:2], -1),
        "dx": twice(k.shape[1], g @ k.T).reshape(x.shape),
        "kernel": twice(tokens, a.T @ g),
        "bias": sharded_bound(sum_bound(tokens, bias, 3)),
    }


def make_layers():
    return {
        kind: te.DenseGeneral(n_in, n_out, kernel_axes=axes, rngs=nnx.Rngs(0))
        for kind, (n_in, n_out, axes) in KINDS.items()
    }


def arrays():
    return {
        kind: (data((8, 64, n_in)), data((8, 64, n_out), 1))
        for kind, (n_in, n_out, _) in KINDS.items()
    }


def context(recipe):
    return te.autocast(RECIPES[recipe] if recipe else te.HIGH_PRECISION)


def steps(recipe, layers, operands, wanted):
    """Results per kind of layer; delayed scaling first fills its histories."""

    @nnx.jit
    def run(layers, operands):
        found = {}
        for kind, (x, dy) in operands.items():
            found[kind] = step(layers[kind], x, dy, wanted[kind])
        return found

    with context(recipe):
        for _ in range(1 + (recipe == "delayed_scaling")):
            found = run(nnx.Dict(**layers), operands)
    return found


@functools.cache
def one_device(recipe):
    layers = make_layers()
    return layers, steps(recipe, layers, arrays(), dict.fromkeys(KINDS))


CASES = [(r, m) for r in (None, "delayed_scaling", "mxfp8") for m in MESHES]
CASES.append(("current_scaling", "dp x tp"))


@pytest.mark.parametrize(("recipe", "mesh_name"), CASES)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_equals_one_device(recipe, mesh_name, axis_type):
    check_sharded(recipe, mesh_name, axis_type)


def check_sharded(recipe, mesh_name, axis_type, devices=8):
    names, rules, specs = MESHES[mesh_name]
    shape = (1, devices) if "size 1" in mesh_name else grid(names, devices)
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    rule = nnx.logical_axis_rules(te.logical_axis_rules(**rules))
    with jax.set_mesh(mesh), rule:
        sharded = make_layers()
        if {"fsdp", "tp"} & set(rules):
            assert all(any(m.kernel[...].sharding.spec) for m in sharded.values())
        placed = {
            kind: tuple(
                jax.device_put(a, NamedSharding(mesh, s))
                for a, s in zip(both, specs[kind], strict=True)
            )
            for kind, both in arrays().items()
        }
        wanted = {kind: s[1] for kind, s in specs.items()}
        got = steps(recipe, sharded, placed, wanted)
    agree_with_one_device(recipe, sharded, got)


def agree_with_one_device(recipe, sharded, got):
    """Sums within the bound, the amaxes to the bit."""
    single, want = one_device(recipe)
    for kind, (x, dy) in arrays().items():
        limits = bounds(single[kind], x, dy, recipe)
        for name, bound in limits.items():
            a, b = (np.asarray(v[kind][name], np.float64) for v in (got, want))
            worst = (np.abs(a - b) / bound).max()
            assert worst <= 1, (kind, name, worst)
        for name in ("x", "kernel", "dy"):  # the amaxes, so the scales and the codes
            a, b = (
                np.asarray(getattr(m[kind].fp8, name)[...]) for m in (sharded, single)
            )
            np.testing.assert_array_equal(a, b)
            assert (b[0] > 0) == (recipe == "delayed_scaling")


@pytest.mark.parametrize("recipe", ["delayed_scaling", "mxfp8"])
def test_a_step_inside_shard_map_equals_one_device(recipe):
    check_manual(recipe)


def check_manual(recipe, devices=8):
    """Each device has its part of the batch, and a layer that all of them share."""
    mesh = jax.make_mesh((devices,), ("dp",), axis_types=(AxisType.Auto,))
    layers = nnx.Dict(**make_layers())
    graphdef, state = nnx.split(layers)
    specs = {"y": P("dp"), "dx": P("dp"), "kernel": P(), "bias": P()}

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=(dict.fromkeys(KINDS, specs), P()),
    )
    def run(state, operands):
        inner = nnx.merge(graphdef, state, copy=True)
        found = {kind: step(inner[kind], *operands[kind]) for kind in KINDS}
        return found, nnx.state(inner)

    with jax.set_mesh(mesh), context(recipe):
        for _ in range(1 + (recipe == "delayed_scaling")):
            got, state = run(state, arrays())
    nnx.update(layers, state)
    agree_with_one_device(recipe, layers, got)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("recipe", ["delayed_scaling", "mxfp8"])
def test_row_parallel_with_sequence_parallel_scatters_its_sum(axis_type, recipe):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(axis_type,) * 2)
    rules = nnx.logical_axis_rules(te.logical_axis_rules(dp="dp", tp="tp", sp="tp"))
    with jax.set_mesh(mesh), rules, te.autocast(RECIPES[recipe]):
        layer = te.DenseGeneral(
            128, 64, kernel_axes=("mlp", "embed"), use_bias=False, rngs=nnx.Rngs(0)
        )
        layer.eval()
        graph, state = nnx.split(layer)
        x = jax.device_put(data((8, 64, 128)), NamedSharding(mesh, P("dp", None, "tp")))
        f = lambda state, x: nnx.merge(graph, state)(x, out_sharding=P("dp", "tp"))
        text = jax.jit(f).lower(state, x).compile().as_text() or ""
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", text)) == 1
    assert not re.findall(r" all-gather(?:-start)?\(", text)


def test_fsdp_scatters_the_gradient_that_a_step_applies():
    """XLA takes the kernel's sharding to its gradient, on an Auto mesh."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(fsdp="dp"))
    with jax.set_mesh(mesh), rules, te.autocast(RECIPES["delayed_scaling"]):
        axes = {"kernel_axes": ("embed", "mlp"), "use_bias": False}
        layer = te.DenseGeneral(64, 128, **axes, rngs=nnx.Rngs(0))
        x = jax.device_put(data((8, 16, 64)), NamedSharding(mesh, P("dp")))

        @nnx.jit
        def step(layer, x):
            grads = te.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
            layer.kernel[...] -= 0.1 * grads["kernel"][...]

        found = collectives(step.lower(layer, x).compile().as_text() or "")
    moved = {k: n for k, n in found.items() if k[0] != "all-reduce"}
    codes, shard = ("all-gather", "f16[128,64]"), ("reduce-scatter", "f32[8,128]")
    assert moved == {codes: 1, shard: 1}
    assert {shape for kind, shape in found if kind == "all-reduce"} == {"f32[2]"}
