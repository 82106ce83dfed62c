"""out_sharding that fits neither the results nor the mesh."""

import re

import jax
import jax.numpy as jnp
import pytest
from _meshes import A, E, P, mesh, placed

from te_flax.ops.gemm import gemm
from te_flax.ops.quantize import QUANTIZE_ROWCOL

X = jnp.ones((8, 16))
ATTRS = {"row_format": "e4m3", "col_format": "e4m3", "k_ndim": 1}


def quantize(x, want):
    return QUANTIZE_ROWCOL(x, jnp.float32(1), out_sharding=want, **ATTRS)


@pytest.mark.parametrize("kinds", [(A, A), (E, E), (E, A)], ids=str)
@pytest.mark.parametrize(
    ("want", "text"),
    [
        (P("pd"), "name axes of the mesh (dp, tp), got 'pd' in "),
        ((None, P(("dp", "x"))), "name axes of the mesh (dp, tp), got 'x' in "),
        (P("dp", None, None), "have at most 2 dims for row [M.. K..], got "),
        ((P(), P(), P(), P()), "have at most 3 specs, one per result, got "),
    ],
    ids=str,
)
def test_refused(kinds, want, text):
    on = mesh(*kinds)
    say = re.escape(f"quantize_rowcol: out_sharding must {text}")
    with jax.set_mesh(on), pytest.raises(ValueError, match=say):
        jax.jit(lambda x: quantize(x, want))(*placed(on, (P(),), (X,)))


def test_the_mesh_of_the_operands_counts():
    x = placed(mesh(E, E), (P(),), (X,))[0]
    with pytest.raises(ValueError, match="axes of the mesh \\(dp, tp\\), got 'pd'"):
        jax.jit(lambda x: quantize(x, P("pd")))(x)


def test_no_spec():
    with pytest.raises(TypeError, match="be PartitionSpecs or None, got 'dp' of str"):
        quantize(X, "dp")


def test_dropped():
    """Manual axes, Auto ones of a mixed mesh, and all of them without a mesh."""
    assert quantize(X, P("dp"))[0].shape == (8, 16)
    mixed = mesh(E, A)
    with jax.set_mesh(mixed):
        x = placed(mixed, (P("dp"),), (X,))[0]
        row, *_ = jax.jit(lambda x: quantize(x, P("dp", "tp")))(x)
    assert row.shape == (8, 16)
    on = mesh(A, A)
    inside = jax.shard_map(
        lambda x: quantize(x, P("dp", "tp"))[0], mesh=on, in_specs=P("dp"),
        out_specs=P("dp"), axis_names={"dp"},
    )  # fmt: skip
    with jax.set_mesh(on):
        assert jax.jit(inside)(X).shape == (8, 16)


@pytest.mark.parametrize("value", [[1.0, 2.0], None, "text"], ids=str)
def test_gemm_names_what_is_no_array(value):
    say = f"gemm: lhs must be an array, got .* of {type(value).__name__}; convert"
    with pytest.raises(TypeError, match=say):
        gemm(value, X)  # pyright: ignore[reportArgumentType]
