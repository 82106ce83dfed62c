"""LayerNormDenseGeneral against float64 under every recipe, against nnx without one."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import data
from _fused import (
    KINDS,
    NORMS,
    RECIPES,
    cast_back,
    check,
    context,
    flat,
    hold_every_pair,
    noisy,
    options,
    rules,
    step,
    train,
    wide,
)
from flax import nnx

import te_flax as te
from te_flax.testing import chain
from te_flax.testing.ball import Ball
from te_flax.testing.numerics import close_to, sharded_bound

NAMES = {
    "scale": "norm.scale",
    "norm_bias": "norm.bias",
    "kernel": "kernel",
    "bias": "bias",
}
SHAPES = {
    "64x128x128": ((4, 16), 128, 128),
    "2x33x192x320": ((2, 33), 192, (4, 80)),
    "17x1056x1024": ((17,), 1056, 1024),
}


LARGE = "17x1056x1024"
AXES = ("batch", "seqlen", None)


class Case(NamedTuple):
    recipe: str | None
    norm: str
    bias: bool
    shape: str
    layout: bool
    dtype: Any


def cases():
    """Every recipe with every norm; with the rest every pair occurs."""
    found = []
    for (i, recipe), (j, norm) in itertools.product(
        enumerate((None, *RECIPES)), enumerate(NORMS)
    ):
        bias, shape = bool((i + j + j // 2) % 2), tuple(SHAPES)[(i + j) % 2]
        layout = bool((i // 2 + j // 2) % 2)
        dtype = jnp.bfloat16 if recipe and (i + j // 2) % 2 else jnp.float32
        found.append(Case(recipe, norm, bias, shape, layout, dtype))
    for forms in KINDS:
        found.append(Case(forms[0], "layernorm", True, LARGE, False, jnp.float32))
    small = tuple(SHAPES)[:2]
    return [
        *found,
        Case(None, "rmsnorm", True, small[1], True, jnp.bfloat16),
        Case(None, "layernorm1p", False, small[0], False, jnp.bfloat16),
    ]


def test_the_cases_hold_every_pair():
    """Of recipe, norm, bias, shape, layout and dtype."""
    found = cases()
    factors = dict(zip(Case._fields, zip(*found, strict=True), strict=True))
    factors["shape"] = [... if case.shape == LARGE else case.shape for case in found]
    hold_every_pair(factors)


def make(norm, bias, shape, layout, dtype, **kwargs):
    batch, n_in, out = SHAPES[shape]
    axes = dict.fromkeys(("layernorm_input_axes", "dot_input_axes"), AXES)
    layer = te.LayerNormDenseGeneral(
        n_in,
        out,
        use_bias=bias,
        dtype=dtype,
        transpose_batch_sequence=layout,
        rngs=nnx.Rngs(0),
        **(axes if len(batch) == 2 else {}),
        **options(norm),
        **kwargs,
    )
    out = (out,) if isinstance(out, int) else out
    batch = batch[::-1] if layout else batch
    return layer, data((*batch, n_in), 0, dtype), data((*batch, *out), 1, dtype)


def operands(layer, dtype, recipe):
    """The parameters as the passes read them."""
    found = wide(nnx.state(layer, nnx.Param), **NAMES)
    for name in found:
        if name == "bias" or (name == "kernel" and recipe is None):
            found[name] = found[name].astype(dtype).astype(np.float64)
        shape = (len(found[name]), -1) if name == "kernel" else -1
        found[name] = found[name].reshape(shape)
    return found


def exact_chain(layer, x, dy, norm, dtype, recipe):
    """The chain of this layer, waiting for the rule of its GEMM."""
    tokens = int(np.prod(x.shape[:-1]))
    return functools.partial(
        chain.layernorm_dense,
        flat(x),
        operands(layer, dtype, recipe),
        np.asarray(dy, np.float64).reshape(tokens, -1),
        kind=NORMS[norm]["layernorm_type"],
        zero_centered_gamma=norm.endswith("1p"),
        dtype=dtype,
    )


@pytest.mark.parametrize(Case._fields, cases())
def test_both_passes_against_float64(recipe, norm, bias, shape, layout, dtype):
    layer, x, dy = make(norm, bias, shape, layout, dtype)
    y, dx, grads, rule = train(layer, x, dy, recipe)
    run = exact_chain(layer, x, dy, norm, dtype, recipe)
    balls, exact, rough = (
        {
            n: cast_back(b, dtype) if n == "bias" else b
            for n, b in run(rule=r[0]).items()
        }
        for r in (rule, rules(layer, None), noisy(rule))
    )
    got = {"y": y, "dx": dx} | wide(grads, **NAMES)
    check(got, balls, exact, rough if recipe else None)
    if recipe is None and dtype == jnp.float32:
        with context(None):
            y, dx, grads = step(Composition(layer), x, dy)
        want = {"y": y, "dx": dx} | wide(grads, **NAMES)
        assert set(want) == set(got)
        for name, value in want.items():
            limit = sharded_bound(balls[name].radius).reshape(value.shape)
            close_to(got[name], np.asarray(value), limit)


class Composition(nnx.Module):
    """The same layer out of flax.nnx's."""

    def __init__(self, ours):
        kind = nnx.RMSNorm if ours.norm.kind == "rmsnorm" else nnx.LayerNorm
        n, rngs = ours.in_features[0], nnx.Rngs(0)
        self.norm = kind(n, use_fast_variance=False, rngs=rngs)
        centre = float(ours.norm.zero_centered_gamma)
        self.norm.scale[...] = ours.norm.scale[...] + centre
        if isinstance(self.norm, nnx.LayerNorm):
            self.norm.bias[...] = ours.norm.bias[...]
        made = nnx.LinearGeneral(
            n, ours.out_features, use_bias=ours.use_bias, rngs=rngs
        )
        self.kernel, self.bias = ours.kernel, ours.bias
        self.linear = nnx.data([made])

    def __call__(self, x):
        linear = self.linear[0]
        linear.kernel, linear.bias = self.kernel, self.bias
        return linear(self.norm(x))


