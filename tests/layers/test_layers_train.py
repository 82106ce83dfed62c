"""A residual MLP learns a regression on real digits under every recipe as in float32.

From the upper half of each of 4,000 digits the model draws the lower half. The task is
noisy by nature, so that the loss ends on a plateau, where a difference of 2 % is one
of the recipe and not of where on a steep curve the run stopped. For the same reason
the learning rate decays and the blocks' kernels start small. Seeds 0, 1, 2 end between
-0.4 and +0.7 %; one mantissa bit less in x alone costs 2.6 %. The digits are those of
the MNIST example: with no cached copy and no package index the tests fail by intent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import te_flax as te
from examples.mnist.data import load, normalize

STEPS, BATCHES, BATCH_SIZE, RATE = 200, 8, 500, 1e-3
IN = OUT = 28 * 28 // 2
WIDTH, MIDDLE = 128, 256
BLOCKS = (
    {},
    {"activations": ("silu", "linear")},
    {"layernorm_type": "rmsnorm"},
    {"activations": "relu"},
)
GEMMS = 2 + 2 * len(BLOCKS)
SMALL = nnx.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")
EIGHT_BIT = {
    "delayed_scaling": te.DelayedScaling(),
    "current_scaling": te.Float8CurrentScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "float8_block_scaling": te.Float8BlockScaling(),
}


class Model(nnx.Module):
    """Dense, four residual feed-forward blocks, dense."""

    def __init__(self, rngs):
        self.first = te.DenseGeneral(IN, WIDTH, rngs=rngs)
        self.blocks = nnx.List(
            te.LayerNormMLP(WIDTH, MIDDLE, kernel_init=SMALL, rngs=rngs, **options)
            for options in BLOCKS
        )
        self.last = te.DenseGeneral(WIDTH, OUT, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@nnx.jit
def train_step(model, optimizer, x, y):
    loss = lambda model: jnp.mean((model(x) - y) ** 2)
    value, grads = te.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def start(seed):
    model = Model(nnx.Rngs(seed))
    schedule = optax.cosine_decay_schedule(RATE, STEPS)
    return model, nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)


@functools.cache
def halves():
    """Upper halves with mean 0 and deviation 1, lower halves in [0, 1]."""
    images = load().train_images
    upper = normalize(images).reshape(len(images), -1)[:, :IN]
    return upper, images.reshape(len(images), -1)[:, IN:].astype(np.float32) / 255


@functools.cache
def train(recipe, seed=0):
    """The loss of each step, and the trained model."""
    model, optimizer = start(seed)
    order = np.random.default_rng(seed).permutation(BATCHES * BATCH_SIZE)
    batches = [[half[rows] for half in halves()] for rows in np.split(order, BATCHES)]
    with te.autocast(recipe), jax.numpy_dtype_promotion("standard"):
        losses = [
            train_step(model, optimizer, *batches[step % BATCHES])
            for step in range(STEPS)
        ]
    return np.array(jax.device_get(losses)), model


def products(jaxpr):
    """The dtypes of both operands of every GEMM, inner jaxprs included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("te_gemm"):
            found.append([str(v.aval.dtype) for v in equation.invars[:2]])
            continue
        is_jaxpr = lambda value: hasattr(value, "eqns")
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if hasattr(inner, "eqns"):
                found += products(getattr(inner, "jaxpr", inner))
    return found


def products_of_a_step(recipe):
    graph, state = nnx.split(start(0))
    x, y = np.zeros((32, IN), np.float32), np.zeros((32, OUT), np.float32)

    def step(state):
        return train_step(*nnx.merge(graph, state), x, y)

    with te.autocast(recipe), jax.numpy_dtype_promotion("standard"):
        return products(jax.make_jaxpr(step)(state).jaxpr)


def last(losses):
    return losses[-20:].mean()


def test_float32_learns():
    losses, _ = train(te.HIGH_PRECISION)
    print(f"float32: {losses[0]:.4f} -> {last(losses):.5f}")
    assert np.isfinite(losses).all()
    assert last(losses) * 10 <= losses[0]
    # The best constant image, which needs no input, is at the variance of the pixels.
    assert last(losses) <= 0.75 * halves()[1].var(0).mean()


@pytest.mark.parametrize(
    "name",  # the examples train under the slow ones
    [
        "delayed_scaling",
        pytest.param("current_scaling", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.slow),
        "float8_block_scaling",
    ],
)
def test_eight_bits_end_within_2_percent_of_float32(name):
    losses, model = train(EIGHT_BIT[name])
    reference = last(train(te.HIGH_PRECISION)[0])
    print(f"{name}: {last(losses):.5f}, {last(losses) / reference - 1:+.2%}")
    assert np.isfinite(losses).all()
    assert abs(last(losses) / reference - 1) <= 0.02
    layers = [m for _, m in nnx.iter_modules(model) if isinstance(m, te.DenseGeneral)]
    assert len(layers) == GEMMS
    for layer in layers:  # delayed scaling recorded every step, the others none
        assert int(layer.fp8.nonfinite[...]) == 0
        for operand in ("x", "kernel", "dy"):
            pushed = np.count_nonzero(getattr(layer.fp8, operand)[...])
            assert pushed == (STEPS if name == "delayed_scaling" else 0), operand


@pytest.mark.slow
def test_six_bits_end_within_2_percent_of_float32():
    losses, _ = train(te.MXFP6BlockScaling())
    reference = last(train(te.HIGH_PRECISION)[0])
    print(f"mxfp6: {last(losses):.5f}, {last(losses) / reference - 1:+.2%}")
    assert abs(last(losses) / reference - 1) <= 0.02


@pytest.mark.slow
def test_four_bits_learn():
    """Compiles for a minute: its quantizers have no handler yet."""
    losses, _ = train(te.NVFP4BlockScaling())
    reference = last(train(te.HIGH_PRECISION)[0])
    print(f"nvfp4: {last(losses):.5f}, {last(losses) / reference - 1:+.2%}")
    assert np.isfinite(losses).all()
    assert last(losses) * 5 <= losses[0]
    assert abs(last(losses) / reference - 1) <= 0.10


@pytest.mark.parametrize("name", [*EIGHT_BIT, "nvfp4", "none"])
def test_every_product_reads_codes(name):
    """Three products a layer: forward, and the gradients of x and of the kernel."""
    found = products_of_a_step(te.load_recipe(name))
    assert len(found) == 3 * GEMMS
    plain = [pair for pair in found if pair == ["float32", "float32"]]
    codes = [p for p in found if all(d.startswith(("float8_", "uint8")) for d in p)]
    assert len(plain if name == "none" else codes) == 3 * GEMMS
