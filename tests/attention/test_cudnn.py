"""The cuDNN implementation around an emulation of XLA's custom calls."""

import jax.numpy as jnp
import pytest
from _cudnn import Sizes, cases, check, emulated, on_gpu

__all__ = ["emulated", "on_gpu"]
pytestmark = pytest.mark.usefixtures("emulated")
BF16 = jnp.dtype(jnp.bfloat16)
SQUARE = Sizes()
SOME = sorted(set(cases(SQUARE, BF16)) - {"scale", "causal", "lengths", "bias_whole"})
WIDE = Sizes(t=24, s=8, k=1, h=192, v=128)


@pytest.mark.parametrize("name", SOME)
def test_against_float64(name):
    check(SQUARE, name, BF16)


@pytest.mark.parametrize("name", ["window", "bias_lengths"])
def test_other_head_dim_of_v(name):
    check(WIDE, name, jnp.dtype(jnp.float16))
