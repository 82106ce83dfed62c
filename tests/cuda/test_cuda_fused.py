"""CUDA: given h, all else is the plain quantizers', whatever else is asked for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu import BF16, F32, FLAGS, GPU, each_dtype, native
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
from te_flax.testing.numerics import close_to, sum_bound
from te_flax.testing.patterns import every_pattern, same_bits

pytestmark = GPU
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "mxfp8"])


def wanted(scaling, h, whole):
    """What the quantizers make of h, by the oracle or the references on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return expected(scaling, h, whole)


def check(family, scaling, own, attrs, found):
    """Codes, scales and amax of h to the bit, dbias within the bound of a sum."""
    found, whole = dict(found), attrs["k_ndim"] + bool(family.dim)
    h = h_of(found, own).astype(attrs["out_dtype"])
    dbias = found.pop("dbias", None)
    if dbias is not None:
        tokens = tuple(range(h.ndim - whole))
        wide = h.astype(np.float64)
        size, count = np.abs(wide).sum(tokens), math.prod(h.shape[: len(tokens)])
        close_to(dbias, wide.sum(tokens), sum_bound(count, size))
    same_results(found, wanted(scaling, h, whole) | {"h": h})


@each_family
@each_scaling
@each_dtype
def test_results_are_those_of_the_quantizers(family, scaling, dtype):
    for m, k, activation in SHAPES:
        own = draw(family, m, k, dtype, activation)
        attrs = attributes(family, k, dtype, activation)
        found = results(native, family, full(family, scaling), own, attrs)
        check(family, scaling, own, attrs, found)


@each_scaling
@pytest.mark.parametrize(
    ("m", "k", "activation"),
    [
        (777, 2112, "gelu"),
        (300, 1100, "silu,linear"),  # MXFP8 blocks straddle the slices
        (130, 2080, "silu,linear"),
        (1000, 264, "quick_gelu,linear"),
        (256, 384, "relu,linear"),
    ],
)
@each_dtype
def test_many_tiles(scaling, m, k, activation, dtype):
    for family in (ACT_FWD, ACT_BWD, QUANTIZE_DBIAS):
        own = draw(family, (m,), (k,), dtype, activation)
        attrs = attributes(family, (k,), dtype, activation)
        found = results(native, family, full(family, scaling), own, attrs)
        check(family, scaling, own, attrs, found)


@each_family
@each_scaling
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
@pytest.mark.parametrize("k", [(2, 37), (160,)], ids=str)
def test_leaving_results_away_changes_nothing(family, scaling, activation, k):
    own = draw(family, (3, 47), k, BF16, activation)
    attrs = attributes(family, k, BF16, activation)
    want = results(native, family, full(family, scaling), own, attrs)
    for v in of_codes(family):
        if v.scaling in (scaling, "none") and not v.noop:
            same_results(results(native, family, v, own, attrs), want)


@each_family
@each_scaling
def test_noop_keeps_every_previous_result(family, scaling):
    k = (70,)
    attrs = attributes(family, k, F32)
    old, new = (draw(family, (2, 40), k, F32, seed=seed) for seed in (1, 2))
    plain = full(family, scaling)
    before, after = (results(native, family, plain, x, attrs) for x in (old, new))
    for v in of_codes(family):
        if v.scaling not in (scaling, "none") or not v.noop:
            continue
        for flag in FLAGS:
            found = results(native, family, v, new, attrs, before, noop=flag)
            kept = not abs(flag) < 2.0**-126
            same_results(found, before if kept else after)


@each_scaling
@pytest.mark.parametrize("activation", ["gelu", "silu,linear"])
def test_operands_of_other_dtypes(scaling, activation):
    """Widened where they are loaded: as if they were float32."""
    for dy, x, out in (("f2", BF16, F32), (F32, BF16, BF16), (BF16, "f4", "f2")):
        own = draw(ACT_BWD, (60,), (168,), F32, activation)
        own = [own[0].astype(dy), own[1].astype(x)]
        for family, operands in ((ACT_BWD, own), (ACT_FWD, own[1:])):
            attrs = attributes(family, (168,), out, activation)
            v = full(family, scaling)
            found = results(native, family, v, operands, attrs)
            check(family, scaling, operands, attrs, found)
            wide = [a.astype(F32) for a in operands]
            same_results(results(native, family, v, wide, attrs), found)


