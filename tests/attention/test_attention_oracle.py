"""Results and gradients of every option against float64, within derived bounds."""

import jax.numpy as jnp
import numpy as np
import pytest
from _cases import CASES, DO, KEYS, SWAP, VALUES, Q, S, gradients, inputs

from te_flax.functional.attention import blocks
from te_flax.testing.numerics import close_to
from te_flax.testing.oracle_attention import attention, attention_bounds, summed

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
    unit = float(jnp.finfo(dtype).eps) / 2 if narrow else 0.0
    bounds = attention_bounds(
        x, np.dtype(dtype), blocks=-(-S // BLOCK), operand_unit=unit
    )
    want = attention(x)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        found = np.transpose(np.asarray(got[name], np.float64), SWAP)
        close_to(found, getattr(want, name), getattr(bounds, name))
    assert got["lse"].dtype == jnp.float32
    none = np.isneginf(want.lse)
    assert (np.isneginf(got["lse"]) == none).all()
    finite = [np.where(none, 0, a) for a in (got["lse"], want.lse, bounds.lse)]
    close_to(*finite)
    if "bias" in got:
        shape = got["bias"].shape
        many = want.ds.size // got["bias"].size
        bound = summed(bounds.ds, shape) + many * 2.0**-24 * summed(
            np.abs(want.ds), shape
        )
        close_to(got["bias"], summed(want.ds, shape), bound)
    if "sink" in got:
        close_to(got["sink"], want.dsink, bounds.dsink)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_float32(case, implementation):
    check(CASES[case], implementation, jnp.float32)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize(("case", "dtype"), [("bias", "bfloat16"), ("sink", "float16")])
def test_narrow(case, implementation, dtype):
    check(CASES[case], implementation, jnp.dtype(dtype))
