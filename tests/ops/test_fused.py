"""Fused variants: given h, every other result is the plain quantizers', to the bit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _quantizers import BF16, F16, F32, HANDLERS, INPUTS, NATIVE
from _variants import (
    FAMILIES,
    SHAPES,
    attributes,
    draw,
    expected,
    full,
    h_of,
    of_codes,
    results,
    same_results,
)

from te_flax.ops._choice import kernels
from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_BWD, ACT_FWD, QUANTIZE_DBIAS
from te_flax.testing.patterns import every_pattern, same_bits

pytestmark = pytest.mark.skipif(not NATIVE, reason="no handlers are built")
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "mxfp8"])


@each_family
@each_scaling
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_results_are_those_of_the_quantizers(family, scaling, dtype):
    """Every size, on every instruction set, one thread and three."""
    for i, (m, k, activation) in enumerate(SHAPES):
        own = draw(family, m, k, dtype, activation)
        attrs = attributes(family, k, dtype, activation)
        first, *others = (
            results(run, family, full(family, scaling), own, attrs) for run in HANDLERS
        )
        h = h_of(first, own)
        whole = len(k) + bool(family.dim)
        same_results({**first, "h": h}, expected(scaling, h, whole) | {"h": h})
        for found in others:
            same_results(found, first)
        assert i == 5 or i == 6 or np.any(h)


@each_family
@each_scaling
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
def test_leaving_results_away_changes_nothing(family, scaling, activation):
    """Every variant; h in scratch or in its result, and blocks across two slices."""
    m, k = (3, 47), (2, 37)
    own = draw(family, m, k, BF16, activation)
    attrs = attributes(family, k, BF16, activation)
    want = results(HANDLERS[0], family, full(family, scaling), own, attrs)
    for v in of_codes(family):
        if v.scaling in (scaling, "none") and not v.noop:
            for run in HANDLERS:
                same_results(results(run, family, v, own, attrs), want)


@each_family
@each_scaling
def test_noop_keeps_every_previous_result(family, scaling):
    m, k = (2, 40), (70,)
    attrs = attributes(family, k, F32)
    old, new = (draw(family, m, k, F32, seed=seed) for seed in (1, 2))
    plain = full(family, scaling)
    before, after = (results(HANDLERS[-1], family, plain, x, attrs) for x in (old, new))
    for v in of_codes(family):
        if v.scaling not in (scaling, "none") or not v.noop:
            continue
        for flag, kept in ((0.0, False), (1e-40, False), (1.0, True), (np.nan, True)):
            run = HANDLERS[int(kept)]
            found = results(run, family, v, new, attrs, before, noop=flag)
            same_results(found, before if kept else after)


@each_scaling
@pytest.mark.parametrize(
    ("m", "k", "activation"),
    [
        (777, 2112, "gelu"),
        (300, 1100, "silu,linear"),  # blocks straddle; more than one MXFP8 tile
        (130, 2080, "silu,linear"),
    ],
)
def test_many_tiles(scaling, m, k, activation):
    own = draw(ACT_BWD, (m,), (k,), BF16, activation)
    attrs = attributes(ACT_BWD, (k,), BF16, activation)
    v = full(ACT_BWD, scaling)
    found = results(HANDLERS[-1], ACT_BWD, v, own, attrs)
    same_results(found, expected(scaling, found["h"], 2) | {"h": found["h"]})
    for h in (False, True):
        less = results(HANDLERS[-2], ACT_BWD, v._replace(h=h), own, attrs)
        same_results(less, found)


@each_scaling
def test_the_sum_is_that_of_the_unfused_op(scaling):
    own = draw(ACT_BWD, (200,), (96,), BF16)
    attrs = attributes(ACT_BWD, (96,), BF16)
    fused = results(HANDLERS[-1], ACT_BWD, full(ACT_BWD, scaling), own, attrs)
    plain = attributes(QUANTIZE_DBIAS, (96,), BF16)
    h = fused["h"].reshape(200, 96)
    v = full(QUANTIZE_DBIAS, scaling)
    alone = results(HANDLERS[0], QUANTIZE_DBIAS, v, [h], plain)
    same_bits(alone["dbias"], fused["dbias"].reshape(96))
    size = np.abs(h.astype(np.float64)).sum(0)
    error = np.abs(alone["dbias"] - h.astype(np.float64).sum(0))
    assert np.all(error <= 200 * 2.0**-24 * size)


@each_scaling
@pytest.mark.parametrize("out", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_pattern_is_rounded_once(scaling, dtype, out):
    """h is x in another dtype: NaN, infinities and subnormals come through."""
    x = every_pattern(dtype).reshape(256, 256)
    attrs = attributes(QUANTIZE_DBIAS, (256,), out)
    v = full(QUANTIZE_DBIAS, scaling)
    linear = attributes(ACT_FWD, (256,), out, "linear")
    first = None
    for run in HANDLERS:
        found = results(run, QUANTIZE_DBIAS, v, [x], attrs)
        h = results(run, ACT_FWD, Variant(), [x[:, None]], linear)["h"]
        first = first or {**found, "h": h}
        same_results({**found, "h": h}, first)
    wide = x.astype(np.float32)
    wide = np.where(np.abs(wide) < 2.0**-126, np.copysign(0, wide), wide)
    with np.errstate(over="ignore"):
        want = np.where(np.isnan(wide), np.nan, wide).astype(np.float32).astype(out)
    same_bits(first["h"], want)
    same_results(
        {n: a for n, a in first.items() if n != "h"}, expected(scaling, want, 1)
    )


def test_noop_writes_into_the_donated_buffers():
    v = Variant("mxfp8", ("row", "col"), h=True, dbias=True, noop=True)
    (dy, x), attrs = draw(ACT_BWD, (64,), (96,), BF16), {"out_dtype": "bfloat16"}
    attrs |= attributes(ACT_BWD, (96,), BF16)
    attrs |= {"row_format": "e4m3", "col_format": "e4m3"}
    plain, noop = ACT_BWD.ops[v._replace(noop=False)], ACT_BWD.ops[v]
    with kernels("*=native"):
        old = plain(jnp.asarray(dy), jnp.asarray(x), **attrs)
        where = [r.unsafe_buffer_pointer() for r in old]
        donated = tuple(range(3, 3 + len(old)))
        step = jax.jit(lambda *a: noop(*a, **attrs), donate_argnums=donated)
        new = step(jnp.zeros(1), dy * 2, x, *old)
        assert [r.unsafe_buffer_pointer() for r in new] == where
        kept = step(jnp.ones(1), dy * 3, x, *new)
        assert [r.unsafe_buffer_pointer() for r in kept] == where
    want = results(
        HANDLERS[0], ACT_BWD, v._replace(noop=False), [dy * 2, x],
        attributes(ACT_BWD, (96,), BF16),
    )  # fmt: skip
    same_bits(kept[0], want["h"])
    same_bits(kept[5], want["dbias"])


@pytest.mark.parametrize("k_ndim", [0, 1, 2])
def test_the_workspace_holds_the_partial_sums(k_ndim):
    """128 rows of h make one; no dbias, no workspace."""
    x = jnp.zeros((3, 100, 2, 5, 7)[: 3 + k_ndim])
    dy = jnp.zeros((3, 100, 5, 7)[: 2 + k_ndim])
    attrs = attributes(ACT_BWD, (1,) * k_ndim, F32, "silu,linear")
    for v in full(ACT_BWD, "tensor"), Variant(dbias=True, noop=True):
        flag = [jnp.zeros(1)] * v.noop
        workspace = ACT_BWD.ops[v].workspace
        assert workspace is not None
        size = workspace(*flag, dy, x, jnp.float32(1), **attrs)
        assert size == 4 * 3 * math.prod(x.shape[2:])
    assert ACT_BWD.ops[Variant()].workspace is None
