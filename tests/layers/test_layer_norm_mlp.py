"""LayerNormMLP against float64 under every recipe, and against nnx without one."""

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
    cast_back,
    check,
    context,
    covering,
    flat,
    hold_every_pair,
    kind,
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
from te_flax.testing.numerics import sharded_bound

PLAIN = ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu")
ACTIVATIONS = (
    *((name,) for name in PLAIN),
    *((name, "linear") for name in PLAIN),
    ("linear", "linear"),
    ("clamped_silu", "clamped_linear"),
)
SHAPES = {
    "64x128x128": ((4, 16), 128, 128, 128),
    "2x33x192x320": ((2, 33), 192, 320, 192),
    "48x1056x1024": ((48,), 1056, 1024, 1056),
}
NAMES = {
    "scale": "norm.scale",
    "norm_bias": "norm.bias",
    "wi": "wi.kernel",
    "wi_bias": "wi.bias",
    "wo": "wo.kernel",
    "wo_bias": "wo.bias",
}
PARAMS = {"limit": 1.5, "alpha": 1.3, "offset": 0.75}  # the clamps do clamp


LARGE = "48x1056x1024"
AXES = ("batch", "seqlen", None)


class Case(NamedTuple):
    recipe: str | None
    norm: str
    names: tuple[str, ...]
    bias: bool
    shape: str
    layout: bool
    dtype: Any


