"""Layers of other libraries, as steps that `benchmarks.gpu` times beside ours.

A step computes ``sum(y * dy)`` and its gradients with respect to the parameters and x,
so that no product of either pass can be dropped. Peers have float32 parameters and
bfloat16 activations, as ours have.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from te_flax.typing import Array

Step = Callable[[], Any]
HEAD_DIM = 128


class Work(NamedTuple):
    """One layer to time.

    Attributes:
        name: of the row.
        kind: "dense", "mlp", or "transformer": a causal layer with heads of 128.
        shape: of x; features come last.
        features: of the dense layer's result, or of the MLP's middle.
        activations: of the MLP; its dense layers have biases unless it is gated.
        flops: of the products of both passes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    features: int
    activations: tuple[str, ...]
    flops: float


def loss(y: Array, dy: Array) -> Array:
    """What every step differentiates."""
    return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))


def arrays(work: Work) -> tuple[Array, Array]:
    """Normal x, and dy as a loss would give it."""
    keys = jax.random.split(jax.random.key(0))
    out = work.features if work.kind == "dense" else work.shape[-1]
    x = jax.random.normal(keys[0], work.shape, jnp.bfloat16)
    dy = jax.random.normal(keys[1], (*work.shape[:-1], out), jnp.bfloat16)
    return x, dy * jnp.bfloat16(1e-3)


class PlainMLP(nnx.Module):
    """LayerNorm, dense, activation, dense, as written with flax.nnx."""

    def __init__(self, work: Work, rngs: nnx.Rngs):
        hidden, mid, self.gated = (
            work.shape[-1],
            work.features,
            len(work.activations) > 1,
        )
        common = {"dtype": jnp.bfloat16, "rngs": rngs, "use_bias": not self.gated}
        self.norm = nnx.LayerNorm(
            hidden, dtype=jnp.bfloat16, use_fast_variance=False, rngs=rngs
        )
        self.wi = nnx.LinearGeneral(
            hidden, (2, mid) if self.gated else (mid,), **common
        )
        self.wo = nnx.Linear(mid, hidden, **common)

    def __call__(self, x: Array) -> Array:
        """Maps [.., hidden] to [.., hidden]."""
        h = self.wi(self.norm(x))
        if self.gated:
            return self.wo(nnx.silu(h[..., 0, :]) * h[..., 1, :])
        return self.wo(nnx.gelu(h))


class PlainTransformer(nnx.Module):
    """LayerNorm, attention and the MLP with their residuals, written with flax.nnx."""

    def __init__(self, work: Work, rngs: nnx.Rngs):
        hidden = work.shape[-1]
        heads = (hidden // HEAD_DIM, HEAD_DIM)
        common = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm = nnx.LayerNorm(hidden, use_fast_variance=False, **common)
        self.qkv = nnx.LinearGeneral(hidden, (3, *heads), **common)
        self.out = nnx.LinearGeneral(heads, hidden, axis=(-2, -1), **common)
        self.mlp = PlainMLP(work, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps [batch, sequence, hidden] to the same shape."""
        qkv = self.qkv(self.norm(x))
        kind = "cudnn" if jax.default_backend() == "gpu" else "xla"
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        made = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=kind
        )
        x = x + self.out(made)
        return x + self.mlp(x)


def plain(work: Work) -> Step:
    """XLA in bfloat16 through flax.nnx."""
    rngs = nnx.Rngs(0)
    if work.kind == "dense":
        model: Any = nnx.Linear(
            work.shape[-1],
            work.features,
            use_bias=False,
            dtype=jnp.bfloat16,
            rngs=rngs,
        )
    else:
        blocks = {"mlp": PlainMLP, "transformer": PlainTransformer}
        model = blocks[work.kind](work, rngs)
    return nnx_step(model, work, nnx.value_and_grad, contextlib.nullcontext)


def nnx_step(
    model: nnx.Module, work: Work, value_and_grad: Callable, context: Callable
) -> Step:
    """A step of an NNX layer; the arguments are those of nnx_gradients."""
    return chained(*nnx_gradients(model, work, value_and_grad, context))


def nnx_gradients(
    model: nnx.Module, work: Work, value_and_grad: Callable, context: Callable
) -> tuple[Any, ...]:
    """The jitted step of an NNX layer and its operands.

    These are the state besides the parameters, which is donated and comes back first,
    the parameters, x and dy. The first two are flat lists: a State would be flattened
    in Python.

    Args:
        model: the layer.
        work: what is timed.
        value_and_grad: nnx's, or one like it.
        context: entered around the call of the layer.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, param_tree = jax.tree.flatten(params)
    rest, rest_tree = jax.tree.flatten(rest)

    @functools.partial(jax.jit, donate_argnums=0)
    def gradients(rest, params, x, dy):
        parts = (jax.tree.unflatten(param_tree, params),)
        model = nnx.merge(graphdef, *parts, jax.tree.unflatten(rest_tree, rest))

        def value(model, x):
            with context():
                return loss(model(x), dy)

        found, grads = value_and_grad(value, argnums=(0, 1))(model, x)
        rest = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))
        return rest, found, jax.tree.leaves(grads)

    return gradients, rest, params, *arrays(work)


