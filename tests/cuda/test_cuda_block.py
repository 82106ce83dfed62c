"""CUDA float32 block scaling equals the numpy oracle bit for bit."""

import numpy as np
import pytest
from _gpu import (
    BF16,
    CODES,
    F32,
    FLAGS,
    FORMATS,
    GPU,
    INPUTS,
    agree,
    each_dtype,
    finite,
    formats_of,
    is_finite,
    native,
    shuffled,
)

from te_flax.ops import block as ops
from te_flax.ops.dequantize import DEQUANTIZE_BLOCK, DEQUANTIZE_BLOCK2D
from te_flax.testing import oracle, oracle_block
from te_flax.testing.patterns import amax_edges, patterns, special_blocks

pytestmark = GPU
FAMILIES = ("BLOCK", "BLOCK2D")
COPIES = ("ROW", "COL", "ROWCOL")
each_family = pytest.mark.parametrize("family", FAMILIES)
each_copies = pytest.mark.parametrize("copies", COPIES)
each_scale = pytest.mark.parametrize(
    "power_of_2", [True, False], ids=["power_of_2", "float32"]
)
SHAPES = [
    *[((128, 256), 1), ((130, 200), 1), ((33, 103), 1), ((257, 16), 1), ((16, 257), 1)],
    *[((1, 1000), 1), ((1000, 1), 1), ((3, 5, 7), 2), ((2, 140, 3, 88), 2)],
    *[((19,), 1), ((19,), 0), ((), 0), ((0, 5), 1), ((5, 0), 1), ((2, 0, 3), 2)],
]


def attrs_of(op, row="e4m3", col="e5m2", **attrs):
    formats = formats_of(op, row_format=row, col_format=col, format=row)
    return formats | {"k_ndim": 1, "power_of_2": True, "epsilon": 0.0} | attrs


def expected(x, op, **attrs):
    """The oracle's results, those that the variant returns."""
    if "format" not in attrs:
        return oracle_block.quantize_block(x, **attrs)
    named = dict(
        zip(
            ("row", "col", "scale_inv", "amax"),
            oracle_block.quantize_block2d(x, **attrs),
            strict=True,
        )
    )
    return tuple(named[out.name] for out in op.dims.outs)


def check(family, x, copies="ROWCOL", **attrs):
    op = getattr(ops, f"QUANTIZE_{family}_{copies}")
    attrs = attrs_of(op, **attrs)
    agree(native(op, x, **attrs), expected(x, op, **attrs))


