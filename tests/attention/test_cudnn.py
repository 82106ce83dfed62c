"""The cuDNN implementation around an emulation of XLA's custom calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cudnn import Sizes, arrays, cases, check, emulated, on_gpu

import te_flax as te
from te_flax.testing.numerics import close_to

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


LOW = {jnp.bfloat16: -1e30, jnp.float16: -6e4}


@pytest.mark.parametrize("dtype", LOW)
def test_a_bias_does_not_beat_a_mask(dtype):
    """Heads whose bias is very low, or -inf, on all that is seen."""
    q, k, v, do, _ = arrays(SQUARE, jnp.dtype(dtype))
    mask = jnp.arange(SQUARE.s) % 3 > 0

    def passes(implementation, low):
        a_head = jnp.asarray([0, 0.5, -jnp.inf, low], dtype)
        bias = jnp.broadcast_to(a_head[:, None, None], (4, 16, 16))

        def f(q, k, v, bias):
            return te.dot_product_attention(
                q, k, v, bias=bias, mask=mask, implementation=implementation
            )

        o, pull = jax.vjp(f, q, k, v, bias)
        return o, *pull(do)

    # Scores and log-sum-exp of 2^16 are rounded to 2^-8, results to 2^-8 of themselves.
    pairs = zip(passes("cudnn", LOW[dtype]), passes("reference", 0), strict=True)
    for got, want in pairs:
        want = np.asarray(want, np.float64)
        close_to(got, want, 2.0**-5 * np.abs(want).max())