def cases():
    """Every activation under every recipe; with the rest every pair occurs."""
    found = []
    for (i, names), (j, forms) in itertools.product(
        enumerate(ACTIVATIONS), enumerate(KINDS)
    ):
        norm, recipe = tuple(NORMS)[(i + j) % 4], forms[i // 4 % len(forms)]
        bias = bool((i // 2 + j) % 2)
        shape = tuple(SHAPES)[(i // 4 + j // 2 + i) % 2]
        layout = bool((i + i // 3 + j + j // 2) % 2)
        narrow = recipe and (i % 3 == 0) ^ (j % 2 == 0) ^ (i % 2 == 0)
        dtype = jnp.bfloat16 if narrow else jnp.float32
        found.append(Case(recipe, norm, names, bias, shape, layout, dtype))
    gelu, swiglu, narrow, wide = ("gelu",), ("silu", "linear"), jnp.bfloat16, np.float32
    small = tuple(SHAPES)[:2]
    return [
        *found,
        Case(None, "layernorm", gelu, True, small[0], False, narrow),
        Case(None, "rmsnorm", swiglu, False, small[1], True, narrow),
        Case(None, "layernorm", gelu, True, LARGE, False, wide),
        Case("delayed_scaling", "layernorm", gelu, True, LARGE, False, wide),
        Case("current_scaling", "rmsnorm", swiglu, True, LARGE, False, narrow),
        Case("mxfp8", "layernorm1p", ("relu",), True, LARGE, False, wide),
        Case("float8_block_scaling", "rmsnorm1p", gelu, False, LARGE, False, narrow),
        Case("nvfp4", "layernorm", swiglu, True, LARGE, False, wide),
    ]


def factors_of(found):
    """The levels of every case by factor, for hold_every_pair."""
    factors = dict(zip(Case._fields, zip(*found, strict=True), strict=True))
    factors["shape"] = [... if case.shape == LARGE else case.shape for case in found]
    return factors | {"kind": [kind(case.recipe) for case in found]}


def marked():
    """The cases; some hold every pair but an activation's, which the rest, slow, has.

    An activation reads one element: it meets dtype and bias, which its op takes too.
    """
    others = ("recipe", "kind", "norm", "shape", "layout")
    apart = {pair for name in others for pair in (("names", name), (name, "names"))}
    needed = covering(factors_of(cases()), apart)
    return [
        pytest.param(*case, marks=() if keep else pytest.mark.slow)
        for case, keep in zip(cases(), needed, strict=True)
    ]


def test_the_cases_hold_every_pair():
    """Of recipe, norm, activation, bias, shape, layout and dtype.

    An activation meets one form of each recipe, any other level every form. The large
    shape meets every recipe.
    """
    found = cases()
    hold_every_pair(factors_of(found), {("recipe", "names"), ("recipe", "kind")})
    large = {kind(case.recipe) for case in found if case.shape == LARGE}
    assert large == {kind(case.recipe) for case in found}


def make(norm, names, bias, shape, layout, dtype):
    batch, n_in, mid, out = SHAPES[shape]
    axes = dict.fromkeys(("layernorm_input_axes", "dot_1_input_axes"), AXES)
    axes["dot_2_input_axes"] = ("batch", "seqlen", "mlp")
    layer = te.LayerNormMLP(
        n_in,
        mid,
        out_features=out,
        activations=names,
        activation_params=PARAMS if names[0].startswith("clamped") else {},
        use_bias=bias,
        dtype=dtype,
        transpose_batch_sequence=layout,
        rngs=nnx.Rngs(0),
        **(axes if len(batch) == 2 else {}),
        **options(norm),
    )
    batch = batch[::-1] if layout else batch
    return layer, data((*batch, n_in), 0, dtype), data((*batch, out), 1, dtype)


def operands(layer, dtype, recipe):
    """The parameters as the passes read them."""
    found = wide(nnx.state(layer, nnx.Param), **NAMES)
    for name in found:
        kernel = name in ("wi", "wo")
        if name in ("wi_bias", "wo_bias") or (kernel and recipe is None):
            found[name] = found[name].astype(dtype).astype(np.float64)
        found[name] = found[name].reshape(-1 if not kernel else (len(found[name]), -1))
    return found


def gradients(balls, dtype):
    """Gradients of what was cast to dtype were rounded to it on their way back."""
    cast = ("wi_bias", "wo_bias")
    return balls | {n: cast_back(balls[n], dtype) for n in cast if n in balls}


@pytest.mark.parametrize(Case._fields, marked())
def test_both_passes_against_float64(recipe, norm, names, bias, shape, layout, dtype):
    layer, x, dy = make(norm, names, bias, shape, layout, dtype)
    y, dx, grads, rule = train(layer, x, dy, recipe)
    run = functools.partial(
        chain.layernorm_mlp,
        flat(x),
        operands(layer, dtype, recipe),
        flat(dy),
        kind=NORMS[norm]["layernorm_type"],
        zero_centered_gamma=norm.endswith("1p"),
        activations=names,
        activation_params=tuple(PARAMS.values()),
        dtype=dtype,
    )
    balls, exact, rough = (
        gradients(run(rules=r), dtype)
        for r in (rule, rules(layer, None), noisy(rule, louder(names)))
    )
    got = {"y": y, "dx": dx} | wide(grads, **NAMES)
    check(got, balls, exact, rough if recipe else None)
    if recipe is None and dtype == jnp.float32:
        against_nnx(layer, x, dy, got, balls)


def louder(names):
    jumps = {"relu", "clamped_silu", "clamped_linear"} & set(names)
    return 3**0.5 if jumps else 1.0


def against_nnx(layer, x, dy, got, balls):
    """Both stay in the ball, so they differ by at most its width."""
    theirs = Composition(layer)
    with context(None):
        y, dx, grads = step(theirs, x, dy)
    want = {"y": y, "dx": dx} | wide(grads, **NAMES)
    assert set(want) == set(got)
    for name, value in want.items():
        a, b = (np.asarray(v).astype(np.float64) for v in (got[name], value))
        limit = sharded_bound(balls[name].radius).reshape(a.shape)
        # gelu and gelu_exact of jax.nn: 8 2^-24 |x| more, before the output's rounding.
        size = 8 * 2.0**-24 * np.abs(b).max() * 8
        worst = np.max(np.abs(a - b) - limit - size)
        assert worst <= 0, (name, worst)


JAX = {
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(jnp.asarray(1.702, x.dtype) * x),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "linear": lambda x: x,
    "clamped_silu": lambda x: (
        jnp.minimum(x, 1.5) * jax.nn.sigmoid(1.3 * jnp.minimum(x, 1.5))
    ),
    "clamped_linear": lambda x: jnp.clip(x, -1.5, 1.5) + 0.75,
}


class Composition(nnx.Module):
    """The same block out of flax.nnx's layers and jax.nn."""

    def __init__(self, ours):
        rngs, dtype = nnx.Rngs(0), ours.wi.dtype
        n = ours.in_features
        cls = nnx.RMSNorm if ours.norm.kind == "rmsnorm" else nnx.LayerNorm
        self.norm = cls(n, dtype=dtype, use_fast_variance=False, rngs=rngs)
        scale = ours.norm.scale[...]
        self.norm.scale[...] = scale + float(ours.norm.zero_centered_gamma)
        if isinstance(self.norm, nnx.LayerNorm):
            self.norm.bias[...] = ours.norm.bias[...]
        linears = []
        for source in (ours.wi, ours.wo):
            made = nnx.LinearGeneral(
                source.in_features,
                source.out_features,
                use_bias=source.use_bias,
                dtype=dtype,
                rngs=rngs,
            )
            made.kernel[...] = source.kernel[...]
            if source.use_bias:
                made.bias[...] = source.bias[...]
            linears.append(made)
        self.wi, self.wo = linears
        self.activations = ours.activations

    def __call__(self, x):
        z = self.wi(self.norm(x))
        if len(self.activations) == 1:
            return self.wo(JAX[self.activations[0]](z))
        gate, linear = (JAX[f](z[..., i, :]) for i, f in enumerate(self.activations))
        return self.wo(gate * linear)


def test_a_wide_computation_of_a_narrow_x_is_wide_in_both_passes():
    """dtype=None promotes x with the parameters: only x and dx are bfloat16."""
    layer, x, dy = make("layernorm", ("gelu",), True, "64x128x128", False, None)
    x = x.astype(jnp.bfloat16)
    y, dx, grads, rule = train(layer, x, dy, None)
    assert (y.dtype, dx.dtype) == (jnp.float32, jnp.bfloat16)
    p, kw = operands(layer, np.float32, None), {"kind": "layernorm"}
    balls = chain.layernorm_mlp(
        flat(x), p, flat(dy), rules=rule, activations=("gelu",), **kw
    )
    got = {"y": y, "dx": dx} | wide(grads, **NAMES)
    check(got, balls | {"dx": balls["dx"].rounded(jnp.bfloat16)}, balls, None)


def test_a_matrix_of_tokens_in_bfloat16():
    layer = te.LayerNormMLP(8, 16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with context(None):
        found = step(layer, *(data((4, 8), s, jnp.bfloat16) for s in (0, 1)))
        jax.block_until_ready(jax.tree.leaves(found))
