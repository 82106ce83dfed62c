"""Models of flax.nnx for the tests of convert, report and inspect."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import te_flax as te

RECIPES = {
    "delayed_scaling": te.DelayedScaling(amax_history_len=4),
    "current_scaling": te.Float8CurrentScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, features: int = 16):
        self.norm = nnx.LayerNorm(features, use_fast_variance=False, rngs=rngs)
        self.wi = nnx.Linear(features, 32, rngs=rngs)
        self.wo = nnx.LinearGeneral(32, features, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.wo(nnx.gelu(self.wi(self.norm(x))))


class Model(nnx.Module):
    """Layers in a list, a dict, a tuple, a sequence and an attention, one shared."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.named = nnx.Dict(a=nnx.Linear(16, 16, rngs=rngs))
        self.pair = nnx.data((nnx.Linear(16, 16, rngs=rngs), 3))
        self.seq = nnx.Sequential(nnx.Linear(16, 16, rngs=rngs), nnx.relu)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.again = self.up
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        x = self.seq(self.pair[0](self.named["a"](x)))
        return self.head(self.again(self.attention(x)))


DENSE = (
    "up",
    "blocks/0/wi",
    "blocks/0/wo",
    "blocks/1/wi",
    "blocks/1/wo",
    "named/a",
    "pair/0",
    "seq/layers/0",
    "attention/query",
    "attention/key",
    "attention/value",
    "attention/out",
    "head",
)


def model(seed: int = 0) -> Any:
    return Model(nnx.Rngs(seed))


def at(module: Any, path: str) -> Any:
    """The module at a "/"-joined path."""
    for key in filter(None, path.split("/")):
        named = key.isdigit() or isinstance(module, nnx.Dict)
        index = int(key) if key.isdigit() else key
        module = module[index] if named else getattr(module, key)
    return module


def data(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def stacked(layers: int, rngs: nnx.Rngs) -> Any:
    """Linear layers in one module, their parameters stacked for ``nnx.scan``."""
    make = functools.partial(nnx.vmap, in_axes=0, out_axes=0)
    return make(lambda rngs: nnx.Linear(16, 16, rngs=rngs))(rngs.split(layers))


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def scanned(layer, x):
    return jnp.tanh(layer(x))
