"""Einsum: equal to flax.nnx's without a recipe, a dense layer with one."""

import jax.numpy as jnp
import numpy as np
import pytest
from _dense import RECIPES, data
from _fused import context
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to

# Equation, sizes of the kernel and of the bias, shape of x.
CASES = {
    "heads": ("btd,ndh->btnh", (4, 32, 8), (4, 8), (2, 6, 32)),
    "kv": ("btd,cndh->cbtnh", (2, 4, 32, 8), (2, 4, 8), (2, 6, 32)),
    "out": ("btnh,nhd->btd", (4, 8, 32), (32,), (2, 6, 4, 8)),
    "any": ("...d,df->...f", (32, 16), (16,), (2, 3, 5, 32)),
    "turned": ("d...,fd->f...", (16, 32), None, (32, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_nnx_and_is_converted(name):
    text, kernel, bias, shape = CASES[name]
    theirs = nnx.Einsum(text, kernel, bias, rngs=nnx.Rngs(0))
    if theirs.bias is not None:
        theirs.bias[...] = data(bias, 1)
    ours, x = te.convert(theirs), data(shape)
    assert type(ours) is te.Einsum
    assert ours.kernel is theirs.kernel
    want = theirs(x)
    assert ours(x).shape == want.shape
    close_to(ours(x), np.asarray(want), 2.0**-19 * float(jnp.abs(want).max()))
    back = te.revert(ours)
    assert type(back) is nnx.Einsum
    assert (back(x) == want).all()
    assert nnx.graphdef(back) == nnx.graphdef(theirs)


@pytest.mark.parametrize(
    ("name", "recipe"), list(zip(("heads", "kv", "out"), RECIPES, strict=True))
)
def test_it_is_a_dense_layer_of_the_transposed_kernel(name, recipe):
    text, kernel, bias, shape = CASES[name]
    layer = te.Einsum(text, kernel, bias, rngs=nnx.Rngs(0))
    dense = te.DenseGeneral(
        layer.in_features, layer.out_features, axis=layer.axis, rngs=nnx.Rngs(1)
    )
    dense.kernel[...] = jnp.transpose(layer.kernel[...], layer.kernel_order)
    x = data(shape)
    move = (2, 0, 1, 3, 4) if name == "kv" else None
    with context(recipe):
        for _ in range(2):
            got, want = layer(x), dense(x)
        np.testing.assert_array_equal(got, jnp.transpose(want, move) if move else want)
        with te.cache_quantized(layer):
            np.testing.assert_array_equal(layer(x).shape, got.shape)
        rows = te.inspect(layer).rows, te.inspect(dense).rows
        assert rows[0][1].amax == rows[1][1].amax
    np.testing.assert_array_equal(layer.fp8.kernel[:2], dense.fp8.kernel[:2])


@pytest.mark.parametrize(
    "text", ["bd,bdh->bh", "bd,dh", "bd->b", "bd,dh->b", "bdd,dh->bh", "bd,...h->bh", 3]
)
def test_equations_that_are_no_product_of_matrices(text):
    rule = "^Einsum: einsum_str must sum over all letters that x and the kernel share"
    with pytest.raises(ValueError, match=rule):
        te.Einsum(text, (4, 8, 2), rngs=nnx.Rngs(0))


def make(*args, **kwargs):
    return te.Einsum("bd,dh->bh", *args, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: make((4,)), "kernel_shape must have a size for each of 'dh', got"),
        (lambda: make((4, 8), (4,)), r"bias_shape must be \(8,\), the sizes of 'h'"),
        (lambda: make((4, 8), axis=0), "axis must be an argument of this layer"),
        (lambda: make((4, 8))(jnp.ones((2, 3, 4))), "x must have the dims 'bd', got"),
        (
            lambda: make((4, 8))(jnp.ones((2, 3))),
            r"x must have the sizes \(4,\) of 'd'",
        ),
        (lambda: make((4, 8))(jnp.ones((2, 4), int)), "x must be a float32, bfloat16"),
        (lambda: make((4, 8), kernel_axes=("a",)), "kernel_axes must name each of the"),
    ],
)
def test_errors(call, text):
    with pytest.raises((ValueError, TypeError), match=f"^Einsum: {text}"):
        call()


def test_what_stays():
    batched = nnx.Einsum("bd,bdh->bh", (2, 4, 8), rngs=nnx.Rngs(0))
    other = nnx.Einsum("bd,dh->bh", (4, 8), einsum_op=jnp.multiply, rngs=nnx.Rngs(0))
    model = nnx.List([batched, other, nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
    kinds = [type(layer) for layer in te.convert(model)]
    assert kinds == [nnx.Einsum, nnx.Einsum, te.DenseGeneral]
