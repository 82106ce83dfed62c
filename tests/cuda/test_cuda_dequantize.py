"""CUDA dequantization equals the numpy oracle bit for bit."""

import numpy as np
import pytest
from _gpu import BF16, CODES, F32, FORMATS, GPU, INPUTS, agree, native

from te_flax.ops import dequantize as ops
from te_flax.testing import oracle
from te_flax.testing.patterns import patterns

pytestmark = GPU
each_output = pytest.mark.parametrize("out_dtype", [d.name for d in INPUTS])
each_format = pytest.mark.parametrize("format", FORMATS)
SHAPES = [
    ((128, 256), 1),
    ((130, 201), 1),
    ((3, 5, 7), 2),
    ((1, 1000), 1),
    ((70, 1), 1),
]


def codes(format, shape):
    every = np.random.default_rng(8).permutation(np.arange(256, dtype=np.uint8))
    return np.resize(every, shape).view(CODES[format])


@each_output
@each_format
def test_every_code_and_scale(format, out_dtype):
    data = codes(format, (16, 16))
    random = np.random.default_rng(9).integers(0, 1 << 32, 200, np.uint32)
    scales = np.concatenate([patterns(F32)[::301], random.view(np.float32)])
    powers = (2.0 ** np.arange(-126.0, 128.0, 4.0)).astype(np.float32)
    scales = np.concatenate([scales, powers])
    for scale_inv in scales:
        got = native(ops.DEQUANTIZE, data, scale_inv, out_dtype=out_dtype)
        agree(got, oracle.dequantize(data, scale_inv, out_dtype=out_dtype))


@each_output
@each_format
def test_ragged_and_empty_shapes(format, out_dtype):
    for shape in ((), (1,), (19,), (0, 3), (1000, 333)):
        data = codes(format, shape)
        got = native(ops.DEQUANTIZE, data, np.float32(0.3), out_dtype=out_dtype)
        agree(got, oracle.dequantize(data, np.float32(0.3), out_dtype=out_dtype))


@each_output
@each_format
@pytest.mark.parametrize("axis", [0, 1])
def test_every_code_and_exponent(axis, format, out_dtype):
    op = (ops.DEQUANTIZE_MXFP8_COL, ops.DEQUANTIZE_MXFP8_ROW)[axis]
    data = codes(format, (8, 32))  # every code in each block of 8 x 32
    data = np.concatenate([data] * 256, axis=0)  # [2048, 32]
    scale = np.repeat(np.arange(256, dtype=np.uint8), 8)[:, None]
    if axis == 0:
        data, scale = np.ascontiguousarray(data.T), np.ascontiguousarray(scale.T)
    attrs = {"k_ndim": 1, "out_dtype": out_dtype}
    got = native(op, data, scale, **attrs)
    agree(got, oracle.dequantize_mxfp8(data, scale, axis=axis, **attrs))


@each_format
@pytest.mark.parametrize("axis", [0, 1])
def test_ragged_mxfp8_shapes(axis, format):
    op = (ops.DEQUANTIZE_MXFP8_COL, ops.DEQUANTIZE_MXFP8_ROW)[axis]
    for shape, k_ndim in SHAPES:
        data = codes(format, shape)
        m_dims, k_dims = shape[: len(shape) - k_ndim], shape[len(shape) - k_ndim :]
        blocks = -(-int(np.prod((m_dims, k_dims)[axis])) // 32)
        scale_shape = (*m_dims, blocks) if axis == 1 else (blocks, *k_dims)
        scale = np.random.default_rng(10).integers(0, 256, scale_shape, np.uint8)
        attrs = {"k_ndim": k_ndim, "out_dtype": BF16.name}
        got = native(op, data, scale, **attrs)
        agree(got, oracle.dequantize_mxfp8(data, scale, axis=axis, **attrs))
