"""Which implementation runs: kernels(), TE_FLAX_KERNELS, impl=, the report."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from _rmsnorm import RMS_FWD

from te_flax.ops import _choice, _extension, _gather_order, _sizes
from te_flax.ops._choice import current, how, kernels, parse
from te_flax.ops._report import Row, grouped, kernel_report, platforms, rows
from te_flax.ops._sizes import SizeClass
from te_flax.ops.amax import AMAX

NATIVE = _extension.has("amax", "cpu")
X = jnp.arange(8.0, dtype=jnp.float32)
MARK = "te_flax.amax"


def text(**options):
    return jax.jit(lambda x: AMAX(x, **options)).lower(X).as_text()


def test_the_last_match_wins():
    rules = parse("gemm*=reference, *_col=native,gemm_nn=auto")
    assert how("gemm_nt", rules) == "reference"
    assert how("gemm_nn", rules) == "auto"
    assert how("quantize_col", rules) == "native"
    assert how("amax", rules) == "auto"


@pytest.mark.parametrize("spec", ["amax", "amax=fast", "=native", "amax=native=2"])
def test_bad_rules(spec):
    with pytest.raises(ValueError, match=f"kernels: {spec} must be <op or glob>="):
        parse(spec)


def test_unknown_op():
    with (
        pytest.raises(
            ValueError, match="kernels: gem must match an op, got gem=native"
        ),
        kernels("gem=native"),
    ):
        pass


def test_a_name_covers_its_family():
    """The design's own example: ops are named gemm_nn and so on."""
    for family, some in (
        ("gemm", ("gemm_nn", "gemm_tt_mxfp8_bias")),
        ("quantize", ("quantize_row", "quantize_mxfp8_rowcol_swizzled_noop")),
        ("quantize_row", ("quantize_row", "quantize_row_noop")),
        ("amax", ("amax", "amax_to_scale")),
    ):
        with kernels(f"{family}=reference"):
            assert {how(op, current()) for op in some} == {"reference"}
            for other in ("dequantize", "quantize_rowcol"):
                if not other.startswith(f"{family}_"):
                    assert how(other, current()) == "auto"
    with pytest.raises(ValueError, match="kernels: gem"), kernels("gem=reference"):
        pass


def test_a_spec_that_is_no_string():
    text = "kernels: spec must be of type str, got 3 of int; write"
    with pytest.raises(TypeError, match=text), kernels(3):  # pyright: ignore[reportArgumentType]
        pass


def test_context_nests_and_restores():
    before = current()
    with kernels("amax=reference"):
        assert how("amax", current()) == "reference"
        with kernels("*=auto"):
            assert how("amax", current()) == "auto"
        assert how("amax", current()) == "reference"
        with pytest.raises(KeyError), kernels("amax=auto"):
            raise KeyError
        assert how("amax", current()) == "reference"
    assert current() == before
    assert hash(current()) is not None


def test_choice_is_part_of_the_jit_key():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return AMAX(x)[0]

    for _ in range(2):
        f(X)
    with kernels("am*=reference"):
        f(X)
        f(X)
    f(X)
    assert len(traces) == 2


def test_choice_sticks_to_the_trace():
    with kernels("amax=reference"):
        late = jax.jit(AMAX).trace(X)
        assert "impl=reference" in str(late.jaxpr)
        assert MARK not in text()
        with kernels("amax=auto"):
            assert (MARK in text()) == NATIVE
    assert MARK not in late.lower().as_text()  # lowered outside
    assert (MARK in text()) == NATIVE


def test_impl_argument_beats_the_context():
    inner = parse("amax=reference")
    assert MARK not in text(impl=inner)
    with kernels("amax=reference"):
        assert (MARK in text(impl=())) == NATIVE


def test_native_by_name_needs_a_handler():
    remedy = re.escape("use te.kernels('test_rmsnorm_fwd=auto') or reference")
    call = functools.partial(RMS_FWD, eps=1e-6)
    with kernels("*=native"), pytest.raises(NotImplementedError, match=remedy):
        call(jnp.ones((2, 4)), jnp.ones(4))
    with kernels("amax=jit"), pytest.raises(NotImplementedError, match="amax=jit was"):
        AMAX(X)


@pytest.fixture
def slower():
    """AMAX with a handler that was measured slower on the CPU below 16 elements."""

    def why(platform, *avals, **attrs):
        small = not avals or avals[0].size < 16
        return "XLA's fusion is faster" if platform == "cpu" and small else None

    object.__setattr__(AMAX, "prefers_reference", why)
    yield AMAX
    object.__setattr__(AMAX, "prefers_reference", None)


def test_a_measured_default_counts_for_auto_alone(slower):
    assert MARK not in text()
    large = jax.jit(lambda x: slower(x)).lower(jnp.ones(16)).as_text()
    assert (MARK in large) == NATIVE
    row = next(r for r in rows() if (r.op, r.platform) == ("amax", "cpu"))
    assert row == Row("amax", "cpu", "reference", "XLA's fusion is faster")
    if NATIVE:
        with kernels("amax=native"):
            assert MARK in text()
            assert {r.runs for r in rows() if r.op == "amax"} == {"native"}


