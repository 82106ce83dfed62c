"""CUDA LayerNorm and RMSNorm: exact copies of h, and h within its bound of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_norm as on_cpu
from _gpu import BF16, F16, F32, FLAGS, GPU, native
from _norms import (
    DTYPES,
    FAMILIES,
    KINDS,
    NOT_FINITE,
    OUTS,
    attributes,
    draw,
    exact,
    forward_bound,
    gradients,
    hard,
    plain,
    stats_bounds,
)
from _variants import expected, full, of_codes, results, same_results, with_values

from te_flax.ops._choice import kernels
from te_flax.ops._fused import Variant
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.testing.numerics import close_to
from te_flax.testing.patterns import same_bits

pytestmark = GPU
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "mxfp8"])
SHAPES = (  # M.., K..
    *[((1,), (1024,)), ((19,), (111,)), ((3, 37), (19,)), ((130,), (1,))],
    *[((5, 14), (4, 16)), ((0,), (33,)), ((33,), (0,)), ((), (40,)), ((2, 64), (256,))],
)
# One for each number of warps that share a row, and rows longer than a block holds.
LENGTHS = (1, 19, 111, 1024, 1025, 2048, 4097, 8200, 16384, 16392, 40_001, 65_536)


@pytest.fixture(autouse=True)
def _references_on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def _copies_agree(family, scaling, own, attrs, k_ndim):
    found = results(native, family, full(family, scaling), own, attrs)
    own_results = {name: found[name] for name in ("h", *family.extras)}
    same_results(found, expected(scaling, found["h"], k_ndim) | own_results)
    return found


@each_family
@each_scaling
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(map(str, pair)))
def test_results_are_those_of_the_quantizers(family, scaling, dtypes):
    for i, (m, k) in enumerate(SHAPES):
        own = draw(family, m, k, dtypes)
        out = (F32, BF16, F16)[(i + DTYPES.index(dtypes)) % 3]
        attrs = attributes(family, k, out, zero_centered_gamma=i % 2 == 1)
        _copies_agree(family, scaling, own, attrs, len(k))


@each_family
@each_scaling
@pytest.mark.parametrize(("m", "k"), [(777, 1056), (70, 8200), (33, 16400)])
def test_many_tiles(family, scaling, m, k):
    for out, dtypes in ((BF16, (BF16, F32)), (F32, (F32, F32)), (BF16, (BF16, BF16))):
        own = draw(family, (m,), (k,), dtypes)
        _copies_agree(family, scaling, own, attributes(family, (k,), out), 1)


@each_family
@each_scaling
@pytest.mark.parametrize("shape", [((3, 47), (2, 37)), ((128,), (2048,))], ids=str)
def test_leaving_results_away_changes_nothing(family, scaling, shape):
    m, k = shape
    for dtypes, out in (((BF16, BF16), BF16), ((F16, F32), F32)):
        own, attrs = draw(family, m, k, dtypes), attributes(family, k, out)
        want = results(native, family, full(family, scaling), own, attrs)
        for v in of_codes(family):
            if v.scaling in (scaling, "none") and not v.noop:
                same_results(results(native, family, v, own, attrs), want)


@each_kind
@pytest.mark.parametrize(("m", "k"), [(130, 96), (33, 111), (70, 8200), (33, 0)])
def test_copies_of_values_hold_those_of_the_codes(kind, m, k):
    family = NORM_FWD[kind]
    for dtypes, out in (((BF16, BF16), BF16), ((F16, F32), F32)):
        own, attrs = draw(family, (m,), (k,), dtypes), attributes(family, (k,), out)
        for v in family.variants:
            if v.values:
                codes = results(native, family, v._replace(values=()), own, attrs)
                found = results(native, family, v, own, attrs)
                same_results(found, with_values(v, codes, m))


@each_family
@each_scaling
def test_noop_keeps_every_previous_result(family, scaling):
    m, k = (2, 40), (70,)
    attrs = attributes(family, k)
    old, new = (draw(family, m, k, seed=seed) for seed in (1, 2))
    most = full(family, scaling)
    before, after = (results(native, family, most, x, attrs) for x in (old, new))
    for v in of_codes(family):
        if v.scaling not in (scaling, "none") or not v.noop:
            continue
        for flag in FLAGS:
            found = results(native, family, v, new, attrs, before, noop=flag)
            kept = not abs(flag) < 2.0**-126
            same_results(found, before if kept else after)


@each_kind
@pytest.mark.parametrize("k", LENGTHS)
def test_hard_rows_are_within_the_bound(kind, k):
    rng = np.random.default_rng(0)
    gamma, beta = (rng.standard_normal(k).astype(F32) for _ in range(2))
    parameters = (gamma, beta)[: 1 + (kind == "layernorm")]
    for dtype, zero_centered in ((F32, False), (BF16, True), (F16, False)):
        x = hard(k)
        x = x[np.max(np.abs(x), 1) < 6e4].astype(dtype)  # finite in float16
        for out in (F32, dtype):
            attrs = attributes(NORM_FWD[kind], (k,), out, zero_centered)
            h, *stats = plain(native, NORM_FWD[kind], x, *parameters, **attrs)
            want = exact(kind, x, *parameters, zero_centered_gamma=zero_centered)
            close_to(h, want.h, forward_bound(want, out))
            mean_bound, rstd_bound = stats_bounds(want)
            close_to(stats[-1], want.rstd, rstd_bound)
            if kind == "layernorm":
                close_to(stats[0], want.mean, mean_bound)


@each_kind
@pytest.mark.parametrize("k", LENGTHS)
def test_gradients_are_within_the_bound(kind, k):
    for i, (dtypes, out) in enumerate(zip(DTYPES, OUTS, strict=True)):
        m = (1500, 130, 3)[(i + LENGTHS.index(k)) % 3] if k < 5000 else 150
        zero_centered = i % 2 == 1
        own = draw(NORM_BWD[kind], (m,), (k,), dtypes, seed=i)
        attrs = attributes(NORM_BWD[kind], (k,), out, zero_centered)
        dx, *sums = plain(native, NORM_BWD[kind], *own, **attrs)
        options = {"zero_centered_gamma": zero_centered, "out": out}
        want = gradients(kind, *own, **options)
        close_to(dx, want.dx, want.dx_bound)
        for got, sum_, bound in zip(sums, want.sums, want.sums_bound, strict=True):
            close_to(got, sum_, bound)


@each_family
@pytest.mark.parametrize("k", [37, 1024, 3000, 8192, 17_000])
def test_a_row_depends_on_that_row_only(family, k):
    """Not on its index, nor on the number of rows."""
    on_cpu.test_a_row_depends_on_that_row_only(family, native, k)


@each_family
@pytest.mark.parametrize("k", [64, 4096, 20_000])
def test_the_same_launch_gives_the_same_bits(family, k):
    own = draw(family, (1000,), (k,), (BF16, BF16))
    attrs = attributes(family, (k,), BF16)
    first = plain(native, family, *own, **attrs)
    for _ in range(5):
        for a, b in zip(plain(native, family, *own, **attrs), first, strict=True):
            same_bits(a, b)


@each_kind
def test_sums_over_no_tokens_are_zero(kind):
    own = draw(NORM_BWD[kind], (0,), (33,))
    attrs = attributes(NORM_BWD[kind], (33,), F32)
    _, *sums = plain(native, NORM_BWD[kind], *own, **attrs)
    for found in sums:
        same_bits(found, np.zeros(33, F32))


@pytest.mark.parametrize("k", [19, 111, 1000, 5001, 30_000])
def test_a_constant_row_gives_beta(k):
    """Its mean is exactly itself, whatever the sum lost."""
    on_cpu.test_a_constant_row_gives_beta(native, k)


@each_kind
@pytest.mark.parametrize("k", [40, 3000, 20_000])
def test_rows_that_are_not_finite_are_nan(kind, k):
    """With a NaN, an Inf, or squares that overflow; the other rows do not notice."""
    n = len(NOT_FINITE)
    rows = np.random.default_rng(0).standard_normal((n, k)).astype(F32)
    large = np.float32(np.sqrt(1e38 / k))  # its squares add up to less than the largest
    x = np.concatenate([rows, rows, rows[:1] * large])
    for i, special in enumerate(NOT_FINITE.values()):
        x[i, 3:5] = special
    parameters = [np.ones(k, F32)] * (1 + (kind == "layernorm"))
    attrs = attributes(NORM_FWD[kind], (k,), F32)
    clean = plain(native, NORM_FWD[kind], x[n:], *parameters, **attrs)
    assert all(np.isfinite(a).all() for a in clean)
    for out in (F32, BF16, F16):
        attrs = attributes(NORM_FWD[kind], (k,), out)
        h, *stats = plain(native, NORM_FWD[kind], x, *parameters, **attrs)
        same_bits(h[:n], np.full((n, k), np.nan, out))
        same_bits(stats[-1][:n], np.full(n, np.nan, F32))
        for all_, alone in zip(stats, clean[1:], strict=True):
            same_bits(all_[n:], alone)
            same_bits(all_, np.where(np.isnan(all_), F32.type(np.nan), all_))


@each_family
def test_nan_and_inf_reach_what_they_touch(family):
    k, m = 300, 20
    own = draw(family, (m,), (k,), (BF16, F32))
    own[0][3, 7], own[0][5, 280] = np.nan, np.inf
    attrs = attributes(family, (k,), BF16)
    for scaling in ("tensor", "mxfp8"):
        found = _copies_agree(family, scaling, own, attrs, 1)
        touched = np.isnan(found["h"].astype(F32)).any(1)
        assert touched.tolist() == [i in (3, 5) for i in range(m)]
        if "dgamma" in found:
            assert (~np.isfinite(found["dgamma"])).nonzero()[0].tolist() == [7, 280]
            nan = np.isnan(found["dgamma"])
            same_bits(found["dgamma"][nan], np.full(nan.sum(), np.nan, F32))


@each_kind
def test_subnormal_inputs_count_as_zero(kind):
    k = 40
    tiny = np.where(np.arange(k) % 2, 1e-39, -1e-40).astype(F32)
    x = np.stack([tiny, np.where(np.arange(k) < 3, np.float32(2.0**-120), tiny)])
    flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(F32)
    parameters = [np.full(k, 2, F32), tiny][: 1 + (kind == "layernorm")]
    found = {}
    for epsilon in (1e-6, 1e-40, 0.0):
        attrs = attributes(NORM_FWD[kind], (k,), F32, epsilon=epsilon)
        found[epsilon] = plain(native, NORM_FWD[kind], x, *parameters, **attrs)
        want = plain(native, NORM_FWD[kind], flushed, *parameters, **attrs)
        for a, b in zip(found[epsilon], want, strict=True):
            same_bits(a, b)
    for a, b in zip(found[1e-40], found[0.0], strict=True):
        same_bits(a, b)


@each_kind
def test_a_row_without_variance_and_epsilon_is_nan(kind):
    """0 / 0, as in nnx; rstd is the infinity that says why."""
    on_cpu.test_a_row_without_variance_and_epsilon_is_nan(kind, native)


def test_a_row_without_elements():
    on_cpu.test_a_row_without_elements(native)


def test_vmap_joins_the_rows():
    family, k = NORM_FWD["layernorm"], (111,)
    x, gamma, beta = draw(family, (3, 7), k, (BF16, F32))
    attrs = attributes(family, k, BF16)
    op = family.ops[Variant()]
    want = native(op, x, gamma, beta, **attrs)
    gpu = jax.device_put((x, gamma, beta), jax.devices("cuda")[0])
    with kernels("*=native"):
        call = jax.vmap(lambda x, g, b: op(x, g, b, **attrs), (0, None, None))
        got = jax.jit(call)(*gpu)
    same_bits(got[0], want[0])


@pytest.mark.parametrize("graphs", [False, True])
def test_forward_and_backward_in_one_program(graphs):
    """With a minimum of one operation XLA records all of them into one CUDA graph."""
    forward, backward = NORM_FWD["layernorm"], NORM_BWD["layernorm"]
    m, k = 300, 2048
    x, gamma, beta = draw(forward, (m,), (k,), (BF16, F32))
    dy = draw(backward, (m,), (k,), (BF16, BF16))[0]
    option = {"zero_centered_gamma": False, "k_ndim": 1, "out_dtype": "bfloat16"}

    def step(dy, x, gamma, beta):
        h, _, mean, rstd = forward.ops[Variant()](
            x, gamma, beta, epsilon=1e-6, **option
        )
        row, *_ = backward.ops[Variant("tensor", ("row", "col"), False)](
            dy, x, gamma, mean, rstd, jnp.float32(2), **option,
            row_format="e5m2", col_format="e5m2",
        )  # fmt: skip
        return h, row, backward.ops[Variant()](dy, x, gamma, mean, rstd, **option)

    arrays = jax.device_put((dy, x, gamma, beta), jax.devices("cuda")[0])
    options = {"xla_gpu_graph_min_graph_size": 1 if graphs else 1_000_000}
    with kernels("*=native"):
        compiled = jax.jit(step).lower(*arrays).compile(compiler_options=options)
    attrs = attributes(forward, (k,), BF16)
    want, *stats = plain(native, forward, x, gamma, beta, **attrs)
    grads = plain(
        native, backward, dy, x, gamma, *stats, **attributes(backward, (k,), BF16)
    )
    for _ in range(3):
        h, row, (dx, _, *sums) = compiled(*arrays)
        same_bits(h, want)
        for a, b in zip((dx, *sums), grads, strict=True):
            same_bits(a, b)
        same_bits(
            row,
            expected(
                "tensor",
                grads[0],
                1,
                {"row_format": "e5m2", "col_format": "e5m2"},
                np.float32(2),
            )["row"],
        )
