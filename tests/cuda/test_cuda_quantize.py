"""CUDA amax, scales and tensor-scaled quantization equal the numpy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu import (
    BF16,
    F32,
    FLAGS,
    FORMATS,
    GPU,
    agree,
    each_dtype,
    finite,
    formats_of,
    is_finite,
    native,
    of_slice,
    shuffled,
)

from te_flax.ops import amax as amax_ops
from te_flax.ops import quantize as ops
from te_flax.ops._choice import kernels
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.testing import oracle
from te_flax.testing.patterns import amax_edges, patterns

pytestmark = GPU
SIZES = (0, 1, 7, 19, 111, 1024, 8191, 8193, 300_001)
SCALES = (
    *(1.0, 0.37, -2.0, 149.0, 2.0**-9, 2.0**-126, 2.0**120, 2.0**126),
    *(0.0, 1e-40, np.inf, np.nan),
)
VARIANTS = {
    "row": (ops.QUANTIZE_ROW, ops.QUANTIZE_ROW_NOOP),
    "col": (ops.QUANTIZE_COL, ops.QUANTIZE_COL_NOOP),
    "rowcol": (ops.QUANTIZE_ROWCOL, ops.QUANTIZE_ROWCOL_NOOP),
}
# Whole tiles, ragged edges, rows of 8 but not 16 elements, one row, one column, N-D.
SHAPES = [
    *[((256, 384), 1), ((130, 1030), 1), ((777, 2085), 1), ((264, 136), 1)],
    *[((1, 4096), 1), ((4096, 1), 1), ((3, 5, 7), 2), ((2, 64, 4, 32), 2)],
    *[((19,), 0), ((), 0), ((0, 5), 1), ((5, 0), 1)],
]


@each_dtype
def test_amax_of_patterns_and_sizes(dtype):
    agree(native(amax_ops.AMAX, patterns(dtype)), oracle.amax(patterns(dtype)))
    for size in SIZES:
        x = np.resize(shuffled(dtype), size)
        agree(native(amax_ops.AMAX, x), oracle.amax(x))
        x = np.where(is_finite(x), x, dtype.type(0))
        agree(native(amax_ops.AMAX, x), oracle.amax(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_amax_to_scale_divides_as_ieee(format, power_of_2):
    random = np.random.default_rng(3).integers(0, 1 << 32, 4000, np.uint32)
    amax = np.concatenate(
        [amax_edges(format), random.view(np.float32), patterns(F32)[::9]]
    )
    for margin, epsilon in ((0, 0.0), (3, 1e-3), (126, 1e-40)):
        attrs = {"format": format, "margin": margin, "epsilon": epsilon}
        attrs |= {"power_of_2": power_of_2}
        got = native(amax_ops.AMAX_TO_SCALE, amax, **attrs)
        agree(got, oracle.amax_to_scale(amax, **attrs))


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pattern(variant, dtype):
    op = VARIANTS[variant][0]
    x = patterns(dtype).reshape(-1, 128)
    for i, scale in enumerate(SCALES):
        row, col = FORMATS[i % 2], FORMATS[i // 2 % 2]
        attrs = {"k_ndim": 1} | formats_of(op, row_format=row, col_format=col)
        got = native(op, x, np.float32(scale), **attrs)
        agree(got, oracle.quantize(x, np.float32(scale), **attrs))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_tensor_of_subnormals_counts_as_zeros(dtype):
    tiny = finite(dtype)
    tiny = tiny[np.abs(tiny.astype(np.float64)) < 2.0**-126]
    assert tiny.size > 200
    assert native(amax_ops.AMAX, tiny)[0].tolist() == [0, 0]
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    *codes, amax = native(ops.QUANTIZE_ROWCOL, tiny, np.float32(2.0**126), **attrs)
    assert amax.tolist() == [0, 0]
    for copy in codes:
        assert not np.any(copy.view(np.uint8) & 0x7F)


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_and_empty_shapes(variant, dtype):
    op = VARIANTS[variant][0]
    for shape, k_ndim in SHAPES:
        x = np.resize(shuffled(dtype), shape)
        attrs = formats_of(op, row_format="e5m2", col_format="e4m3") | {
            "k_ndim": k_ndim
        }
        got = native(op, x, np.float32(100), **attrs)
        agree(got, oracle.quantize(x, np.float32(100), **attrs))


@each_dtype
@pytest.mark.parametrize("variant", VARIANTS)
def test_noop_keeps_the_previous_results(variant, dtype):
    plain, noop = VARIANTS[variant]
    attrs = formats_of(plain, row_format="e4m3", col_format="e5m2") | {"k_ndim": 1}
    rng = np.random.default_rng(2)
    old, x = (rng.standard_normal((45, 200)).astype(dtype) for _ in range(2))
    old_results = native(plain, old, np.float32(7), **attrs)
    new_results = native(plain, x, np.float32(9), **attrs)
    for flag in FLAGS:
        flag = np.array([flag], np.float32)
        got = native(noop, flag, x, np.float32(9), *old_results, **attrs)
        agree(got, oracle.noop(flag, old_results, new_results))


def test_noop_writes_into_the_donated_buffers():
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e4m3"}
    x = jnp.ones((64, 96), jnp.bfloat16)
    with kernels("*=native"):
        old = ops.QUANTIZE_ROWCOL(x, jnp.float32(1), **attrs)
        where = [r.unsafe_buffer_pointer() for r in old]
        step = jax.jit(
            lambda *a: ops.QUANTIZE_ROWCOL_NOOP(*a, **attrs), donate_argnums=(3, 4, 5)
        )
        new = step(jnp.zeros(1), 2 * x, jnp.float32(1), *old)
        assert [r.unsafe_buffer_pointer() for r in new] == where
        kept = step(jnp.ones(1), 3 * x, jnp.float32(1), *new)
        assert [r.unsafe_buffer_pointer() for r in kept] == where
    assert float(kept[0][0, 0]) == 2
    assert kept[2].tolist() == [2, 0]


def test_the_same_launch_gives_the_same_bits():
    x = np.random.default_rng(4).standard_normal((1000, 3000)).astype(BF16)
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    first = native(ops.QUANTIZE_ROWCOL, x, np.float32(50), **attrs)
    for _ in range(5):
        agree(native(ops.QUANTIZE_ROWCOL, x, np.float32(50), **attrs), first)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_chain_of_handlers_in_one_program(graphs):
    # With a minimum of one operation XLA records all of them into one CUDA graph,
    # which is replayed and, where buffers moved, updated.
    def chain(x, noop, previous):
        (amax,) = amax_ops.AMAX(x)
        attrs = {"format": "e4m3", "margin": 0, "power_of_2": False, "epsilon": 0.0}
        scale, scale_inv = amax_ops.AMAX_TO_SCALE(amax[0], **attrs)
        attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
        new = ops.QUANTIZE_ROWCOL(x, scale, **attrs)
        kept = ops.QUANTIZE_ROWCOL_NOOP(noop, x, scale, *previous, **attrs)
        return scale, scale_inv, new, kept

    rng = np.random.default_rng(5)
    previous = tuple(
        jnp.asarray(r)
        for r in oracle.quantize(
            np.ones((200, 264), BF16),
            np.float32(1),
            k_ndim=1,
            row_format="e4m3",
            col_format="e5m2",
        )
    )
    options = {"xla_gpu_graph_min_graph_size": 1 if graphs else 1_000_000}
    x = jnp.asarray(rng.standard_normal((200, 264)).astype(BF16))
    with kernels("*=native"):
        lowered = jax.jit(chain).lower(x, jnp.zeros(1), previous)
    compiled = lowered.compile(compiler_options=options)
    keep_alive = []
    for step in range(6):
        x = jnp.asarray((rng.standard_normal((200, 264)) * step).astype(BF16))
        noop = jnp.full(1, step % 2, jnp.float32)
        scale, scale_inv, new, kept = compiled(x, noop, previous)
        keep_alive.append((x, new))  # so that buffers move
        rule = {"format": "e4m3", "margin": 0, "power_of_2": False, "epsilon": 0.0}
        expected = oracle.amax_to_scale(oracle.amax(np.asarray(x))[0][0], **rule)
        agree((scale, scale_inv), expected)
        attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
        codes = oracle.quantize(np.asarray(x), expected[0], **attrs)
        agree(new, codes)
        old = tuple(np.asarray(p) for p in previous)
        agree(kept, oracle.noop(np.asarray(noop), old, codes))


def test_vmap_jit_and_grad_free_use_on_the_gpu():
    x = np.random.default_rng(6).standard_normal((3, 20, 40)).astype(F32)
    scales = np.array([1, 10, 100], np.float32)
    attrs = {"k_ndim": 1, "row_format": "e4m3", "col_format": "e5m2"}
    with kernels("*=native"):
        mapped = jax.jit(jax.vmap(lambda x, s: ops.QUANTIZE_ROWCOL(x, s, **attrs)))
        results = mapped(jnp.asarray(x), jnp.asarray(scales))
    for i in range(3):
        expected = oracle.quantize(x[i], scales[i], **attrs)
        agree(tuple(r[i] for r in results), expected)


@pytest.mark.parametrize("start", [0, 3, 160, 1000])
def test_slices_at_any_offset(start):
    x = np.random.default_rng(0).standard_normal((130, 256)).astype(BF16)
    scale = (np.float32(60),)
    for op, more in (
        (amax_ops.AMAX, ()),
        (ops.QUANTIZE_ROW, scale),
        (ops.QUANTIZE_ROWCOL, scale),
        (QUANTIZE_MXFP8_ROWCOL, ()),
    ):
        attrs = formats_of(op, row_format="e4m3", col_format="e4m3")
        attrs |= {"k_ndim": 1} if "k_ndim" in op.attrs else {}
        call = lambda x, op=op, more=more, attrs=attrs: op(x, *more, **attrs)
        with kernels("*=native"):
            agree(of_slice(call, x, start), jax.jit(call)(x))
