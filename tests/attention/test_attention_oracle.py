"""Results and gradients of every option against float64, within derived bounds."""

import jax.numpy as jnp
import numpy as np
import pytest
from _cases import CASES, DO, KEYS, SWAP, VALUES, N, Q, S, T, gradients, inputs
from _compare import compare

from te_flax.functional.attention import blocks
from te_flax.testing.numerics import close_to
from te_flax.testing.oracle_attention import attention

BLOCK = 5  # both sides end in a block with padding


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)


def check(case, implementation, dtype):
    arrays = [a.astype(dtype) for a in (Q, KEYS, VALUES)]
    do = DO.astype(dtype)
    got = gradients(case, implementation, arrays, do)
    x = inputs(case, arrays, do)
    narrow = implementation == "chunked" and dtype != jnp.float32
    dtype = np.dtype(dtype)
    compare(got, x, dtype, blocks=-(-S // BLOCK), operands=dtype if narrow else None)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_float32(case, implementation):
    check(CASES[case], implementation, jnp.float32)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize(("case", "dtype"), [("bias", "bfloat16"), ("sink", "float16")])
def test_narrow(case, implementation, dtype):
    check(CASES[case], implementation, jnp.dtype(dtype))


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("low", [-(2.0**20), -1e30])
def test_scores_that_swallow_the_logarithm_of_their_sum(low, implementation):
    """All are exact in float32, the log-sum-exp is not: the gradients must not use it.

    Beside -1e30 float64 has no room for q . k either: there all weights are equal.
    """
    whole = [jnp.round(a) for a in (Q, KEYS, VALUES)]
    case = {"bias": jnp.full((1, N, T, S), low), "scale": 1.0}
    case |= {"softmax_type": "learnable", "sink": jnp.full(N, low)}
    got, want = gradients(case, implementation, whole), attention(inputs(case, whole))
    np.testing.assert_array_equal(got["lse"], np.float32(want.lse))
    close_to(got["sink"], want.dsink, 2.0**-19 * np.abs(want.dsink).max())
    for name in ("o", "dq", "dk", "dv"):
        found, exact = np.transpose(got[name], SWAP), getattr(want, name)
        # At most 28 terms and a few roundings each.
        close_to(found, exact, 2.0**-19 * np.abs(exact).max())
