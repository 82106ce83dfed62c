"""GEMM against float64, every variant, and its collectives on every kind of mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _meshes import A, E, P, mesh, placed, run, sharded_as
from _operands import gemm_oracle, operands

from te_flax.ops.gemm import GEMMS, ORIENTATIONS, SCALINGS, gemm, gemm_op
from te_flax.testing.numerics import close_to, gemm_bound, sharded_bound

VARIANTS = list(GEMMS)
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
ids = "{0[0]}-{0[1]}-{0[2]}".format


def _call(variant, arrays, **options):
    orientation, scaling, bias = variant
    scales = {}
    if scaling != "none":
        names = ("lhs_scale_inv", "rhs_scale_inv")
        if scaling.startswith("nvfp4"):
            names += ("lhs_global_scale", "rhs_global_scale")
        scales = dict(zip(names, arrays[2 : 2 + len(names)], strict=True))
    if bias:
        scales["bias"] = arrays[-1]
    return gemm(
        *arrays[:2], orientation=orientation, scaling=scaling, **scales, **options
    )


def _limit(orientation, *arrays, k_ndim=1, scaling="none", bias=False):
    """Bounds the result of a sharded call against that of one device, for ``run``."""

    def bounds(want):
        exact, size = gemm_oracle(
            orientation, arrays, k_ndim=k_ndim, scaling=scaling, bias=bias
        )
        lhs = arrays[0].shape
        k = int(np.prod(lhs[-k_ndim:] if orientation[0] == "n" else lhs[:k_ndim]))
        return sharded_bound(gemm_bound(size, k, exact, want.dtype, terms=3))

    return bounds


def _check(variant, arrays, got, k_ndim, out_dtype):
    orientation, scaling, bias = variant
    exact, size = gemm_oracle(
        orientation, arrays, k_ndim=k_ndim, scaling=scaling, bias=bias
    )
    lhs = arrays[0]
    ks = lhs.shape[-k_ndim:] if orientation[0] == "n" else lhs.shape[:k_ndim]
    k = int(np.prod(ks))
    assert got.dtype == jnp.dtype(out_dtype)
    close_to(got, exact, gemm_bound(size, k, exact, got.dtype, terms=3))


@pytest.mark.parametrize("variant", VARIANTS, ids=ids)
def test_float64(variant):
    sizes = {"B": (3, 5), "K": (19, 5), "N": (7,)}
    dtypes = FLOATS if variant[1] == "none" else SCALINGS[variant[1]].codes
    for dtype, out in zip(dtypes, ("float32", "bfloat16", "float16"), strict=False):
        arrays = operands(GEMMS[variant], sizes, dtype)
        call = functools.partial(
            _call, variant, k_ndim=2, out_dtype=out, precision="highest"
        )
        got = jax.jit(lambda a, call=call: call(a))(arrays)
        _check(variant, arrays, got, 2, out)


@pytest.mark.parametrize("k", [1, 19, 111, 1024])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_odd_sizes(k, scaling):
    known = SCALINGS[scaling].orientations
    for b, n, orientation in zip(
        (1, 19, 33), (111, 1, 8), ORIENTATIONS[1:], strict=True
    ):
        if orientation not in known:
            continue
        variant = (orientation, scaling, False)
        arrays = operands(gemm_op(*variant), {"B": (b,), "K": (k,), "N": (n,)})
        got = _call(variant, arrays, out_dtype="float32", precision="highest")
        _check(variant, arrays, got, 1, "float32")


def test_groups_of_no_dims():
    x = np.arange(6, dtype=np.float32)
    assert gemm(x, x) == 55  # B and N empty
    np.testing.assert_array_equal(gemm(x, x, k_ndim=0), np.outer(x, x))
    assert gemm(np.ones((0, 4), np.float32), np.ones((4, 3), np.float32)).shape == (
        0,
        3,
    )
    empty = gemm(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32))
    np.testing.assert_array_equal(empty, np.zeros((2, 3)))


def test_scales_are_multiplied_one_by_one():
    codes = jnp.full((1, 32), 2.0**-6, jnp.float8_e4m3fn)
    big, small = jnp.float32(2.0**126), jnp.float32(2.0**126)
    got = gemm(
        codes,
        codes,
        orientation="nt",
        lhs_scale_inv=big,
        rhs_scale_inv=small * 2.0**-120,
    )
    assert float(got[0, 0]) == 32 * 2.0**-12 * 2.0**126 * 2.0**6
    tiny = jnp.float32(2.0**-126)
    got = gemm(
        codes * 0 + 1,
        codes * 0 + 1,
        orientation="nt",
        lhs_scale_inv=tiny,
        rhs_scale_inv=big,
    )
    assert float(got[0, 0]) == 32.0


def test_block_scales_at_the_ends():
    one = jnp.ones((1, 32), jnp.float8_e4m3fn)

    def product(e, f):
        scales = (jnp.full((1, 1), v, jnp.uint8) for v in (e, f))
        lhs_scale, rhs_scale = scales
        return float(
            gemm(
                one,
                one,
                orientation="nt",
                lhs_scale_inv=lhs_scale,
                rhs_scale_inv=rhs_scale,
            )[0, 0]
        )

    assert product(127, 127) == 32
    assert product(254, 1) == 32 * 2.0
    assert np.isnan(product(255, 127))


TWO = {
    "auto": mesh(A, A),
    "explicit": mesh(E, E),
    "mixed_ea": mesh(E, A),
    "mixed_ae": mesh(A, E),
}
ONES = {
    "auto": mesh(A, A, shape=(8, 1)),
    "explicit": mesh(E, E, shape=(8, 1)),
    "mixed_ea": mesh(E, A, shape=(8, 1)),
    "mixed_ae": mesh(A, E, shape=(8, 1)),
    "mixed_1": mesh(E, A, shape=(1, 8)),
}
both = pytest.mark.parametrize("kind", ["auto", "explicit"])
every = pytest.mark.parametrize("kind", TWO)


@pytest.fixture(scope="module")
def data():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 16, 128))
    return (
        x,
        jax.random.normal(keys[1], (128, 64)) / 8,
        jax.random.normal(keys[2], (64,)),
    )


@every
@pytest.mark.parametrize("spec", [P("dp"), P("dp", None, "tp"), P("dp", "tp")], ids=str)
def test_sharded_contraction(kind, spec, data):
    """K cut on both sides: psum, or psum_scatter where the result asks for the axis."""
    f = lambda x, w, b: gemm(x, w, bias=b, precision="highest", out_sharding=spec)
    on = TWO[kind]
    specs, limit = (P("dp", None, "tp"), P("tp"), P()), _limit("nn", *data, bias=True)
    found, got = run(f, on, specs, *data, bounds=limit)
    if "mixed" not in kind:
        scattered = "tp" in spec
        assert found == {"reduce-scatter" if scattered else "all-reduce": 1}
        assert sharded_as(got, on, spec)


@pytest.mark.parametrize("kind", ONES)
def test_axes_of_size_one(kind, data):
    f = lambda x, w, b: gemm(x, w, bias=b, precision="highest", out_sharding=P("dp"))
    specs, limit = (P("dp", None, "tp"), P("tp"), P()), _limit("nn", *data, bias=True)
    found, _ = run(f, ONES[kind], specs, *data, bounds=limit)
    assert found == ({"all-reduce": 1} if kind == "mixed_1" else {})


@both
def test_fsdp_kernel_is_gathered_as_codes(kind, data):
    x, w = (a.astype(jnp.float8_e4m3fn) for a in data[:2])
    one = jnp.float32(1.0)
    f = lambda x, w: gemm(x, w, lhs_scale_inv=one, rhs_scale_inv=one)
    on = TWO[kind]
    limit = _limit("nn", x, w, one, one, scaling="tensor")
    found, _ = run(f, on, (P("dp"), P("dp")), x, w, bounds=limit)
    assert found == {"all-gather": 1}
    with jax.set_mesh(on):
        text = jax.jit(f).lower(*placed(on, (P("dp"), P("dp")), (x, w))).as_text()
    # The partitioner gathers the operand of the op, which is FP8; the CPU backend
    # then carries it as f16.
    assert re.search(
        r"(custom_call @CustomSPMDPartitioning|sdy.manual_computation)"
        r".*f8E4M3FN",
        text,
    )


@both
@pytest.mark.parametrize("scaling", ["none", "tensor", "mxfp8"])
def test_kernel_gradient_is_summed_here(kind, scaling, data):
    """Tokens cut on one side only: the other is cut, nothing of size M is gathered."""
    x, g = data[0], data[0][..., :64]
    scales = ()
    if scaling != "none":
        x, g = (a.astype(jnp.float8_e4m3fn) for a in (x, g))
    if scaling == "tensor":
        scales = (jnp.float32(0.5), jnp.float32(2.0))
    if scaling == "mxfp8":
        rng = np.random.default_rng(0)
        scales = [rng.integers(125, 130, (4, n), np.uint8) for n in (128, 64)]

    def f(asked, x, g, lhs=None, rhs=None):
        return gemm(
            *(x, g),
            orientation="tn",
            k_ndim=2,
            keep_contraction=True,
            lhs_scale_inv=lhs,
            rhs_scale_inv=rhs,
            out_sharding=asked,
            out_dtype="float32",
        )

    on = TWO[kind]
    for lhs, rhs in ((P("dp"), P("dp")), (P("dp"), P()), (P(), P("dp", None, "tp"))):
        asked = P("dp", "tp") if "tp" in rhs else P("dp")
        specs = (lhs, rhs, *(P() for _ in scales))
        limit = _limit("tn", x, g, *scales, k_ndim=2, scaling=scaling)
        call = functools.partial(f, asked)
        found, got = run(call, on, specs, x, g, *scales, bounds=limit)
        assert found == {"reduce-scatter": 1}, specs
        assert sharded_as(got, on, asked)


@both
def test_sequence_cut_behind_the_batch(kind):
    """Block scales along tokens stay in order when the sequence is cut too."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 64, 32)), jnp.float8_e4m3fn)
    scale = rng.integers(124, 131, (16, 32), np.uint8)

    def f(x, g, s):
        return gemm(
            *(x, g),
            orientation="tn",
            k_ndim=2,
            keep_contraction=True,
            lhs_scale_inv=s,
            rhs_scale_inv=s,
            out_dtype="float32",
        )

    for specs in ((P("dp", "tp"), P("dp", "tp")), (P("dp", "tp"), P("dp"))):
        limit = _limit("tn", x, x, scale, scale, k_ndim=2, scaling="mxfp8")
        found, _ = run(f, TWO[kind], (*specs, P()), x, x, scale, bounds=limit)
        assert "all-gather" not in found


