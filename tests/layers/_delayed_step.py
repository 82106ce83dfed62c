"""One step of a delayed-scaling dense layer, its state in and out as arrays."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import te_flax as te

WANTED = te.diff_filter(nnx.Param)


def delayed_step(bias: bool, tokens: int = 1024, width: int = 1024):
    """The jitted step for a given dy, whose first operand is donated, and operands."""
    layer = te.DenseGeneral(
        width, width, use_bias=bias, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graphdef, diff, rest = nnx.split(layer, WANTED, ...)
    diff, diff_tree = jax.tree.flatten(diff)
    rest, rest_tree = jax.tree.flatten(rest)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(rest, diff, x, dy):
        def forward(diff, x):
            parts = diff, jax.tree.unflatten(rest_tree, rest)
            inner = nnx.merge(graphdef, *parts, copy=True)
            with te.autocast(te.DelayedScaling()), te.track_gradients(inner):
                y = inner(x)
            return y, nnx.state(inner, nnx.Not(WANTED))

        diff = jax.tree.unflatten(diff_tree, diff)
        y, pull, rest = jax.vjp(forward, diff, x, has_aux=True)
        found, dx = pull(dy)
        model = nnx.merge(graphdef, diff, rest, copy=True)
        grads = te.absorb(model, found)
        rest = nnx.state(model, nnx.Not(WANTED))
        return jax.tree.leaves(rest), (y, dx, jax.tree.leaves(grads))

    keys = jax.random.split(jax.random.key(0))
    x, dy = (jax.random.normal(k, (tokens, width), jnp.bfloat16) for k in keys)
    return step, (rest, diff, x, dy)