def chained(gradients: Callable, rest: Any, *others: Any) -> Step:
    """A step whose state is what the one before it returned."""
    state = {"rest": rest}

    def step():
        state["rest"], value, grads = gradients(state["rest"], *others)
        return value, grads

    return step


def _linen(model: linen.Module, work: Work, context: Callable | None = None) -> Step:
    """A step of a Linen layer whose FP8 state is differentiated with the parameters."""
    x, dy = arrays(work)
    variables = model.init(jax.random.key(0), x)

    def value(variables, x, dy):
        y: Any = model.apply(variables, x)
        return loss(y, dy)

    gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    state = {"variables": variables}

    def step():
        value, grads = gradients(state["variables"], x, dy)
        overwritten = set(grads[0]) - {"params"}
        state["variables"] = {
            **state["variables"],
            **{name: grads[0][name] for name in overwritten},
        }
        return value, grads

    return step


def flax_fp8(work: Work) -> Step:
    """flax.linen's FP8 product, which XLA turns into cuBLASLt's."""
    direct = linen.Fp8DirectDotGeneralOp
    if work.kind != "dense":
        raise NotImplementedError("flax has the dense layer alone")
    model = linen.Dense(
        work.features, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=direct
    )
    return _linen(model, work)


def transformer_engine(work: Work, recipe: str) -> Step:
    """Transformer Engine's layer under its own recipe; needs transformer_engine."""
    recipes = importlib.import_module("transformer_engine.common.recipe")
    te_linen = importlib.import_module("transformer_engine.jax.flax")
    autocast = importlib.import_module("transformer_engine.jax").autocast

    made = {
        "delayed_scaling": recipes.DelayedScaling,
        "current_scaling": recipes.Float8CurrentScaling,
    }[recipe]()
    if work.kind == "transformer":
        model = te_linen.TransformerLayer(
            hidden_size=work.shape[-1],
            mlp_hidden_size=work.features,
            num_attention_heads=work.shape[-1] // HEAD_DIM,
            mlp_activations=work.activations,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            intermediate_dropout=0.0,
            enable_relative_embedding=False,
            scale_attn_logits=True,
            use_bias=True,
            transpose_batch_sequence=False,
            dtype=jnp.bfloat16,
        )
    elif work.kind == "dense":
        model = te_linen.DenseGeneral(work.features, use_bias=False, dtype=jnp.bfloat16)
    else:
        model = te_linen.LayerNormMLP(
            intermediate_dim=work.features,
            activations=work.activations,
            use_bias=len(work.activations) == 1,
            return_layernorm_output=False,
            intermediate_dropout_rate=0.0,
            dtype=jnp.bfloat16,
        )
    with autocast(enabled=True, recipe=made):
        step = _linen(model, work)
        step()  # the recipe is read while tracing
    return step


PEERS: dict[str, dict[str, Callable[[Work], Step]]] = {
    "flax": {"flax Fp8Direct": flax_fp8},
    "te": {
        f"TE {name}": lambda work, name=name: transformer_engine(work, name)
        for name in ("delayed_scaling", "current_scaling")
    },
}