def test_sum_is_float32():
    """A bfloat16 result of a cut contraction is rounded once, after the sum."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 1024)), jnp.bfloat16)
    for on in (TWO["auto"], TWO["explicit"]):
        f = lambda x, w: gemm(x, w, orientation="nt", precision="highest")
        cut = (P(None, "dp"), P(None, "dp"))
        _, got = run(f, on, cut, x, x, bounds=_limit("nt", x, x))
        exact, size = gemm_oracle("nt", (x, x), k_ndim=1)
        close_to(got, exact, gemm_bound(size, 1024, exact, jnp.bfloat16))
        with jax.set_mesh(on):
            args = placed(on, (P(None, "dp"), P(None, "dp")), (x, x))
            text = jax.jit(f).lower(*args).compile().as_text() or ""
        assert re.search(r"f32\[8,8\]\S* all-reduce", text)
        assert not re.search(r"bf16\[8,8\]\S* all-reduce", text)


@both
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_on_a_mesh(kind, axes, data):
    x, w, _ = data
    args = (x if axes[0] == 0 else x[0], jnp.stack([w] * 8) if axes[1] == 0 else w)
    specs = [P("dp") if a == 0 else P() for a in axes]
    f = jax.vmap(functools.partial(gemm, precision="highest"), axes)
    left, right = (np.asarray(a, np.float64) for a in args)
    if right.ndim == 3 and left.ndim == 2:
        left = left[None]
    exact, size = left @ right, np.abs(left) @ np.abs(right)
    limit = sharded_bound(gemm_bound(size, 128, exact, np.float32))
    found, _ = run(f, TWO[kind], specs, *args, bounds=limit)
    assert found == {}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rhs": np.ones((5, 4), np.float32)}, ValueError,
         "gemm_nn: rhs must have K.. = 3 like lhs, got 5 in shape (5, 4)"),
        ({"lhs": np.ones((), np.float32)}, ValueError,
         "gemm_nn: lhs must have at least 1 dims [B.. K..], got shape ()"),
        ({"k_ndim": -1}, ValueError, "gemm_nn: k_ndim must be >= 0, got -1"),
        ({"bias": np.ones(3, np.float32)}, ValueError,
         "gemm_nn_bias: bias must have N.. = 4 like rhs, got 3 in shape (3,)"),
        ({"rhs": np.ones((3, 4), np.float16)}, TypeError,
         "gemm: rhs must have dtype float32 like lhs, got float16; cast it first"),
        ({"lhs": np.ones((2, 3), np.int32), "rhs": np.ones((3, 4), np.int32)},
         TypeError, "gemm_nn: lhs must be float32 or bfloat16 or float16"),
        ({"lhs": np.ones((2, 3)), "rhs": np.ones((3, 4))}, TypeError,
         "got float64; cast it with astype(np.float32)"),
        ({"orientation": "nx"}, ValueError,
         "gemm: orientation must be one of nn, nt, tn, tt, got 'nx'; choose one"),
        ({"precision": "most"}, ValueError,
         "gemm: precision must be one of default, high, highest, got 'most'"),
        ({"lhs_scale_inv": np.float32(1)}, ValueError,
         "gemm: rhs_scale_inv must be given too, got None"),
    ],
)  # fmt: skip
def test_errors(change, error, text):
    given = {"lhs": np.ones((2, 3), np.float32), "rhs": np.ones((3, 4), np.float32)}
    given |= change
    lhs, rhs = given.pop("lhs"), given.pop("rhs")
    with pytest.raises(error, match=re.escape(text)):
        gemm(lhs, rhs, **given)


def test_e5m2_times_e5m2():
    codes = jnp.ones((4, 4), jnp.float8_e5m2)
    one = jnp.float32(1)
    with pytest.raises(TypeError, match="rhs must not be e5m2 like lhs"):
        gemm(codes, codes, lhs_scale_inv=one, rhs_scale_inv=one)


def test_wrong_block_scales():
    codes, scale = jnp.ones((4, 40), jnp.float8_e4m3fn), jnp.ones((4, 1), jnp.uint8)
    text = (
        "gemm_nt_mxfp8: lhs_scale_inv must have K../32 = 2 (one per 32 of K = 40 of "
        "lhs), got 1 in shape (4, 1)"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        gemm(codes, codes, orientation="nt", lhs_scale_inv=scale, rhs_scale_inv=scale)
