"""te.inspect: how each operand fits its format."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from tests._models import RECIPES, data, stacked

DELAYED = te.DelayedScaling(amax_history_len=4)


def _layer(**options):
    return te.DenseGeneral(64, 32, amax_history_len=4, **options, rngs=nnx.Rngs(0))


def _rows(net):
    return {(row.path, row.role): row for row in te.inspect(net).rows}


@pytest.mark.parametrize("name", RECIPES)
def test_the_kernel_is_compared_with_its_codes(name):
    layer = _layer()
    kernel = data(64, 32) * jnp.exp(4 * data(64, 32, seed=1))
    layer.kernel[...] = kernel.at[0, 0].set(jnp.nan)
    with te.autocast(RECIPES[name]):
        row = _rows(layer)["", "kernel"]
    assert row.amax == float(jnp.max(jnp.abs(kernel.at[0, 0].set(0))))
    quantizer: Any = RECIPES[name].quantizers().kernel
    scale = quantizer.scale(jnp.float32(0)) if name == "delayed_scaling" else None
    how = {"k_ndim": 1, "rowwise": False, "colwise": True, "scale": scale}
    codes = quantizer(layer.kernel[...], **how).colwise.dequantize()
    lost = float(jnp.sum((codes == 0) & (kernel != 0))) / kernel.size
    assert row.flushed == np.float32(lost)
    assert row.flushed > 0
    assert row.nonfinite == 1
    assert (row.saturated > 0) == (name == "delayed_scaling")  # its scale is still 1


def test_histories_give_amax_and_scale():
    layer, x = _layer(), data(8, 64)
    loss = lambda layer, x: (layer(x) ** 2).mean()
    with te.autocast(DELAYED):
        before = _rows(layer)
        te.value_and_grad(loss)(layer, x)
        te.value_and_grad(loss)(layer, x.at[0, 0].set(jnp.inf) / 2)
        rows = _rows(layer)
    assert math.isnan(before["", "x"].amax)
    assert before["", "x"].scale == 1
    amax = float(jnp.max(jnp.abs(x)))
    newest = float(jnp.max(jnp.abs(x.at[0, 0].set(0)))) / 2
    assert rows["", "x"].amax == newest
    np.testing.assert_allclose(rows["", "x"].scale, 448 / amax, rtol=3 * 2**-24)
    assert rows["", "dy"].amax == float(layer.fp8.dy[0])
    top = float(jnp.max(layer.fp8.dy[...]))
    np.testing.assert_allclose(rows["", "dy"].scale, 57344 / top, rtol=3 * 2**-24)
    assert rows["", "x"].bad_pushes == 1
    assert math.isnan(rows["", "x"].saturated)


def test_without_a_recipe_the_kernel_has_amax_only():
    layer = _layer()
    row = _rows(layer)["", "kernel"]
    assert row.amax == float(jnp.max(jnp.abs(layer.kernel[...])))
    assert row.nonfinite == 0
    assert math.isnan(row.scale)
    own = _rows(_layer(recipe=te.MXFP8BlockScaling()))["", "kernel"]
    assert own.scale > 0


def test_stacked_and_nested_layers():
    net = nnx.Dict(
        a=te.convert(stacked(2, nnx.Rngs(0)), DELAYED), b=nnx.List([_layer()])
    )
    rows = _rows(net)
    paths = ["a[0]", "a[1]", "b/0"]
    assert list(rows) == [(p, r) for p in paths for r in ("x", "kernel", "dy")]
    kernel = net["a"].kernel[1]
    assert rows["a[1]", "kernel"].amax == float(jnp.max(jnp.abs(kernel)))


def test_the_table():
    layer = _layer()
    found = te.inspect(layer)
    lines = str(found).splitlines()
    assert lines[0].split() == list(te.OperandRow._fields)
    assert len(lines) == 4
    assert repr(found) == str(found)
    shared = nnx.List([layer, layer])
    assert len(te.inspect(shared).rows) == 3


def test_a_model_without_fp8_layers():
    with pytest.raises(ValueError, match="inspect: model must hold a layer of te_flax"):
        te.inspect(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_a_recipe_that_looks_further_back_than_the_history():
    with te.autocast(te.DelayedScaling()), pytest.raises(ValueError, match="be <= 4"):
        te.inspect(_layer())
