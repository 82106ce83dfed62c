"""MXFP8 copies of values are the dequantized copies of codes, bit for bit."""

import re

import jax
import numpy as np
import pytest
from _quantizers import BF16, FORMATS, INPUTS, REFERENCE

import te_flax as te
from te_flax.ops._choice import kernels
from te_flax.ops._fused import Variant
from te_flax.ops.activation import ACT_FWD, QUANTIZE_DBIAS
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.ops.mxfp8_values import QUANTIZE_MXFP8_VALUES
from te_flax.ops.products import mxfp8_products, products
from te_flax.testing import oracle
from te_flax.testing.patterns import patterns, same_bits, special_blocks

each = pytest.mark.parametrize(
    ("copies", "values"), QUANTIZE_MXFP8_VALUES, ids=lambda words: "".join(words)
)
AXIS = {"row": 1, "col": 0}


def expected(x, copies, values, formats, k_ndim=1):
    """The oracle's codes, dequantized by the oracle where values are wanted."""
    attrs = {"k_ndim": k_ndim, **{f"{c}_format": formats[c] for c in copies}}
    results = list(oracle.quantize_mxfp8(x, **attrs))
    for copy in values:
        at = 2 * copies.index(copy)
        (results[at],) = oracle.dequantize_mxfp8(
            *results[at : at + 2],
            k_ndim=k_ndim,
            out_dtype="bfloat16",
            axis=AXIS[copy],
        )
    return results


def check(x, copies, values, formats, k_ndim=1):
    attrs = {"k_ndim": k_ndim, **{f"{c}_format": formats[c] for c in copies}}
    got = REFERENCE(QUANTIZE_MXFP8_VALUES[copies, values], x, **attrs)
    wanted = expected(x, copies, values, formats, k_ndim)
    for result, want in zip(got, wanted, strict=True):
        same_bits(result, want)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_every_pattern_matches_the_oracle(dtype):
    x = np.random.default_rng(0).permutation(patterns(dtype))
    finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    formats = dict(zip(AXIS, FORMATS, strict=True))
    both = ("row", "col")
    for v in (x, finite, np.resize(special_blocks(dtype), x.size)):
        check(np.resize(v, (v.size // 64, 64)), both, both, formats)


@each
def test_ragged_shapes(copies, values):
    formats = dict(zip(AXIS, FORMATS[::-1], strict=True))
    rng = np.random.default_rng(1)
    for shape, k_ndim in (((33, 103), 1), ((3, 5, 7), 2), ((1, 40), 1), ((0, 5), 1)):
        x = rng.standard_normal(shape).astype(BF16)
        check(x, copies, values, formats, k_ndim)


def test_the_ends_of_the_range():
    """Below 2^-126 zeros with a sign, 2^128 infinite, NaN and Inf as dequantized."""
    largest = np.float32(3.4e38)
    x = np.zeros((5, 32), np.float32)
    x[0, :3] = [2.0**-120, -(2.0**-126), 1.5 * 2.0**-126]
    x[1, :2] = [largest, -largest / 2]
    x[2, :2] = [np.inf, 1]
    x[3, 0] = np.nan
    x[4, :2] = [448, -1.03125]
    attrs = {"row_format": "e4m3", "k_ndim": 1}
    op = QUANTIZE_MXFP8_VALUES[("row",), ("row",)]
    row = REFERENCE(op, x, **attrs)[0].astype(np.float32)
    assert row[0, :3].tolist() == [2.0**-120, -(2.0**-126), 1.5 * 2.0**-126]
    assert row[1, :2].tolist() == [np.inf, -(2.0**127)]
    assert np.isposinf(row[2, 0])
    assert row[2, 1] == 0
    assert np.isnan(row[3]).all()
    assert row[4, :2].tolist() == [448, -1]
    tiny = np.full((1, 32), -(2.0**-127), np.float32)
    same_bits(REFERENCE(op, tiny, **attrs)[0], np.full((1, 32), -0.0, BF16))


def test_vmap_gives_each_example_its_own_blocks():
    x = patterns(BF16)[: 3 * 20 * 50].reshape(3, 20, 50)
    copies = ("row", "col")
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e4m3"}
    op = QUANTIZE_MXFP8_VALUES[copies, copies]
    mapped = jax.vmap(lambda x: op(x, **attrs))(x)
    for i in range(3):
        for got, want in zip(mapped, op(x[i], **attrs), strict=True):
            same_bits(got[i], np.asarray(want))


@pytest.mark.parametrize("family", [ACT_FWD, QUANTIZE_DBIAS], ids=lambda f: f.name)
def test_fused_variants_return_the_values_of_their_codes(family):
    forward = family is ACT_FWD
    copies = ("row", "col")
    values = ("row",) if forward else copies
    dbias = not forward
    shape = (40, 1, 72) if forward else (40, 72)
    x = np.random.default_rng(2).standard_normal(shape).astype(BF16)
    attrs = {"k_ndim": 1, "out_dtype": "bfloat16", "format": "e4m3"}
    if forward:
        attrs |= {"activation": "gelu", "limit": 7.0, "alpha": 1.702, "offset": 1.0}
    v = Variant("mxfp8", copies, forward, dbias)
    with kernels("*=reference"):
        codes = family(v, x, **attrs)
        got = family(v._replace(values=values), x, **attrs)
    h = np.asarray(codes.h if forward else x)
    wanted = expected(h, copies, values, {"row": "e4m3", "col": "e4m3"})
    for name, want in zip(
        ("row", "row_scale", "col", "col_scale"), wanted, strict=False
    ):
        same_bits(getattr(got, name), want)
    for name in ("h", "dbias", "amax"):
        if getattr(codes, name) is not None:
            same_bits(getattr(got, name), np.asarray(getattr(codes, name)))


def test_the_quantizer_returns_values_as_an_unscaled_operand():
    x = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)
    how = {"k_ndim": 1, "rowwise": True, "colwise": True}
    row, col, amax = te.MXFP8Quantizer(values=("row",))(x, **how)
    codes, col_codes, want = te.MXFP8Quantizer()(x, **how)
    assert (row.scaling, row.scale, row.format) == ("none", None, "e4m3")
    assert row.holds_values
    assert not col.holds_values
    same_bits(row.data, np.asarray(codes.dequantize("bfloat16")))
    same_bits(col.data, np.asarray(col_codes.data))
    same_bits(amax, np.asarray(want))
    say = "MXFP8Quantizer: values must be a tuple of 'row' and 'col', in that order"
    with pytest.raises(ValueError, match=re.escape(say)):
        te.MXFP8Quantizer(values=("col", "row"))


def test_the_choice_of_products_is_part_of_the_jit_cache_key():
    found = []

    @jax.jit
    def trace(x):
        found.append(products("mxfp8"))
        return x

    trace(1.0)
    with mxfp8_products("values"):
        trace(1.0)
        assert products("tensor") == "codes"
    trace(1.0)
    assert found == ["codes", "values"]
    with pytest.raises(ValueError, match="how must be codes or values, got 'bytes'"):
        mxfp8_products("bytes").__enter__()


def test_scales_equal_those_of_the_codes():
    x = patterns(BF16).reshape(-1, 256)
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e4m3"}
    codes = REFERENCE(QUANTIZE_MXFP8_ROWCOL, x, **attrs)
    got = REFERENCE(QUANTIZE_MXFP8_VALUES[("row", "col"), ("col",)], x, **attrs)
    for at in (0, 1, 3, 4):
        same_bits(got[at], codes[at])
