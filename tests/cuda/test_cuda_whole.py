"""CUDA: whole rows and tiles of 16 bits have kernels of their own, with the same bits.

The same values as float32 take the general kernels.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
from _gpu import BF16, F16, F32, GPU, native
from _norms import KINDS, NOT_FINITE
from _norms import attributes as norm_attributes
from _norms import draw as draw_norm
from _variants import attributes, draw, expected, full, of_codes, results, same_results

from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.testing.patterns import every_pattern

pytestmark = GPU
each_kind = pytest.mark.parametrize("kind", KINDS)
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "mxfp8", "none"])
# Rows of one block to eight, the last of them full or not.
LENGTHS = (256, 1024, 1536, 2048, 2560, 4096, 5120, 7168, 8192)


@pytest.fixture(autouse=True)
def _references_on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def variant(family, scaling):
    """All results; without scaling h, amax and dbias where the family has it."""
    if scaling != "none":
        return full(family, scaling)
    plain = [v for v in of_codes(family) if v.scaling == "none" and not v.noop]
    return max(plain, key=lambda v: v.dbias)


def same_as_wide(family, v, own, attrs):
    """Asserts the bits of the general kernel, and returns the results."""
    found = results(native, family, v, own, attrs)
    wide = [a.astype(F32) for a in own]
    same_results(found, results(native, family, v, wide, attrs))
    return found


@each_kind
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_norms_forward(kind, k, dtype):
    family = NORM_FWD[kind]
    for m, zero_centered in ((32, False), (160, True)):
        own = draw_norm(family, (m,), (k,), (dtype, F32), seed=m)
        attrs = norm_attributes(family, (k,), dtype, zero_centered)
        v = full(family, "tensor")
        found = same_as_wide(family, v, own, attrs)
        rows = results(native, family, Variant(), own, attrs)
        same_results(rows, {name: found[name] for name in rows})
        codes = expected("tensor", found["h"], 1)
        codes.pop("dbias")  # norms have none
        same_results({name: found[name] for name in codes}, codes)


@each_kind
@pytest.mark.parametrize("k", [1024, 4096, 6400])
def test_norms_forward_of_rows_that_are_not_finite(kind, k):
    family, n = NORM_FWD[kind], len(NOT_FINITE)
    own = draw_norm(family, (64,), (k,), (BF16, F32))
    for i, special in enumerate(NOT_FINITE.values()):
        own[0][5 * i, k - 9 : k - 7] = np.array(special).astype(BF16)
    found = same_as_wide(
        family, full(family, "tensor"), own, norm_attributes(family, (k,), BF16)
    )
    (nan,) = np.nonzero(np.isnan(found["h"].astype(F32)).all(1))
    assert nan.tolist() == [5 * i for i in range(n)]
    assert found["amax"][1] == 1


@each_kind
def test_norms_forward_leaving_results_away(kind):
    family, k = NORM_FWD[kind], (2304,)
    own = draw_norm(family, (96,), k, (BF16, BF16))
    attrs = norm_attributes(family, k, BF16)
    want = results(native, family, full(family, "tensor"), own, attrs)
    for v in of_codes(family):
        if v.scaling == "tensor" and not v.noop:
            same_results(results(native, family, v, own, attrs), want)


@each_kind
@pytest.mark.parametrize("k", [8, 1000, *LENGTHS])
def test_norms_backward(kind, k):
    """More rows than groups, and groups with rows left over."""
    family = NORM_BWD[kind]
    for m, dtype in ((7, BF16), (1500, BF16), (2050, F16)):
        own = draw_norm(family, (m,), (k,), (dtype, dtype), seed=m)
        own[2] = own[2].astype(F32)  # gamma
        attrs = norm_attributes(family, (k,), dtype, m == 1500)
        same_as_wide(family, Variant(), own, attrs)
        own[0][3, 5] = np.nan
        own[1][m - 1, k - 1] = np.inf
        same_as_wide(family, Variant(), own, attrs)


@each_scaling
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
@pytest.mark.parametrize("shape", [(128, 256), (384, 128)], ids=str)
def test_activations(scaling, activation, shape):
    m, k = shape
    for family in (ACT_FWD, ACT_BWD):
        own = draw(family, (m,), (k,), BF16, activation)
        attrs = attributes(family, (k,), BF16, activation)
        same_as_wide(family, variant(family, scaling), own, attrs)


@each_scaling
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
def test_activations_of_every_pattern(scaling, activation):
    patterns = every_pattern(np.dtype(ml_dtypes.bfloat16))
    shuffled = np.random.default_rng(0).permutation(patterns)
    slices = len(activation.split(","))
    x = np.stack([patterns, shuffled][:slices]).reshape(slices, 256, 256)
    x = np.ascontiguousarray(x.transpose(1, 0, 2))
    dy = shuffled[::-1].reshape(256, 256)
    for family, own in ((ACT_FWD, [x]), (ACT_BWD, [dy, x])):
        attrs = attributes(family, (256,), BF16, activation)
        same_as_wide(family, variant(family, scaling), own, attrs)