@pytest.mark.parametrize("recipe", [None, "delayed_scaling"])
def test_a_wide_computation_of_a_narrow_x_is_wide_in_both_passes(recipe):
    """dtype=None promotes x with the parameters: only x and dx are bfloat16."""
    layer, x, dy = make("layernorm", True, "64x128x128", False, None)
    x = x.astype(jnp.bfloat16)
    y, dx, grads, rule = train(layer, x, dy, recipe)
    assert y.dtype == jnp.float32
    assert dx.dtype == jnp.bfloat16
    run = exact_chain(layer, x, dy, "layernorm", jnp.float32, recipe)
    balls = run(rule=rule[0])
    got = {"y": y} | wide(grads, **NAMES)
    check(got, balls, balls, None)
    check({"dx": dx}, {"dx": balls["dx"].rounded(jnp.bfloat16)}, balls, None)


@pytest.mark.parametrize("recipe", [None, "current_scaling"])
def test_the_norms_output_is_a_second_result_with_its_own_gradient(recipe):
    layer, x, dy = make(
        "layernorm",
        True,
        "64x128x128",
        False,
        jnp.float32,
        return_layernorm_output=True,
    )
    dh = data(x.shape, 2)

    def run(layer, x, dy, dh):
        def loss(layer, x):
            y, h = layer(x)
            return jnp.sum(y * dy) + jnp.sum(h * dh), h

        return te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    with context(recipe):
        run = nnx.jit(run)
        (both, dx), h = run(layer, x, dy, dh)
        (only_y, dx_y), _ = run(layer, x, dy, 0 * dh)
        (only_h, dx_h), _ = run(layer, x, 0 * dy, dh)
    norm = chain.norm_fwd("layernorm", *(flat(x), *named(layer, "scale", "norm_bias")))
    close_to(flat(h), norm.h.value, norm.h.radius)
    want = chain.norm_bwd(
        "layernorm", Ball.exact(flat(dh)), norm, named(layer, "scale")[0]
    )
    close_to(flat(dx_h), want[0].value, want[0].radius)
    for name in NAMES.values():  # linear in the cotangents of both
        a, b, c = (leaf(g, name) for g in (both, only_y, only_h))
        bound = 2.0**-20 * (np.abs(b) + np.abs(c)).max()
        close_to(a, b + c, bound)
    close_to(dx, np.asarray(dx_y + dx_h), 2.0**-20 * np.abs(dx).max())


def leaf(state, path):
    for key in path.split("."):
        state = state[key]
    return np.asarray(state[...], np.float64)


def named(layer, *names):
    found = wide(nnx.state(layer, nnx.Param), **NAMES)
    return [found[name] for name in names]


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_without_the_norm_it_is_a_dense_layer(recipe):
    layer = te.LayerNormDenseGeneral(
        64, 32, enable_layernorm=False, return_layernorm_output=True, rngs=nnx.Rngs(0)
    )
    dense = te.DenseGeneral(64, 32, rngs=nnx.Rngs(0))
    dense.kernel[...], dense.bias[...] = layer.kernel[...], layer.bias[...]
    x = data((8, 64))
    with context(recipe):
        y, h = layer(x)
        np.testing.assert_array_equal(y, dense(x))
    np.testing.assert_array_equal(h, x)
    assert layer.norm is None


def test_depth_scaling_divides_y():
    kw = dict(rngs=nnx.Rngs(0))
    plain = te.LayerNormDenseGeneral(16, 8, **kw)
    scaled = te.LayerNormDenseGeneral(16, 8, depth_scaling=4.0, rngs=nnx.Rngs(0))
    x = data((3, 16))
    np.testing.assert_array_equal(scaled(x) * 4.0, plain(x))


# Evaluation rounds to nearest, so "nvfp4" would be "nvfp4_nearest" again.
@pytest.mark.parametrize("recipe", [r for r in (None, *RECIPES) if r != "nvfp4"])
def test_jit_equals_eager(recipe):
    layer, x, _ = make("layernorm", True, "64x128x128", False, jnp.float32)
    layer.eval()
    with context(recipe):
        np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, x), layer(x))


def test_an_argument_with_another_name_here_is_refused():
    assert jax.tree.leaves(nnx.state(te.LayerNormDenseGeneral(2, 2, rngs=nnx.Rngs(0))))
    with pytest.raises(TypeError, match=r"LayerNormDenseGeneral: axis must be an arg"):
        te.LayerNormDenseGeneral(2, 2, axis=0, rngs=nnx.Rngs(0))
