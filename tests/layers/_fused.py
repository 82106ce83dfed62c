"""What the tests of the fused layers share: steps, and comparisons with float64."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from _dense import RECIPES as SCALINGS
from flax import nnx

import te_flax as te
from te_flax.testing.formats import Rule
from te_flax.testing.numerics import output_rounding

BLOCKS = {
    "float8_block_scaling": te.Float8BlockScaling(),
    "block_float32_scales": te.Float8BlockScaling("hybrid", use_f32_scales=True),
}
FP4 = {
    "nvfp4_nearest": te.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4": te.NVFP4BlockScaling(),
}
SIX = {"mxfp6": te.MXFP6BlockScaling("hybrid")}
FAST = {"xla_backend_optimization_level": 0}  # halves the time to compile
RECIPES = SCALINGS | BLOCKS | FP4 | SIX
# A recipe with two forms that a test may take in turn.
KINDS = ((None,), *((name,) for name in SCALINGS), tuple(BLOCKS), tuple(FP4))
LAYOUTS = (False, True)  # transpose_batch_sequence
NORMS = {
    "layernorm": {"layernorm_type": "layernorm"},
    "layernorm1p": {"layernorm_type": "layernorm", "zero_centered_gamma": True},
    "rmsnorm": {"layernorm_type": "rmsnorm"},
    "rmsnorm1p": {"layernorm_type": "rmsnorm", "zero_centered_gamma": True},
}


@contextlib.contextmanager
def context(recipe):
    """Under a recipe or none, with the promotion that users have by default."""
    chosen = RECIPES[recipe] if recipe else te.HIGH_PRECISION
    with te.autocast(chosen), jax.numpy_dtype_promotion("standard"):
        yield


def options(norm):
    """Constructor arguments with no parameter at a special value."""
    centre = 0.0 if norm.endswith("1p") else 1.0
    draw = nnx.initializers.normal(0.3)
    return NORMS[norm] | {
        "scale_init": lambda *a: centre + draw(*a),
        "ln_bias_init": nnx.initializers.normal(0.3),
        "bias_init": nnx.initializers.normal(0.3),
    }


@nnx.jit
def step(layer, x, dy):
    """y, dx and the gradients of one training step."""

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    (grads, dx), y = te.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, dx, grads


def train(layer, x, dy, recipe):
    """The results of one step; delayed scaling first fills its histories."""
    run = step
    with context(recipe):
        if recipe == "delayed_scaling":
            step(layer, x, dy)
        if recipe in FP4:  # a large program; its bounds hold for any order of sums
            run = step.lower(layer, x, dy).compile(FAST)
        rule = rules(layer, recipe)
        return *run(layer, x, dy), rule


def gemms(layer):
    return [layer.wi, layer.wo] if isinstance(layer, te.LayerNormMLP) else [layer]


def covering(factors, without=()):
    """Whether each case is one of a few that hold every pair of levels of all cases.

    The arguments are those of hold_every_pair.
    """
    names = [p for p in itertools.combinations(factors, 2) if p not in without]
    left = [
        {(a, b, levels[a], levels[b]) for a, b in names}
        for case in zip(*factors.values(), strict=True)
        for levels in [dict(zip(factors, case, strict=True))]
    ]
    chosen = set()
    while any(left):
        best = max(range(len(left)), key=lambda i: len(left[i]))
        chosen.add(best)
        left = [pairs - left[best] for pairs in left]
    return [i in chosen for i in range(len(left))]


def hold_every_pair(factors, without=()):
    """Asserts that every two levels of two factors occur together in a case.

    Args:
        factors: name to the level of every case; ``...`` where it does not count.
        without: pairs of names that need not.
    """
    for (a, u), (b, v) in itertools.combinations(factors.items(), 2):
        if (a, b) not in without:
            found = {pair for pair in zip(u, v, strict=True) if ... not in pair}
            missing = set(itertools.product({*u} - {...}, {*v} - {...})) - found
            assert not missing, (a, b, missing)


def kind(recipe):
    """The recipe without its form."""
    return next(names[0] for names in KINDS if recipe in names)


def rules(layer, recipe):
    """How the recipe quantizes each GEMM, with what the layer holds before a step."""
    if recipe is None:
        return [Rule()] * len(gemms(layer))
    chosen, amaxes = RECIPES[recipe], (None,) * 3
    found = []
    for gemm in gemms(layer):
        if isinstance(chosen, te.DelayedScaling):
            names = ("x", "kernel", "dy")
            amaxes = tuple(float(gemm.fp8.amax(name, chosen)) for name in names)
        found.append(Rule(chosen.quantizers(), amaxes, key=rounding_key(gemm)))
    return found


def rounding_key(gemm):
    """The key that the next step of a layer rounds with."""
    words = np.asarray(gemm.fp8.rounding[...])
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return jax.random.fold_in(key, words[2])


def noisy(rules, louder=1.0):
    """The same rules with noise in place of the codes."""
    rng = np.random.default_rng(0) if rules[0].quantizers else None
    return [rule._replace(noise=rng, louder=louder) for rule in rules]


def flat(x):
    """Float64 [tokens, features]."""
    return np.asarray(x).astype(np.float64).reshape(-1, x.shape[-1])


def wide(state, **names):
    """Parameters in float64, flattened to matrices and vectors."""
    found = {}
    for name, path in names.items():
        variable = state
        for key in path.split("."):
            variable = variable.get(key) if variable is not None else None
        if variable is not None:
            found[name] = np.asarray(variable[...]).astype(np.float64)
    return found


def cast_back(ball, dtype):
    """A gradient that is rounded to dtype and widened again on its way back.

    On a GPU XLA leaves both conversions out (xla_allow_excess_precision).
    """
    if jax.default_backend() == "gpu":
        return ball.grown(output_rounding(ball.value, ball.radius, dtype))
    return ball.rounded(dtype)


def check(got, balls, exact, rough, where=""):
    """Holds every tensor to its ball, and to the error of the format.

    Args:
        got: results by name.
        balls: of the chain that follows the codes.
        exact: balls of the chain without quantization.
        rough: the chain with noise of the format's size, None without a recipe.
        where: added to messages.
    """
    for name, value in got.items():
        ball = balls[name]
        found = np.asarray(value).astype(np.float64).reshape(ball.value.shape)
        worst = np.max(np.abs(found - ball.value) - ball.radius)
        assert worst <= 0, (where, name, worst, np.abs(ball.value).max())
        if rough is None:
            continue
        error = np.linalg.norm(found - exact[name].value)
        limit = np.linalg.norm(rough[name].value - exact[name].value)
        limit += np.linalg.norm(exact[name].radius)
        assert error <= limit, (where, name, error, limit)
