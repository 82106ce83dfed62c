"""What the tests of the attention layers share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _fused import FAST, context
from flax import nnx

import te_flax as te


def mha(*sizes, seed=0, **kwargs) -> Any:
    return te.MultiHeadAttention(*(sizes or (4, 32)), rngs=nnx.Rngs(seed), **kwargs)


def block(*sizes, seed=0, **kwargs) -> Any:
    sizes = sizes or (32, 64, 4)
    return te.TransformerLayer(*sizes, rngs=nnx.Rngs(seed), **kwargs)


@nnx.jit
def _step(layer, inputs, dy):
    """y, the inputs' gradients and the layer's."""

    def loss(layer, inputs):
        y = layer(*inputs)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    return te.grad(loss, argnums=(0, 1), has_aux=True)(layer, inputs)


def step(layer, inputs, dy, recipe=None):
    """The results of a training step; its program is large, so compiled fast."""
    with context(recipe):
        run = _step.lower(layer, inputs, dy).compile(FAST)
        (grads, dx), y = run(layer, inputs, dy)
    return y, dx, grads


def forward(layer, *inputs, static=None, **arrays):
    """The result of a call, in a program that is compiled fast."""
    run = nnx.jit(
        lambda layer, inputs, arrays: layer(*inputs, **arrays, **static or {})
    )
    return run.lower(layer, inputs, arrays).compile(FAST)(layer, inputs, arrays)


def program(layer, *inputs):
    """The jaxpr of both passes, as text."""
    parts = nnx.split(layer)

    def gradients(*inputs):
        loss = lambda layer, *inputs: layer(*inputs).astype(jnp.float32).sum()
        return te.grad(loss, argnums=(0, 1))(nnx.merge(*parts, copy=True), *inputs)

    return str(jax.make_jaxpr(gradients)(*inputs))


def params(layer, seed=None):
    """The parameters as float64 numpy; with a seed they become other ones first."""
    state = nnx.state(layer, nnx.Param)
    if seed is not None:
        rng = np.random.default_rng(seed)
        draw = lambda a: a + jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype)
        nnx.update(layer, jax.tree.map(draw, state))
        state = nnx.state(layer, nnx.Param)
    return jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(state))


def projections(layer):
    """Every layer with a GEMM inside of one, by path."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(layer)
        if isinstance(module, te.DenseGeneral)
    }


def decoded(layer, inputs, *more, chunks=None):
    """The outputs of token after token, along the axis of the tokens."""
    axis = 0 if layer.transpose_batch_sequence else 1
    run = nnx.jit(lambda layer, x: layer(x, *more, decode=True))
    layer.init_cache(inputs.shape)
    found, start, programs = [], 0, {}
    for count in chunks or (1,) * inputs.shape[axis]:
        part = jax.lax.slice_in_dim(inputs, start, start + count, axis=axis)
        if count not in programs:
            programs[count] = run.lower(layer, part).compile(FAST)
        found.append(programs[count](layer, part))
        start += count
    return jnp.concatenate(found, axis)


def held_to_format(recipe, pairs):
    """Asserts that results are off by the format's error, and not by much more."""
    limit = 0.5 if "nvfp4" in recipe else 0.15
    for got, plain in pairs:
        error = np.linalg.norm(got - plain) / np.linalg.norm(plain)
        assert 0 < error < limit, error


def pushed_once(layer, recipe):
    """Asserts that every GEMM pushed one amax of x and of dy under delayed scaling."""
    for name, gemm in projections(layer).items():
        pushed = [int((h[...] > 0).sum()) for h in (gemm.fp8.x, gemm.fp8.dy)]
        assert pushed == [recipe == "delayed_scaling"] * 2, name