@each_family
@each_dtype
@each_scale
@pytest.mark.parametrize(("row", "col"), [FORMATS, FORMATS[::-1]], ids=str)
def test_every_pattern_in_blocks_of_like_and_mixed_magnitudes(
    family, dtype, power_of_2, row, col
):
    sparse = shuffled(dtype)
    sparse = np.where(is_finite(sparse), sparse, np.zeros_like(sparse))
    for x in (patterns(dtype), shuffled(dtype), finite(dtype), sparse):
        x = x[: x.size // 250 * 250].reshape(-1, 250)
        check(family, x, row=row, col=col, power_of_2=power_of_2)


@each_family
@each_copies
@each_dtype
@each_scale
def test_special_blocks(family, copies, dtype, power_of_2):
    blocks = special_blocks(dtype)
    x = np.zeros((len(blocks), 150), dtype)
    x[:, 7:39], x[:, 118:] = blocks, blocks[::-1]
    check(family, x, copies, power_of_2=power_of_2)
    check(family, np.ascontiguousarray(x.T), copies, power_of_2=power_of_2)


@each_scale
@pytest.mark.parametrize("format", FORMATS)
def test_scales_around_every_power_of_two(format, power_of_2):
    a = amax_edges(format)
    x = np.zeros((a.size, 128), np.float32)
    x[:, 3], x[:, 30], x[:, 31] = -a, a / 2, a / 300
    formats = {"row": format, "col": format, "power_of_2": power_of_2}
    check("BLOCK", x, **formats)
    check("BLOCK", np.ascontiguousarray(x.T), **formats)
    one_each = np.zeros((128, 128 * a.size), np.float32)
    one_each[np.arange(a.size) % 128, 128 * np.arange(a.size) + 17] = a
    check("BLOCK2D", one_each, **formats)


@each_family
@each_scale
@pytest.mark.parametrize("epsilon", [2.0**-20, 1e-40, 3.0])
def test_epsilon_is_the_smallest_amax_that_counts(family, power_of_2, epsilon):
    x = np.random.default_rng(3).standard_normal((300, 300))
    x = (x * 2.0 ** np.linspace(-40, 8, 300)).astype(np.float32)
    check(family, x, power_of_2=power_of_2, epsilon=epsilon)


@each_family
@each_copies
@each_dtype
def test_ragged_and_empty_shapes(family, copies, dtype):
    for i, (shape, k_ndim) in enumerate(SHAPES):
        x = np.resize(finite(dtype), shape)
        check(family, x, copies, k_ndim=k_ndim, power_of_2=i % 2 == 0)


@each_family
@each_copies
@each_dtype
def test_many_tiles(family, copies, dtype):
    x = np.random.default_rng(1).standard_normal((528, 1000)) * 30
    check(family, x.astype(dtype), copies, power_of_2=False)


@each_family
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_tensor_of_subnormals_counts_as_zeros(family, dtype):
    tiny = finite(dtype)
    tiny = tiny[np.abs(tiny.astype(np.float64)) < 2.0**-126]
    op = getattr(ops, f"QUANTIZE_{family}_ROWCOL")
    *results, amax = native(op, np.resize(tiny, (130, 140)), **attrs_of(op))
    for result in results:
        if result.dtype == F32:
            assert np.all(result == 1)
        else:
            assert not np.any(result.view(np.uint8) & 0x7F)
    assert amax.tolist() == [0, 0]


@each_family
@each_copies
def test_noop_keeps_the_previous_results(family, copies):
    plain, noop = (
        getattr(ops, f"QUANTIZE_{family}_{copies}{suffix}") for suffix in ("", "_NOOP")
    )
    attrs = attrs_of(plain)
    rng = np.random.default_rng(2)
    old, x = ((n * rng.standard_normal((45, 200))).astype(BF16) for n in (1, 9))
    old_results = native(plain, old, **attrs)
    new_results = native(plain, x, **attrs)
    for flag in FLAGS:
        flag = np.array([flag], np.float32)
        got = native(noop, flag, x, *old_results, **attrs)
        agree(got, oracle.noop(flag, old_results, new_results))


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("out_dtype", [d.name for d in INPUTS])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_every_code_with_every_kind_of_scale(rows, format, out_dtype):
    op = DEQUANTIZE_BLOCK if rows == 1 else DEQUANTIZE_BLOCK2D
    powers = [2.0**n for n in range(-126, 127, 7)] + [0.0, 1e-39, 0.3, 5e37, -2.0]
    random = np.random.default_rng(9).integers(0, 1 << 32, 99, np.uint32)
    scales = np.concatenate([np.array(powers, np.float32), random.view(np.float32)])
    data = np.tile(np.arange(256, dtype=np.uint8), (rows * len(scales), 1))
    data, grid = data.view(CODES[format]), np.repeat(scales[:, None], 2, 1)
    attrs = {"k_ndim": 1, "out_dtype": out_dtype}
    want = oracle_block.dequantize_block(data, grid, rows=rows, **attrs)
    agree(native(op, data, grid, **attrs), want)


@pytest.mark.parametrize("rows", [1, 128])
def test_dequantize_ragged_shapes(rows):
    op = DEQUANTIZE_BLOCK if rows == 1 else DEQUANTIZE_BLOCK2D
    rng = np.random.default_rng(4)
    for shape, k_ndim in SHAPES:
        split = len(shape) - k_ndim
        m, k = (int(np.prod(dims)) for dims in (shape[:split], shape[split:]))
        dims = shape[:split] if rows == 1 else (-(-m // 128),)
        grid = rng.standard_normal((*dims, -(-k // 128))).astype(np.float32)
        codes = rng.integers(0, 256, shape, np.uint8).view(CODES["e4m3"])
        attrs = {"k_ndim": k_ndim, "out_dtype": BF16.name}
        want = oracle_block.dequantize_block(codes, grid, rows=rows, **attrs)
        agree(native(op, codes, grid, **attrs), want)
