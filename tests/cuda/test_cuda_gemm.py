"""CUDA products stay within the bounds of their accumulation at every shape."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _gpu import BF16, CODES, F16, F32, GPU, agree, native
from _operands import gemm_oracle, operands

from te_flax.ops._choice import kernels
from te_flax.ops.gemm import gemm, gemm_op
from te_flax.ops.gemm_variants import ORIENTATIONS
from te_flax.testing.numerics import close_to, gemm_bound, product_noise

pytestmark = GPU
OUTPUTS = ("float32", "bfloat16", "float16")
# Whole tiles, and sizes that FP8 cannot take: M = 1, 63; K = 17, 48; N = 24.
SHAPES = [
    *[(256, 512, 384), (64, 128, 128), (1, 48, 24), (63, 17, 32), (128, 17, 24)],
    *[(63, 200, 144), (1, 1, 1), (300, 1000, 520), (16, 640, 192)],
]
FP8 = [("tensor", False), ("tensor", True), ("block_1d", True), ("block_2d", True)]


def attributes(out_dtype="float32", split=True, k_ndim=1):
    return {
        "k_ndim": k_ndim,
        "out_dtype": out_dtype,
        "split_accumulator": split,
        "precision": "default",
        "keep_contraction": False,
    }


def arrays_of(op, m, k, n, scaling, *, bias=None, dtype=None, seed=0):
    """Operands whose block scales differ from block to block."""
    given = operands(op, {"B": (m,), "K": (k,), "N": (n,)}, dtype=dtype, seed=seed)
    rng = np.random.default_rng(seed + 1)
    if scaling == "mxfp8":  # float16 holds the results
        for i in (2, 3):
            given[i] = rng.integers(124, 129, given[i].shape, np.uint8)
    if scaling.startswith("block"):
        for i in (2, 3):
            given[i] = np.exp2(rng.integers(-4, 5, given[i].shape)).astype(F32)
    if bias is not None:
        given[-1] = rng.standard_normal(n).astype(bias)
    return given


def mode_of(scaling, split=True):
    if scaling in ("none", "mxfp8"):
        return "wide"
    return "split" if split else "fast"


def check(orientation, scaling, shape, out_dtype, *, split=True, bias=None, dtype=None):
    op = gemm_op(orientation, scaling, bias is not None)
    m, k, n = shape
    given = arrays_of(op, m, k, n, scaling, bias=bias, dtype=dtype)
    (got,) = native(op, *given, **attributes(out_dtype, split))
    exact, size = gemm_oracle(
        orientation, given, k_ndim=1, scaling=scaling, bias=bias is not None
    )
    mode = mode_of(scaling, split)
    assert got.dtype == np.dtype(out_dtype)
    close_to(got, exact, gemm_bound(size, k, exact, got.dtype, 3, mode=mode))
    error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
    print(f"{scaling} {shape} {out_dtype} {mode}: relative error {error:.2e}")
    if mode != "wide" and bias is None:
        rounding = float(ml_dtypes.finfo(got.dtype).eps)
        assert error <= product_noise(k, mode) + rounding


@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("scaling", "split"), FP8)
def test_fp8(scaling, split, bias, out_dtype):
    for shape in SHAPES:
        for dtype in CODES.values():  # the other side has the other format, or e4m3
            check("nt", scaling, shape, out_dtype, split=split, bias=bias, dtype=dtype)


@pytest.mark.parametrize("scaling", ["tensor", "block_1d", "block_2d"])
def test_e4m3_by_e5m2(scaling):
    op = gemm_op("nt", scaling, False)
    given = arrays_of(op, 256, 512, 384, scaling)
    given[1] = given[1].astype(F32).astype(CODES["e5m2"])
    (got,) = native(op, *given, **attributes("bfloat16"))
    exact, size = gemm_oracle("nt", given, k_ndim=1, scaling=scaling)
    close_to(got, exact, gemm_bound(size, 512, exact, BF16, 3, mode="split"))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("bias", [None, F32, BF16], ids=str)
def test_mxfp8(bias, out_dtype, orientation):
    for shape in SHAPES:
        check(orientation, "mxfp8", shape, out_dtype, bias=bias)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_without_scales(dtype, bias, out_dtype, orientation):
    for shape in SHAPES:
        check(orientation, "none", shape, out_dtype, bias=bias, dtype=dtype)


@pytest.mark.parametrize("scaling", ["none", "tensor", "mxfp8", "block_1d", "block_2d"])
@pytest.mark.parametrize("bias", [None, F32], ids=str)
def test_empty_dims(bias, scaling):
    op = gemm_op("nt", scaling, bias is not None)
    dtype = BF16 if scaling == "none" else None
    for m, k, n in ((0, 32, 16), (16, 32, 0), (16, 0, 32), (0, 0, 0)):
        given = arrays_of(op, m, k, n, scaling, bias=bias, dtype=dtype)
        (got,) = native(op, *given, **attributes("bfloat16"))
        row = np.zeros(n) if bias is None else given[-1]
        expected = np.broadcast_to(row, (m, n)).astype(BF16)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("out_dtype", OUTPUTS[:2])
@pytest.mark.parametrize(
    ("code", "scales"),
    [
        *[(2.0**-9, (64, 63)), (2.0**-9, (127, 0)), (0.0, (64, 63))],
        *[(448.0, (-63, -63)), (448.0, (-126, 0)), (1.0, (-63, -63))],
        *[(1.0, (100, -100)), (1.0, (-100, 100))],
    ],
)
def test_extreme_scales(code, scales, out_dtype):
    # The product of the two scales is just a normal float32.
    got, exact = extreme(
        code, [1.25 * 2.0 ** scales[0], 1.5 * 2.0 ** scales[1]], out_dtype
    )
    rtol = 2.0**-22 if out_dtype == "float32" else 2.0**-8
    np.testing.assert_allclose(got, exact, rtol=rtol)


@pytest.mark.parametrize("out_dtype", OUTPUTS[:2])
def test_scales_beyond_the_range_are_multiplied_first(out_dtype):
    # What docs/numerics.md says of the library; right results would be welcome.
    got, _ = extreme(2.0**-9, [2.0**70, 2.0**70], out_dtype)
    assert np.isposinf(got).all()
    got, _ = extreme(0.0, [2.0**70, 2.0**70], out_dtype)
    assert np.isnan(got).all()


def extreme(code, scales, out_dtype):
    op, codes = gemm_op("nt", "tensor", False), np.full((32, 16), code, CODES["e4m3"])
    scales = [np.float32(s) for s in scales]
    (got,) = native(op, codes, codes, *scales, **attributes(out_dtype))
    exact = 16 * code**2 * float(scales[0]) * float(scales[1])
    return got.astype(np.float64), exact


@pytest.mark.parametrize("scaling", ["tensor", "mxfp8", "block_1d", "block_2d"])
def test_nan_and_inf_stay_in_their_row(scaling):
    op = gemm_op("nt", scaling, False)
    for value, found in ((np.nan, np.isnan), (np.inf, np.isinf)):
        given = arrays_of(op, 64, 128, 128, scaling, dtype=CODES["e5m2"])
        given[0] = given[0].astype(F32)
        given[0][7, 5] = value
        given[0] = given[0].astype(CODES["e5m2"])
        given[1] = np.ones_like(given[1])
        (got,) = native(op, *given, **attributes("bfloat16"))
        got = got.astype(F32)
        assert found(got[7]).all()
        assert np.isfinite(np.delete(got, 7, 0)).all()


def test_groups_of_dims():
    op = gemm_op("nt", "tensor", True)
    given = operands(op, {"B": (2, 3), "K": (4, 8), "N": (5, 16)})
    given[-1] = np.ones((5, 16), F32)
    (got,) = native(op, *given, **attributes(k_ndim=2))
    exact, size = gemm_oracle("nt", given, k_ndim=2, scaling="tensor", bias=True)
    close_to(got, exact, gemm_bound(size, 32, exact, F32, 3, mode="split"))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "block_2d", "mxfp8"])
def test_command_buffers(scaling, graphs):
    # Three products that depend on each other, as one CUDA graph that is replayed.
    op = gemm_op("nt", scaling, False)
    attrs = attributes("bfloat16")

    def chain(lhs, rhs, *scales):
        first = op(lhs, rhs, *scales, **attrs)[0]
        codes = first.astype(lhs.dtype)  # [256, 256] again
        second = op(codes, rhs, *scales, **attrs)[0]
        return first, op(second.astype(lhs.dtype), rhs, *scales, **attrs)[0]

    given = arrays_of(op, 256, 256, 256, scaling, dtype=CODES["e4m3"])
    given[1] = (given[1].astype(F32) * 0.05).astype(CODES["e4m3"])
    options = {"xla_gpu_graph_min_graph_size": 1 if graphs else 1_000_000}
    with kernels("*=native"):
        lowered = jax.jit(chain).lower(*given)
    compiled = lowered.compile(compiler_options=options)
    results = [tuple(map(np.asarray, compiled(*given))) for _ in range(4)]
    assert all(np.isfinite(r.astype(F32)).all() for r in results[0])  # codes too
    for again in results[1:]:
        agree(again, results[0])
    exact, size = gemm_oracle("nt", given, k_ndim=1, scaling=scaling)
    bound = gemm_bound(size, 256, exact, BF16, 3, mode=mode_of(scaling))
    close_to(results[0][0], exact, bound)


def test_vmap_and_gradient_shapes_run_natively():
    codes = jnp.ones((3, 32, 64), jnp.float8_e4m3fn)
    one = jnp.float32(1)
    with kernels("gemm=native"):
        f = jax.jit(
            jax.vmap(
                lambda a, b: gemm(
                    *(a, b), orientation="nt", lhs_scale_inv=one, rhs_scale_inv=one
                )
            )
        )
        assert (np.asarray(f(codes, codes)) == 64).all()


def test_what_stays_with_xla():
    one = np.float32(1)
    e4m3, e5m2 = (np.ones((16, 16), CODES[f]) for f in ("e4m3", "e5m2"))
    refused = [
        ("nn", "tensor", (e4m3, e4m3, one, one), "the contraction last in both"),
        ("nt", "tensor", (e5m2, e5m2, one, one), "no GPU multiplies e5m2 by e5m2"),
        ("nn", "none", (np.ones((4, 4), F32),) * 2, "float32 operands are left to XLA"),
    ]
    for orientation, scaling, given, why in refused:
        op = gemm_op(orientation, scaling, False)
        with pytest.raises(NotImplementedError, match=why):
            native(op, *given, **attributes())
    for dtype, ours in ((jnp.float32, False), (jnp.bfloat16, True)):
        x = jnp.ones((4, 4), dtype)
        assert ("te_flax.gemm" in jax.jit(gemm).lower(x, x).as_text()) == ours