@each_scaling
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [BF16, np.dtype("f2")], ids=str)
def test_every_pattern_is_rounded_once(scaling, dtype, out):
    x = every_pattern(dtype).reshape(256, 256)
    v = full(QUANTIZE_DBIAS, scaling)
    found = results(
        native, QUANTIZE_DBIAS, v, [x], attributes(QUANTIZE_DBIAS, (256,), out)
    )
    linear = attributes(ACT_FWD, (256,), out, "linear")
    h = results(native, ACT_FWD, Variant(), [x[:, None]], linear)["h"]
    wide = x.astype(np.float32)
    wide = np.where(np.abs(wide) < 2.0**-126, np.copysign(0, wide), wide)
    with np.errstate(over="ignore", invalid="ignore"):
        want = wide.astype(np.float32).astype(out)
    nan = np.isnan(wide)
    same_bits(np.where(nan, 0, h).astype(out), np.where(nan, 0, want).astype(out))
    assert np.all(np.isnan(h.astype(np.float32)) == nan)
    del found["dbias"]
    same_results(found, wanted(scaling, want, 1))


@each_scaling
def test_sums_are_the_same_whatever_makes_them(scaling):
    """From run to run, under every scaling, and in the unfused op."""
    own = draw(ACT_BWD, (1111,), (360,), BF16, "gelu")
    attrs = attributes(ACT_BWD, (360,), BF16, "gelu")
    v = full(ACT_BWD, scaling)
    first = results(native, ACT_BWD, v, own, attrs)
    for _ in range(3):
        same_bits(results(native, ACT_BWD, v, own, attrs)["dbias"], first["dbias"])
    none = results(native, ACT_BWD, Variant(dbias=True), own, attrs)
    same_bits(none["dbias"], first["dbias"])
    h = first["h"].reshape(1111, 360)
    plain = attributes(QUANTIZE_DBIAS, (360,), BF16)
    alone = results(native, QUANTIZE_DBIAS, full(QUANTIZE_DBIAS, scaling), [h], plain)
    same_bits(alone["dbias"].reshape(1, 360), first["dbias"])


def test_sums_of_subnormals_and_of_nan():
    x = np.full((300, 16), 1e-39, F32)
    x[7, 3], x[9, 4], x[:, 5] = np.nan, np.inf, -1.0
    found = results(
        native, QUANTIZE_DBIAS, Variant("tensor", ("row",), False, True), [x],
        attributes(QUANTIZE_DBIAS, (16,), F32),
    )  # fmt: skip
    assert np.isnan(found["dbias"][3])
    assert found["dbias"][[4, 5]].tolist() == [np.inf, -300]
    assert not found["dbias"][[0, 1, 2, 6]].any()
    assert found["amax"].tolist() == [1, 1]


def test_more_than_2_31_elements():
    """The last rows and columns are those of the same op on them alone."""
    m, k = 32776, 65544
    attrs = attributes(ACT_FWD, (k,), BF16, "silu") | {
        "row_format": "e4m3",
        "col_format": "e4m3",
    }
    op = ACT_FWD.ops[Variant("tensor", ("row", "col"), True)]
    x = jax.random.normal(jax.random.key(0), (m, 1, k), jnp.bfloat16)
    with kernels("*=native"):
        h, row, col, _ = jax.jit(lambda x: op(x, jnp.float32(9), **attrs))(x)
        part = x[-40:, :, -100:]
        small = op(part, jnp.float32(9), **attrs)
    for whole, cut in zip(
        (h[-40:, -100:], row[-40:, -100:], col[-100:, -40:]), small[:3], strict=True
    ):
        same_bits(whole, np.asarray(cut))


def test_noop_writes_into_the_donated_buffers():
    v = Variant("mxfp8", ("row", "col"), h=True, dbias=True, noop=True)
    dy, x = draw(ACT_BWD, (64,), (96,), BF16)
    attrs = attributes(ACT_BWD, (96,), BF16)
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
