"""The whole way on the CPU: XLA calls Python functions as kernels through TVM-FFI."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _fake import TARGET, Called, X, configure, text

import te_flax as te
from te_flax.backends import View, register_backend
from te_flax.ops import mxfp8
from te_flax.ops._fused import Variant
from te_flax.ops.activation import QUANTIZE_DBIAS
from te_flax.ops.amax import AMAX
from te_flax.testing import oracle
from te_flax.testing.patterns import same_bits

pytest.importorskip("jax_tvm_ffi", reason="needs the extra test")

ROW = mxfp8.QUANTIZE_MXFP8_ROW
ATTRS = {"row_format": "e4m3", "k_ndim": 1}
SHARDS = jax.sharding.AxisType


def amax(x, result):
    calls.append(x.shape)
    result[:] = [np.abs(x).max(), 0]


def quantize(x, codes, scale, found):
    calls.append(x.shape)
    results = oracle.quantize_mxfp8(x, row_format="e4m3", k_ndim=1, swizzled=False)
    for to, of in zip((codes, scale, found), results, strict=True):
        to[...] = of


def quantize_unless(flag, x, *arrays):
    previous, results = arrays[:3], arrays[3:]
    calls.append([p.ctypes.data == r.ctypes.data for p, r in zip(previous, results)])  # noqa: B905
    if flag[0] == 0:
        quantize(x, *results)


calls: list = []


@pytest.fixture(autouse=True)
def _none():
    calls.clear()
    yield
    jax.clear_caches()  # of eager calls, which would find their kernel once more


def add(function, op, **options):
    backend = Called(function, f"called_{len(_names)}", **options)
    _names.append(backend.name)
    register_backend(backend, (op.name,))
    return backend


_names: list = []  # FFI targets are for ever


def x_of(*shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    return jnp.asarray(x)


def check(found, x):
    expected = oracle.quantize_mxfp8(np.asarray(x), **ATTRS, swizzled=False)
    for a, b in zip(found, expected, strict=True):
        same_bits(np.asarray(a), b)


def test_jit_eager_and_preferred(monkeypatch):
    add(amax, AMAX)
    with te.kernels("amax=jit"):
        assert TARGET in text(AMAX, X)
        assert AMAX(X)[0].tolist() == [7, 0]
        assert jax.jit(lambda x: AMAX(x)[0])(-X).tolist() == [7, 0]
    configure(monkeypatch, jit="1")
    assert AMAX(X + 1)[0].tolist() == [8, 0]
    assert calls == [(8,), (8,), (8,)]


def test_codes_scales_and_small_types_pass():
    add(quantize, ROW)
    x = x_of(3, 96)
    with te.kernels("quantize_mxfp8_row=jit"):
        check(ROW(x, **ATTRS), x)
        same_bits(*(np.asarray(f(x)[0]) for f in (jax.jit(ROW_OF_64), ROW_OF_64)))


def ROW_OF_64(x):
    return ROW(x[:, :64], **ATTRS)


def test_previous_results_are_the_memory_of_the_results():
    op = mxfp8.QUANTIZE_MXFP8_ROW_NOOP
    add(quantize_unless, op)
    x, old = x_of(4, 64), ROW(x_of(4, 64)[::-1], **ATTRS)
    call = jax.jit(lambda flag, x, *previous: op(flag, x, *previous, **ATTRS))
    with te.kernels(f"{op.name}=jit"):
        check(call(jnp.zeros(1), x, *old), x)
        kept = call(jnp.ones(1), x, *old)
    for a, b in zip(kept, old, strict=True):
        same_bits(np.asarray(a), np.asarray(b))
    assert calls == [[True] * 3, (4, 64), [True] * 3]


def test_vmap_calls_the_kernel_for_each_entry_or_joins():
    add(quantize, ROW)
    x = x_of(3, 4, 64)
    with te.kernels("quantize_mxfp8_row=jit"):
        found = jax.jit(jax.vmap(lambda x: ROW(x, **ATTRS)))(x)
    for i in range(3):
        check([r[i] for r in found], x[i])
    assert len(calls) in (1, 3)


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_sharding_is_the_ops(kind):
    """Every device calls the kernel on its shard."""
    add(quantize, ROW)
    type_ = SHARDS.Explicit if kind == "Explicit" else SHARDS.Auto
    mesh = jax.make_mesh((8,), ("d",), (type_,))
    x = x_of(16, 64)
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
    call = lambda x: ROW(x, **ATTRS)[:2]
    if kind == "Manual":
        rows = jax.P("d")
        call = jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)
    with te.kernels("quantize_mxfp8_row=jit"), jax.set_mesh(mesh):
        found = jax.jit(call)(placed)
    expected = ROW(x, **ATTRS)
    for a, b in zip(found, expected, strict=False):
        same_bits(np.asarray(a), np.asarray(b))
    assert calls == [(2, 64)] * 8


def test_a_view_reshapes_and_adds_a_workspace():
    op = QUANTIZE_DBIAS.ops[Variant("mxfp8", ("row",), h=False, dbias=True)]
    attrs = {"row_format": "e4m3", "k_ndim": 2, "out_dtype": "bfloat16"}
    x = x_of(2, 3, 4, 32)
    seen = []

    def kernel(*arrays):
        seen.extend(a.shape for a in arrays)
        x, codes, scale, dbias, found, work = arrays
        work[:] = 1
        dbias[:] = x.astype(np.float32).sum(0)
        quantize(x, codes, scale, found)

    backend = add(kernel, op)
    rows = ((6, 128), (6, 4), (128,), (2,))
    backend.view = lambda call: View(((6, 128),), rows, 40)
    with te.kernels(f"{op.name}=jit"):
        codes, scale, dbias, _ = jax.jit(lambda x: op(x, **attrs))(x)
    assert seen == [(6, 128), *rows, (40,)]
    assert (codes.shape, scale.shape, dbias.shape) == (x.shape, (2, 3, 4), (4, 32))
    total = np.asarray(x, np.float32).sum((0, 1))
    np.testing.assert_allclose(dbias, total, rtol=1e-6, atol=1e-6)


def test_a_layer_with_one_switch_has_the_same_bits():
    layer = te.DenseGeneral(64, 32, rngs=_rngs())
    x = x_of(32, 64).astype(jnp.float32)
    op = mxfp8.QUANTIZE_MXFP8_ROW
    add(quantize, op)
    with te.autocast(te.MXFP8BlockScaling()):
        expected = layer(x)
        with te.kernels("quantize_mxfp8_row=jit"):
            found = layer(x)
    same_bits(np.asarray(found), np.asarray(expected))


def _rngs():
    from flax import nnx

    return nnx.Rngs(0)


def test_the_page_about_backends_can_be_followed(capsys):
    page = Path(__file__).parents[2] / "docs" / "backends.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    names = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert "largest 1.0 | 1 config: 1 compiled" in capsys.readouterr().out
