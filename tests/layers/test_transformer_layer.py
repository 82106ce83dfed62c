"""TransformerLayer: its structure without a recipe, its training with one."""

import jax
import numpy as np
import pytest
from _attention import block, projections, step
from _dense import data
from _fused import RECIPES

B, T, F = 2, 6, 32


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_encoder_layer_trains_under_every_recipe(recipe):
    layer = block(hidden_dropout=0.0, attention_dropout=0.0)
    x = data((B, T, F))
    y, (dx,), grads = step(layer, (x,), data((B, T, F), 1), recipe)
    plain, (dplain,), _ = step(layer, (x,), data((B, T, F), 1), None)
    for a, b in ((y, plain), (dx, dplain)):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 0 < error < (0.5 if "nvfp4" in recipe else 0.1), error
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    for name, gemm in projections(layer).items():
        pushed = [int((h[...] > 0).sum()) for h in (gemm.fp8.x, gemm.fp8.dy)]
        assert pushed == [recipe == "delayed_scaling"] * 2, name
