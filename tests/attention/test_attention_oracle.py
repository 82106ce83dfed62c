"""Results and gradients of every option against float64, within derived bounds."""

import jax.numpy as jnp
import numpy as np
import pytest
from _cases import CASES, DO, KEYS, VALUES, Q, S, gradients, inputs
from _compare import compare

from te_flax.functional.attention import blocks

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
