"""jax.export of ops: what can be serialized, and the refusal of what cannot."""

import contextlib
import importlib.util

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from _meshes import A, E, P, mesh, placed

from te_flax.ops._choice import kernels
from te_flax.ops._op import KernelOp
from te_flax.ops.quantize import QUANTIZE_ROW

X = jnp.arange(64.0, dtype=jnp.float32).reshape(8, 8)


def f(x):
    return QUANTIZE_ROW(x, jnp.float32(2.0), row_format="e4m3", k_ndim=1)


def exported(how, on=None, platforms=("cpu",)):
    skip = [
        jax.export.DisabledSafetyCheck.custom_call(f"te_flax.{op.handler}")
        for op in KernelOp.registry.values()
        if op.handler
    ]
    context = jax.set_mesh(on) if on else contextlib.nullcontext()
    with kernels(f"quantize_row={how}"), context:
        x = placed(on, (P("dp"),), (X,))[0] if on else X
        e = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=skip)(x)
        if importlib.util.find_spec("flatbuffers"):
            e = jax.export.deserialize(e.serialize())
        got = jax.jit(e.call)(x)
    for a, b in zip(got, f(X), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("how", ["auto", "reference"])
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")], ids="+".join)
def test_one_device(how, platforms):
    exported(how, platforms=platforms)


@pytest.mark.parametrize("how", ["auto", "reference"])
def test_explicit_mesh(how):
    exported(how, mesh(E, E))


def test_auto_mesh():
    exported("reference", mesh(A, A))
    with pytest.raises(NotImplementedError, match="export it under an Explicit mesh"):
        exported("auto", mesh(A, A))
