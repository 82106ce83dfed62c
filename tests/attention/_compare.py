"""Results and gradients of one call against float64, within derived bounds."""

import ml_dtypes
import numpy as np
from _cases import SWAP

from te_flax.testing.numerics import close_to
from te_flax.testing.oracle_attention import attention, attention_bounds, summed


def compare(got, x, dtype, *, blocks=1, operands=None, fused=False):
    """Compares what ``_cases.gradients`` returns with the oracle's results of ``x``."""
    bounds = attention_bounds(x, dtype, blocks=blocks, operands=operands, fused=fused)
    want = attention(x)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].dtype == dtype
        found = np.transpose(np.asarray(got[name], np.float64), SWAP)
        close_to(found, getattr(want, name), getattr(bounds, name))
    if "lse" in got:
        assert got["lse"].dtype == np.float32
        none = np.isneginf(want.lse)
        assert (np.isneginf(got["lse"]) == none).all()
        finite = [np.where(none, 0, a) for a in (got["lse"], want.lse, bounds.lse)]
        close_to(*finite)
    if "bias" in got:
        shape = got["bias"].shape
        # Each term is rounded to the dtype of the bias, and so is the sum.
        many = want.ds.size // got["bias"].size
        bound = summed(bounds.ds, shape)
        bound += many * 2.0**-24 * summed(np.abs(want.ds), shape)
        if got["bias"].dtype.itemsize < 4:
            info = ml_dtypes.finfo(got["bias"].dtype)
            bound += 1.001 * float(info.eps) * summed(np.abs(want.ds), shape)
            half = float(info.smallest_subnormal) / 2
            each = half + half / (abs(x.scale) if fused else 1)
            bound += summed(np.full(want.ds.shape, each), shape)
        close_to(got["bias"], summed(want.ds, shape), bound)
    if "sink" in got:
        close_to(got["sink"], want.dsink, bounds.dsink)
