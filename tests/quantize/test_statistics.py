"""Statistics of quantized arrays against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import te_flax as te
from te_flax.quantize.statistics import statistics

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
THREE = 3 * 2.0**-24  # roundings: of the scale, of its inverse, of that one's
COPIES = [{"rowwise": True, "colwise": False}, {"rowwise": False, "colwise": True}]


def _values(shape=(48, 80), dtype=np.float32):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))
    return x.astype(dtype)


def _quantized(quantizer, x, amax=None, **copy) -> Any:
    known = amax is not None and isinstance(quantizer, te.TensorQuantizer)
    scale = quantizer.scale(amax) if known else None
    pair = quantizer(x, k_ndim=1, scale=scale, **copy)
    return pair.rowwise if copy["rowwise"] else pair.colwise


@pytest.mark.parametrize("copy", COPIES, ids=["row", "col"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("amax", [None, 8.0, 1e5])
def test_tensor_scaling(format, copy, amax):
    x = _values()
    given = None if amax is None else jnp.float32(amax)
    tensor = _quantized(te.TensorQuantizer(format=format), x, given, **copy)
    found = statistics(x, tensor)
    top = float(ml_dtypes.finfo(FORMATS[format]).max)
    scale = np.float32(top) / np.float32(np.abs(x).max() if amax is None else amax)
    scaled = np.abs(x * scale).astype(np.float64)
    step = 32 if format == "e4m3" else 8192
    assert float(found.amax) == np.abs(x).max()
    np.testing.assert_allclose(float(found.scale), scale, rtol=THREE)
    assert float(found.saturated) == np.float32(np.mean(scaled > top + step / 2))
    codes = np.clip(scaled, 0, top).astype(np.float32).astype(FORMATS[format])
    assert float(found.flushed) == np.float32(np.mean(codes == 0))
    assert (float(found.saturated) > 0) == (amax is not None)
    assert float(found.flushed) > 0 or format == "e5m2"


@pytest.mark.parametrize("copy", COPIES, ids=["row", "col"])
@pytest.mark.parametrize("quantizer", [te.MXFP8Quantizer(), te.MXFP6Quantizer()])
def test_mx(quantizer, copy):
    x = _values((48, 78))
    tensor = _quantized(quantizer, x, **copy)
    found = statistics(x, tensor)
    lost = (np.asarray(tensor.dequantize()) == 0) & (x != 0)
    assert float(found.saturated) == 0
    assert float(found.flushed) == np.float32(lost.mean())
    assert float(found.scale) == 2.0 ** (127 - int(np.max(np.asarray(tensor.scale))))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_other_dtypes(dtype):
    x = jnp.asarray([[1.0, 2.0, 4.0, 0.0]], dtype)
    tensor = _quantized(te.TensorQuantizer(), x, jnp.float32(1.75), **COPIES[0])
    found = [float(v) for v in statistics(x, tensor)]
    assert found == [4.0, 256.0, 0.5, 0.0, 0.0]


def test_nonfinite_elements_are_counted_and_nothing_else():
    x = np.float32([[np.nan, np.inf, -np.inf, 1.0, 3.0, 1e-30, 0.0, 1e-40]])
    tensor = _quantized(te.TensorQuantizer(), x, jnp.float32(1), **COPIES[0])
    found = [float(v) for v in statistics(x, tensor)]
    np.testing.assert_allclose(found, [3.0, 448.0, 1 / 8, 1 / 8, 3.0], rtol=THREE)
    block = _quantized(te.MXFP8Quantizer(), x, **COPIES[0])
    assert float(statistics(x, block).scale) == 0.0


def test_the_last_half_step_is_rounding():
    """464 rounds to 448 as to any other neighbour, half a step away; 465 does not."""
    x = np.float32([[448.0, 464.0, 465.0, 1.0]])
    tensor = _quantized(te.TensorQuantizer(), x, jnp.float32(448), **COPIES[0])
    assert float(statistics(x, tensor).saturated) == 0.25


def test_an_unquantized_array_has_amax_only():
    x = jnp.array([[2.0, jnp.inf]])
    tensor = _quantized(te.Identity(), x, **COPIES[0])
    found = statistics(x, tensor)
    assert (float(found.amax), float(found.nonfinite)) == (2.0, 1.0)
    assert all(np.isnan(float(value)) for value in found[1:4])


def test_an_empty_array():
    x = jnp.zeros((0, 4))
    tensor = _quantized(te.TensorQuantizer(), x, jnp.float32(1), **COPIES[0])
    found = [float(v) for v in statistics(x, tensor)]
    np.testing.assert_allclose(found, [0.0, 448.0, 0.0, 0.0, 0.0], rtol=THREE)


@pytest.mark.parametrize("quantizer", [te.TensorQuantizer(), te.MXFP8Quantizer()])
def test_shards_give_the_numbers_of_the_whole(quantizer):
    x = _values((64, 64))
    x[3, 3] = np.nan
    amax = jnp.float32(100)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x):
        return statistics(x, _quantized(quantizer, x, amax, **COPIES[0]), ("d",))

    spec = jax.P("d")
    parts = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False
    )(x)
    whole = statistics(x, _quantized(quantizer, x, amax, **COPIES[0]))
    for name, a, b in zip(whole._fields, parts, whole, strict=True):
        assert float(a) == float(b), name


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind):
    axis = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis,))
    x = _values((64, 64))
    want = statistics(x, _quantized(te.TensorQuantizer(), x, **COPIES[1]))
    with jax.set_mesh(mesh):
        y = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
        run = jax.jit(
            lambda y: statistics(y, _quantized(te.TensorQuantizer(), y, **COPIES[1]))
        )
        got = run(y)
    assert [float(v) for v in got] == [float(v) for v in want]
