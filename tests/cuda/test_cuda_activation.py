"""CUDA activations, forward and backward, against float64."""

import numpy as np
import pytest
import test_activation as on_cpu
from _activations import backward, close_to_limits, forward, values
from _gpu import BF16, F16, F32, GPU, native
from _variants import attributes, results

from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD, ACTIVATIONS
from te_flax.testing.patterns import same_bits

pytestmark = GPU
H = Variant()
DTYPES = (BF16, F16, F32)
each = pytest.mark.parametrize("activation", ACTIVATIONS)


@each
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_forward_is_within_the_bound(activation, out):
    for dtype in DTYPES:
        largest = 3e38 if "," not in activation else 1e15  # no square overflows
        x = values(activation, dtype, largest)
        attrs = attributes(ACT_FWD, (64,), out, activation)
        h = results(native, ACT_FWD, H, [x], attrs)["h"]
        close_to_limits(h, *forward(x, attrs))


@each
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_backward_is_within_the_bound(activation, out):
    rng = np.random.default_rng(1)
    for i, dtype in enumerate(DTYPES):
        x = values(activation, dtype, 1e15)
        if "," in activation:
            x = np.where(np.isinf(x.astype(np.float32)), dtype.type(1), x)
        attrs = attributes(ACT_BWD, (64,), out, activation)
        dy = rng.standard_normal((len(x), 64)).astype(DTYPES[(i + 1) % 3])
        dx = results(native, ACT_BWD, H, [dy, x], attrs)["h"]
        close_to_limits(dx, *backward(dy, x, attrs))


@pytest.mark.parametrize("activation", ["gelu", "gelu_exact,linear", "silu,linear"])
@pytest.mark.parametrize("scaling", ["none", "mxfp8"])
def test_an_element_depends_on_itself_only(activation, scaling):
    """Rows and columns cut anywhere, aligned or not, give the same bits."""
    rng = np.random.default_rng(2)
    slices = len(activation.split(","))
    x = (3 * rng.standard_normal((70, slices, 320))).astype(BF16)
    dy = rng.standard_normal((70, 320)).astype(BF16)
    attrs = attributes(ACT_FWD, (1,), BF16, activation)
    copies = () if scaling == "none" else ("row", "col")
    v = Variant(scaling, copies)
    h = results(native, ACT_FWD, v, [x], attrs)["h"]
    dx = results(native, ACT_BWD, v, [dy, x], attrs)["h"]
    same_bits(results(native, ACT_FWD, H, [x], attrs)["h"], h)
    same_bits(results(native, ACT_BWD, H, [dy, x], attrs)["h"], dx)
    for rows, cols in (
        (slice(13, 14), slice(0, 320)),
        (slice(3, 70), slice(7, 90)),
        (slice(0, 33), slice(32, 64)),
    ):
        part = [dy[rows, cols], x[rows][:, :, cols]]
        same_bits(results(native, ACT_FWD, v, part[1:], attrs)["h"], h[rows, cols])
        cut = results(native, ACT_BWD, v, part, attrs)["h"]
        same_bits(cut, dx[rows][:, :, cols])


def test_limits():
    """At an infinity the limit, -0 on the left; NaN stays NaN."""
    on_cpu.test_limits(native)
