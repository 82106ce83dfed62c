"""LayerNorm and RMSNorm: exact copies of h, and h within its bound of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _norms import (
    DTYPES,
    EPSILON,
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
from _quantizers import (
    BF16,
    F16,
    F32,
    HANDLERS,
    NATIVE,
    REFERENCE,
    Implementation,
    examples,
    picks,
)
from _variants import (
    expected,
    full,
    of_codes,
    results,
    same_results,
    token_sum,
    with_values,
)
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from te_flax.ops._fused import Variant
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.testing.numerics import close_to, sharded_bound
from te_flax.testing.patterns import same_bits

native = pytest.mark.skipif(not NATIVE, reason="no handlers are built")
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "mxfp8"])
RUNS = [REFERENCE, *HANDLERS[-1:]]
each_run = pytest.mark.parametrize("run", RUNS, ids=str)
SHAPES = (  # M.., K..
    *[((1,), (1024,)), ((19,), (111,)), ((3, 37), (19,)), ((130,), (1,))],
    *[((5, 14), (4, 16)), ((0,), (33,)), ((33,), (0,)), ((), (40,))],
)
LENGTHS = (1, 19, 111, 1024, 4097)


@native
@each_family
@each_scaling
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: "-".join(map(str, pair)))
def test_results_are_those_of_the_quantizers(family, scaling, dtypes):
    """Every size, on every instruction set, one thread and three."""
    for i, (m, k) in enumerate(SHAPES):
        own = draw(family, m, k, dtypes)
        out = (F32, BF16, F16)[(i + DTYPES.index(dtypes)) % 3]
        attrs = attributes(family, k, out, zero_centered_gamma=i % 2 == 1)
        first, *others = (
            results(run, family, full(family, scaling), own, attrs) for run in HANDLERS
        )
        want = {name: first[name] for name in ("h", *family.extras)}
        same_results(first, expected(scaling, first["h"], len(k)) | want)
        for found in others:
            same_results(found, first)


@native
@each_family
@each_scaling
def test_leaving_results_away_changes_nothing(family, scaling):
    m, k = (3, 47), (2, 37)
    own, attrs = draw(family, m, k, (BF16, F32)), attributes(family, k, BF16)
    want = results(HANDLERS[0], family, full(family, scaling), own, attrs)
    for v in of_codes(family):
        if v.scaling in (scaling, "none") and not v.noop:
            for run in HANDLERS:
                same_results(results(run, family, v, own, attrs), want)


@each_kind
def test_copies_of_values_hold_those_of_the_codes(kind):
    family, m, k = NORM_FWD[kind], 33, 111
    own, attrs = draw(family, (m,), (k,), (BF16, F32)), attributes(family, (k,), BF16)
    for v in family.variants:
        if v.values:
            codes = results(REFERENCE, family, v._replace(values=()), own, attrs)
            found = results(REFERENCE, family, v, own, attrs)
            same_results(found, with_values(v, codes, m))


@native
@each_family
@each_scaling
def test_noop_keeps_every_previous_result(family, scaling):
    m, k = (2, 40), (70,)
    attrs = attributes(family, k)
    old, new = (draw(family, m, k, seed=seed) for seed in (1, 2))
    most = full(family, scaling)
    before, after = (results(HANDLERS[-1], family, most, x, attrs) for x in (old, new))
    for v in of_codes(family):
        if v.scaling not in (scaling, "none") or not v.noop:
            continue
        for flag, kept in ((0.0, False), (1e-40, False), (1.0, True), (np.nan, True)):
            run = HANDLERS[int(kept)]
            found = results(run, family, v, new, attrs, before, noop=flag)
            same_results(found, before if kept else after)


@native
@each_family
@each_scaling
@pytest.mark.parametrize(("m", "k"), [(777, 1056), (70, 8200)])
def test_many_tiles(family, scaling, m, k):
    own, attrs = draw(family, (m,), (k,), (BF16, F32)), attributes(family, (k,), BF16)
    v = full(family, scaling)
    found = results(HANDLERS[-1], family, v, own, attrs)
    want = {name: found[name] for name in ("h", *family.extras)}
    same_results(found, expected(scaling, found["h"], 1) | want)
    less = results(HANDLERS[-2], family, v._replace(h=False), own, attrs)
    same_results(less, found)


@each_kind
@each_run
@pytest.mark.parametrize("k", LENGTHS)
def test_hard_rows_are_within_the_bound(kind, run, k):
    rng = np.random.default_rng(0)
    gamma, beta = (rng.standard_normal(k).astype(F32) for _ in range(2))
    parameters = (gamma, beta)[: 1 + (kind == "layernorm")]
    family = NORM_FWD[kind]
    cases = ((F32, False), (BF16, True), (F16, False))
    for i, (dtype, zero_centered) in enumerate(cases):
        if not picks(run, i, LENGTHS.index(k) % 3, 3):
            continue
        x = hard(k)
        x = x[np.max(np.abs(x), 1) < 6e4].astype(dtype)  # finite in float16
        attrs = attributes(family, (k,), dtype, zero_centered)
        h, *stats = plain(run, family, x, *parameters, **attrs)
        want = exact(kind, x, *parameters, zero_centered_gamma=zero_centered)
        close_to(h, want.h, forward_bound(want, dtype))
        mean_bound, rstd_bound = stats_bounds(want)
        close_to(stats[-1], want.rstd, rstd_bound)
        if kind == "layernorm":
            close_to(stats[0], want.mean, mean_bound)


values = st.one_of(
    st.floats(-1e4, 1e4, width=32), st.floats(2.0**-40, 2.0**40, width=32)
)


@examples
@given(
    st.sampled_from(RUNS),
    st.sampled_from(KINDS),
    st.sampled_from((F32, BF16)),
    st.lists(values, min_size=111, max_size=111),
    st.floats(-1e5, 1e5, width=32),
)
def test_any_rows_are_within_the_bound(run, kind, dtype, row, centre):
    x = np.array(row, F32)
    x = np.stack([x, x + F32.type(centre), x[::-1] * F32.type(0.01)]).astype(dtype)
    gamma, beta = np.roll(x[0], 7).astype(F32), np.roll(x[1], 3).astype(F32)
    parameters = (gamma, beta)[: 1 + (kind == "layernorm")]
    attrs = attributes(NORM_FWD[kind], (111,), F32)
    h, *_ = plain(run, NORM_FWD[kind], x, *parameters, **attrs)
    want = exact(kind, x, *parameters)
    close_to(h, want.h, forward_bound(want, F32))


@each_kind
@each_run
@pytest.mark.parametrize("k", LENGTHS)
def test_gradients_are_within_the_bound(kind, run, k):
    family, m = NORM_BWD[kind], 130
    for i, (dtypes, out) in enumerate(zip(DTYPES, OUTS, strict=True)):
        if not picks(run, i, LENGTHS.index(k), 5):
            continue
        zero_centered = i % 2 == 1
        own = draw(family, (m,), (k,), dtypes, seed=i)
        attrs = attributes(family, (k,), out, zero_centered)
        dx, *sums = plain(run, family, *own, **attrs)
        options = {"zero_centered_gamma": zero_centered, "out": out}
        want = gradients(kind, *own, **options)
        close_to(dx, want.dx, want.dx_bound)
        for got, sum_, bound in zip(sums, want.sums, want.sums_bound, strict=True):
            close_to(got, sum_, bound)
        if run is not REFERENCE:
            same_sums(kind, own, sums)


def same_sums(kind, own, sums):
    """dgamma and dbeta add the tokens in the one order of all sums over tokens."""
    dy, x, _, *mean, rstd = (a.astype(F32) for a in own)
    centred = x - mean[0][:, None] if mean else x
    same_bits(sums[0], token_sum(dy * (centred * rstd[:, None]), 1))
    if kind == "layernorm":
        same_bits(sums[1], token_sum(dy, 1))


@each_kind
def test_backward_is_the_derivative_of_forward(kind):
    """In float64 by finite differences, so that both share no formula."""
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, 4, 9))
    gamma, beta = rng.standard_normal((2, 9))
    found = exact(kind, x, gamma, beta)
    stats = (found.mean, found.rstd)[kind == "rmsnorm" :]
    want = gradients(kind, dy, x, gamma, *stats, out=F32)
    step = 1e-6
    for i in np.ndindex(x.shape):
        moved = [x.copy(), x.copy()]
        moved[0][i] += step
        moved[1][i] -= step
        high, low = (np.sum(exact(kind, a, gamma, beta).h * dy) for a in moved)
        assert abs((high - low) / (2 * step) - want.dx[i]) < 1e-6
    for i in range(9):
        moved = [gamma.copy(), gamma.copy()]
        moved[0][i] += step
        moved[1][i] -= step
        high, low = (np.sum(exact(kind, x, a, beta).h * dy) for a in moved)
        assert abs((high - low) / (2 * step) - want.sums[0][i]) < 1e-6


@each_family
@each_run
@pytest.mark.parametrize("k", [37, 1024])
def test_a_row_depends_on_that_row_only(family, run, k):
    """Not on its index, nor on the number of rows."""
    m = 70
    own = draw(family, (m,), (k,), (BF16, F32))
    attrs = attributes(family, (k,), F32)
    whole = plain(run, family, *own, **attrs)
    per_row = [dims.startswith("M..") for dims in family.operands.values()]
    kept = 1 if "dgamma" in family.extras else len(whole)
    for rows in (slice(3, 4), slice(1, 66), slice(None, None, -1)):
        cut = [a[rows] if on else a for a, on in zip(own, per_row, strict=True)]
        part = plain(run, family, *cut, **attrs)
        for a, b in zip(part[:kept], whole[:kept], strict=True):
            same_bits(a, b[rows])


@each_kind
@each_run
def test_equals_the_layers_of_nnx(kind, run):
    """LayerNorm without the fast variance, which is off by 0.96 on such rows."""
    k = 1024
    x = hard(k)
    rng = np.random.default_rng(0)
    gamma, beta = (rng.standard_normal(k).astype(F32) for _ in range(2))
    parameters = (gamma, beta)[: 1 + (kind == "layernorm")]
    if kind == "layernorm":
        layer = nnx.LayerNorm(
            k, epsilon=EPSILON, use_fast_variance=False, rngs=nnx.Rngs(0)
        )
        layer.bias[...] = jnp.asarray(beta)
    else:
        layer = nnx.RMSNorm(k, epsilon=EPSILON, rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.asarray(gamma)
    attrs = attributes(NORM_FWD[kind], (k,), F32)
    h, *_ = plain(run, NORM_FWD[kind], x, *parameters, **attrs)
    want = exact(kind, x, *parameters)
    close_to(h, np.asarray(layer(x)), sharded_bound(forward_bound(want, F32)))


@each_run
@pytest.mark.parametrize("k", [19, 111, 1000])
def test_a_constant_row_gives_beta(run, k):
    """Its mean is exactly itself, whatever the sum lost."""
    x = np.array([0.1, 1 / 3, 4e4 + 1 / 3, 1e-20, -7e15], F32)[:, None]
    x = np.repeat(x, k, 1)
    gamma, beta = np.full(k, 3, F32), np.arange(k, dtype=F32)
    attrs = attributes(NORM_FWD["layernorm"], (k,), F32)
    h, mean, _ = plain(run, NORM_FWD["layernorm"], x, gamma, beta, **attrs)
    same_bits(mean, x[:, 0])
    same_bits(h, np.broadcast_to(beta, x.shape))


@each_kind
def test_rows_that_are_not_finite_are_nan(kind):
    """With a NaN, an Inf, or squares that overflow; the other rows do not notice."""
    k = 40
    rows = np.random.default_rng(0).standard_normal((len(NOT_FINITE), k)).astype(F32)
    x = np.concatenate([rows, rows, rows[:1] * 1e18])
    for i, special in enumerate(NOT_FINITE.values()):
        x[i, 3:5] = special
    parameters = [np.ones(k, F32)] * (1 + (kind == "layernorm"))
    attrs = attributes(NORM_FWD[kind], (k,), F32)
    clean = plain(REFERENCE, NORM_FWD[kind], x[len(rows) :], *parameters, **attrs)
    assert all(np.isfinite(a).all() for a in clean)
    first = None
    for run in (REFERENCE, *HANDLERS):
        h, *stats = plain(run, NORM_FWD[kind], x, *parameters, **attrs)
        same_bits(h[: len(rows)], np.full_like(rows, np.nan))
        same_bits(stats[-1][: len(rows)], np.full(len(rows), np.nan, F32))
        same_bits(stats[0], np.where(np.isnan(stats[0]), F32.type(np.nan), stats[0]))
        if run is REFERENCE:
            same_bits(h[len(rows) :], clean[0])
            continue
        first = first or [h, *stats]
        for a, b in zip([h, *stats], first, strict=True):
            same_bits(a, b)


@each_kind
def test_subnormal_inputs_count_as_zero(kind):
    k = 40
    tiny = np.where(np.arange(k) % 2, 1e-39, -1e-40).astype(F32)
    x = np.stack([tiny, np.where(np.arange(k) < 3, np.float32(2.0**-120), tiny)])
    flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(F32)
    parameters = [np.full(k, 2, F32), tiny][: 1 + (kind == "layernorm")]
    for run in (REFERENCE, Implementation("reference", ieee=True), *HANDLERS):
        found = {}
        for epsilon in (EPSILON, 1e-40, 0.0):
            attrs = attributes(NORM_FWD[kind], (k,), F32, epsilon=epsilon)
            found[epsilon] = plain(run, NORM_FWD[kind], x, *parameters, **attrs)
            want = plain(run, NORM_FWD[kind], flushed, *parameters, **attrs)
            for a, b in zip(found[epsilon], want, strict=True):
                same_bits(a, b)
        for a, b in zip(found[1e-40], found[0.0], strict=True):
            same_bits(a, b)


@each_kind
@each_run
def test_a_row_without_variance_and_epsilon_is_nan(kind, run):
    """0 / 0, as in nnx; rstd is the infinity that says why."""
    x = np.zeros((2, 19), F32)
    x[1] = np.arange(19)
    parameters = [np.ones(19, F32)] * (1 + (kind == "layernorm"))
    attrs = attributes(NORM_FWD[kind], (19,), F32, epsilon=0.0)
    h, *stats = plain(run, NORM_FWD[kind], x, *parameters, **attrs)
    assert np.isnan(h[0]).all()
    assert np.isfinite(h[1]).all()
    assert stats[-1][0] == np.inf


@each_run
def test_a_row_without_elements(run):
    x, none = np.zeros((3, 0), F32), np.zeros(0, F32)
    attrs = attributes(NORM_FWD["layernorm"], (0,), F32)
    h, mean, rstd = plain(run, NORM_FWD["layernorm"], x, none, none, **attrs)
    assert h.shape == (3, 0)
    same_bits(mean, np.full(3, np.nan, F32))
    same_bits(rstd, np.full(3, np.nan, F32))


@pytest.mark.parametrize("epsilon", [-1e-6, np.inf, np.nan, 1e39])
def test_bad_epsilon(epsilon):
    x, one = jnp.ones((2, 4)), jnp.ones(4)
    attrs = attributes(NORM_FWD["rmsnorm"], (4,), F32, epsilon=float(epsilon))
    rule = "norm_fwd_rmsnorm: epsilon must be finite in float32 and >= 0, got "
    with pytest.raises(ValueError, match=rule):
        NORM_FWD["rmsnorm"].ops[Variant()](x, one, **attrs)


def test_jit_and_x64_change_nothing():
    own = draw(NORM_FWD["layernorm"], (7,), (111,), (BF16, F32))
    attrs = attributes(NORM_FWD["layernorm"], (111,), BF16)
    op = NORM_FWD["layernorm"].ops[Variant()]
    want = op(*own, **attrs)
    with jax.enable_x64(True):
        got = jax.jit(lambda *a: op(*a, **attrs))(*own)
    for a, b in zip(got, want, strict=True):
        same_bits(a, np.asarray(b))