def test_the_measured_size_classes():
    """Each is of one op, not of its family, and of a dtype that this op takes."""
    for c in _sizes.REFERENCE:
        first = next(iter(_choice.REGISTRY[c.op].dtypes.values()))
        assert c.dtype in [jnp.dtype(t).name for t in first]

    def why(op, rows, dtype, platform="cuda"):
        avals = (jax.ShapeDtypeStruct((), jnp.float32),)
        avals += (jax.ShapeDtypeStruct((rows, 1024), dtype),)
        return _sizes.why(op, platform, avals)

    assert why("act_fwd", 64, jnp.bfloat16)
    assert why("dequantize_mxfp8_row", 64, jnp.float8_e4m3fn)
    assert not why("act_fwd", 65, jnp.bfloat16)
    assert not why("act_fwd_rowcol", 64, jnp.bfloat16)
    assert not why("act_fwd", 64, jnp.bfloat16, "cpu")


def test_a_measured_size_class_counts_for_auto_alone(monkeypatch):
    if not NATIVE:
        pytest.skip("needs the compiled extension")
    classes = (
        SizeClass("cpu", "amax", "float32", 16),
        SizeClass("cuda", "amax", "float32", 1 << 20),
    )
    monkeypatch.setattr(_sizes, "REFERENCE", classes)

    def native(size, dtype=jnp.float32):
        return MARK in jax.jit(lambda x: AMAX(x)).lower(jnp.ones(size, dtype)).as_text()

    assert not native(15)
    assert native(16)
    assert native(15, jnp.bfloat16)
    with kernels("amax=native"):
        assert native(15)
    row = next(r for r in rows() if (r.op, r.platform) == ("amax", "cpu"))
    small = "reference for fewer than 16 elements of float32"
    assert row == Row("amax", "cpu", "native", f"handler te_flax.amax; {small}")


def test_environment(monkeypatch):
    def use(spec):
        config = dataclasses.replace(_choice.CONFIG, kernels=spec)
        monkeypatch.setattr(_choice, "CONFIG", config)
        _choice.environment.cache_clear()

    try:
        use("amax=reference")
        assert MARK not in text()
        with kernels("amax=auto"):  # a context refines it
            assert (MARK in text()) == NATIVE
        for spec, error in (
            ("amox=reference", "TE_FLAX_KERNELS: amox must match an op"),
            ("amax", "TE_FLAX_KERNELS: amax must be <op or glob>="),
        ):
            use(spec)
            with pytest.raises(ValueError, match=error):
                AMAX(X)
    finally:
        monkeypatch.undo()
        _choice.environment.cache_clear()


def test_report(capsys):
    found = {(r.op, r.platform): r for r in rows()}
    assert found["amax", "cpu"].runs == ("native" if NATIVE else "reference")
    assert {r.platform for r in rows()} == set(platforms())
    assert "cpu" in platforms()
    assert ("cuda" in platforms()) == (jax.default_backend() == "gpu")
    assert found["gemm_nn", "cpu"] == Row(
        "gemm_nn", "cpu", "reference", "exact upcast and XLA's dot"
    )
    with kernels("amax=reference,gemm_nn=native,gemm_nt=jit"):
        found = {(r.op, r.platform): r for r in rows()}
        assert found["amax", "cpu"].why == "amax=reference was asked for"
        assert found["gemm_nn", "cpu"].runs == "error"
        assert found["gemm_nt", "cpu"].runs == "error"
        kernel_report()
    printed = capsys.readouterr().out
    assert "rules: amax=reference,gemm_nn=native,gemm_nt=jit" in printed
    assert re.search(
        r"^amax.* +cpu +reference +amax=reference was asked", printed, re.M
    )
    assert "leaves two or more axes Auto, auto runs the reference" in printed


def test_report_fits_a_screen(capsys):
    kernel_report()
    table = capsys.readouterr().out
    gather = len(_gather_order.lines()) + 1
    assert len(table.splitlines()) <= 42 * len(platforms()) + gather
    gemms = sum(op.startswith("gemm_") for op in _choice.REGISTRY)
    assert f"gemm_* ({gemms}) " in table
    assert "gemm_nn" not in table


def test_rows_are_joined_only_where_equal():
    names = ("a", "a_b", "a_b_c", "d_e", "d_f")
    alike = [Row(op, "cpu", "native", "why") for op in names]
    assert [r.op for r in grouped(alike)] == ["a, a_* (3)", "d_* (2)"]
    alike[1] = alike[1]._replace(runs="error")
    assert grouped(alike)[:3] == alike[:3]
    assert [r.op for r in grouped(alike)[3:]] == ["d_* (2)"]


def test_eager_calls_compile_once():
    op = functools.partial(AMAX, impl=parse("amax=reference"))
    x = jnp.ones((3, 7, 5))
    op(x)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        import logging

        seen = []
        patch.setattr(
            logging.Logger, "handle", lambda self, record: seen.append(record)
        )
        op(x)
    assert not [r for r in seen if "Compiling" in r.getMessage()]
