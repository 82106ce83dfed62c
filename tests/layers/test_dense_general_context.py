"""DenseGeneral under contexts and meshes."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import pytest
from _dense import RECIPES, data
from flax import nnx

import te_flax as te


def recipes_seen(f, *args):
    """Which quantize ops the jaxpr of f holds."""
    text = str(jax.make_jaxpr(f)(*args))
    names = ("te_quantize_rowcol[", "te_quantize_mxfp8_rowcol[")
    return tuple(name for name in names if name in text)


@pytest.mark.parametrize("wrap", ["plain", "jit", "remat", "vmap"])
def test_contexts_entered_inside_the_loss_reach_the_backward_pass(wrap):
    layer = te.DenseGeneral(32, 16, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(params, x):
        with te.autocast(te.MXFP8BlockScaling()), te.kernels("*=reference"):
            return nnx.merge(graph, params, rest, copy=True)(x)

    wrapped = {
        "plain": apply,
        "jit": jax.jit(apply),
        "remat": jax.checkpoint(apply),
        "vmap": lambda p, x: jax.vmap(apply, (None, 0))(p, x[None])[0],
    }[wrap]
    loss = lambda params, x: jnp.sum(wrapped(params, x))
    with te.autocast(te.DelayedScaling()), te.kernels("*=auto"):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params, data((8, 32))).jaxpr
    ops = list(kernel_ops(jaxpr))
    names = {name for name, _ in ops}
    backward = {"te_quantize_mxfp8_rowcol", "te_gemm_nt_mxfp8", "te_gemm_tn_mxfp8"}
    assert backward <= names
    assert not {n for n in names if n.startswith("te_quantize") and "mxfp8" not in n}
    assert {how for _, how in ops} == {"reference"}


def kernel_ops(jaxpr):
    """Name and implementation of every te_flax op, those of inner jaxprs included."""
    for eqn in jaxpr.eqns:
        if "impl" in eqn.params and eqn.primitive.name.startswith("te_"):
            yield eqn.primitive.name, eqn.params["impl"]
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernel_ops(inner)


def test_recipe_argument_beats_the_context():
    x = data((4, 32))
    with te.autocast(te.DelayedScaling()):
        off = te.DenseGeneral(32, 16, recipe=te.HIGH_PRECISION, rngs=nnx.Rngs(0))
        mx = te.DenseGeneral(32, 16, recipe=te.MXFP8BlockScaling(), rngs=nnx.Rngs(0))
        off.eval()
        mx.eval()
        g = lambda m: lambda x: jax.grad(lambda x: jnp.sum(m(x)))(x)
        assert recipes_seen(g(off), x) == ()
        assert recipes_seen(g(mx), x) == ("te_quantize_mxfp8_rowcol[",)
        with te.autocast(enabled=False):
            assert recipes_seen(g(mx), x) == ()


def test_the_pytree_does_not_depend_on_the_recipe():
    shapes = []
    for recipe in (None, *RECIPES.values()):
        layer = te.DenseGeneral(4, 4, recipe=recipe, rngs=nnx.Rngs(0))
        state = nnx.state(layer)
        shapes.append(jax.tree.map(jnp.shape, nnx.to_pure_dict(state)))
    assert all(s == shapes[0] for s in shapes)


@pytest.mark.parametrize(("mesh", "rules"), list(itertools.product((0, 1), (0, 1))))
def test_logical_axes_never_need_a_mesh(mesh, rules):
    use = (
        jax.set_mesh(jax.make_mesh((8,), ("d",))) if mesh else contextlib.nullcontext()
    )
    named = (
        nnx.logical_axis_rules((("embed", "d"),)) if rules else contextlib.nullcontext()
    )
    with use, named:
        layer = te.DenseGeneral(
            8,
            8,
            kernel_axes=("embed", None),
            input_axes=("batch", "embed"),
            rngs=nnx.Rngs(0),
        )
        y = layer(jnp.ones((8, 8)))
        assert bool(jnp.isfinite(y).all())
        assert layer.kernel.get_metadata()["out_sharding"] == ("embed", None)
