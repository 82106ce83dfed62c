"""What the tests of the attention layers share."""

import jax
import jax.numpy as jnp
from _fused import FAST, FP4, context
from flax import nnx

import te_flax as te


def mha(*sizes, seed=0, **kwargs):
    return te.MultiHeadAttention(*(sizes or (4, 32)), rngs=nnx.Rngs(seed), **kwargs)


def block(*sizes, seed=0, **kwargs):
    sizes = sizes or (32, 64, 4)
    return te.TransformerLayer(*sizes, rngs=nnx.Rngs(seed), **kwargs)


@nnx.jit
def _step(layer, inputs, dy):
    """y, the inputs' gradients and the layer's."""

    def loss(layer, inputs):
        y = layer(*inputs)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), y

    return te.grad(loss, argnums=(0, 1), has_aux=True)(layer, inputs)


def step(layer, inputs, dy, recipe, steps=1):
    """The results of the last of some training steps."""
    with context(recipe):
        run = _step
        if recipe in FP4:
            run = _step.lower(layer, inputs, dy).compile(FAST)
        for _ in range(steps):
            (grads, dx), y = run(layer, inputs, dy)
    return y, dx, grads


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
    tokens = inputs.shape[axis]
    run = nnx.jit(lambda layer, x, *more: layer(x, *more, decode=True))
    layer.init_cache(inputs.shape)
    found, start = [], 0
    for count in chunks or (1,) * tokens:
        part = jax.lax.slice_in_dim(inputs, start, start + count, axis=axis)
        found.append(run(layer, part, *more))
        start += count
    return jnp.concatenate(found, axis)
