"""CuTeDSL kernels: what is supported, and, with the DSL, what they compile to."""

import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _fake import configure
from _launch import DTYPES, arrays_of, launch, ptx, quantized, spec

import te_flax as te
from te_flax.backends import cutedsl, registry
from te_flax.backends.cutedsl import CuteDSL
from te_flax.ops import activation, mxfp8
from te_flax.ops._choice import REGISTRY
from te_flax.ops._fused import Variant
from te_flax.ops._report import rows
from te_flax.ops.mxfp8_values import quantize_values
from te_flax.testing.numerics import close_to, sum_bound
from te_flax.testing.patterns import patterns

BOTH = {"row_format": "e4m3", "col_format": "e4m3"}
ROW = mxfp8.QUANTIZE_MXFP8_ROW
ATTRS = {"row_format": "e4m3", "k_ndim": 1}
PARAMETERS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}


def call_of(name, shapes, dtype="bfloat16", arch="sm_90a", **attrs):
    """What the registry asks the backend about an op."""
    op = REGISTRY[name]
    given = {"row_format": "e4m3", "col_format": "e4m3", "k_ndim": 1}
    given |= {"out_dtype": dtype, "activation": "gelu", **PARAMETERS, **attrs}
    attrs = {n: given[n] for n in op.attrs}
    operands = tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)
    found = jax.eval_shape(lambda *a: op.reference(*a, **attrs), *operands)
    every = {**op.handler_attrs, **attrs}
    key = registry.JitKey(
        name,
        "cuda",
        arch,
        tuple(t.dtype.name for t in operands),
        tuple(t.dtype.name for t in found),
        tuple(sorted((k, v) for k, v in every.items() if k != "k_ndim")),
    )
    return registry.Call(key, operands, tuple(found), every)


BWD = "act_bwd_mxfp8_rowcol_dbias"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (("quantize_mxfp8_row", [(3, 96)]), None),
        (("quantize_mxfp8_row", [(3, 40)]), "K % 32 = 8"),
        (("quantize_mxfp8_rowcol", [(64, 96)]), None),
        (("quantize_mxfp8_rowcol", [(45, 96)]), "M % 32 = 13 with a copy along"),
        (("quantize_mxfp8_col", [(4104, 4096)]), "M % 32 = 8"),
        (("quantize_mxfp8_row", [(2, 3, 4, 8)]), "K % 32 = 8"),
        ((BWD, [(64, 96), (64, 1, 96)]), None),
        ((BWD, [(64, 40), (64, 1, 40)]), "K % 32 = 8"),
    ],
)
def test_only_whole_blocks_are_supported(call, why):
    found = CuteDSL().supports(call_of(*call))
    assert found is None if why is None else why in found


def test_what_else_is_refused():
    supports = CuteDSL().supports
    row = [(64, 96)]
    old = supports(call_of("quantize_mxfp8_row", row, arch="sm_80"))
    assert old == "sm_80 has no conversion to FP8"
    for arch in ("90a", "sm_", "sm_hopper"):
        odd = supports(call_of("quantize_mxfp8_row", row, arch=arch))
        assert odd == f"{arch!r} is no architecture such as sm_90a"
    gated = [(64, 96), (64, 2, 96)]
    name = "silu,linear"
    assert supports(call_of(BWD, gated, activation=name)) is None
    wide = supports(call_of(BWD, gated, "float32", activation=name))
    assert wide == "two slices of float32 do not fit into registers"
    clamped = supports(call_of(BWD, gated, activation="clamped_silu,clamped_linear"))
    assert clamped == "clamped_silu,clamped_linear is not generated"
    mixed = supports(call_of(BWD, gated, activation=name, out_dtype="float32"))
    assert mixed == "operands and h of bfloat16 and float32"
    deep = call_of("quantize_mxfp8_row", [(2, 3, 4, 8)], k_ndim=2)
    assert supports(deep) is None


def test_views_have_the_elements_of_the_op():
    for name, shapes in (
        ("quantize_mxfp8_rowcol_swizzled", [(96, 160)]),
        ("quantize_mxfp8_rowcol_rowcolvalues", [(2, 32, 64)]),
        ("quantize_dbias_mxfp8_row_dbias", [(45, 96)]),
        ("act_fwd_mxfp8_rowcol_h", [(2, 32, 2, 64)]),
        (BWD, [(64, 96), (64, 1, 96)]),
    ):
        gated = "silu,linear" if "fwd" in name else "gelu"
        call = call_of(name, shapes, activation=gated)
        view = CuteDSL().view(call)
        sides = (view.operands, call.operands), (view.results, call.results)
        for seen, types in sides:
            assert [np.prod(s) for s in seen] == [t.size for t in types]
        assert bool(view.workspace) == ("dbias" in name)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cutedsl.metadata, "version", missing)
    monkeypatch.setattr(registry, "arch", lambda platform: ("sm_90a", ""))
    cutedsl._versions.cache_clear()
    why = "nvidia-cutlass-dsl is not installed: pip install te_flax[cutedsl]"
    try:
        assert registry.describe("quantize_mxfp8_row", "cuda") == (False, why)
        x = jnp.ones((32, 64), jnp.bfloat16)
        with te.kernels("quantize=jit"):
            traced = jax.jit(lambda x: ROW(x, **ATTRS)).trace(x)
        with pytest.raises(
            NotImplementedError, match=re.escape(f"cutedsl: {why}; use")
        ):
            traced.lower(lowering_platforms=("cuda",))
    finally:
        cutedsl._versions.cache_clear()


def test_without_a_gpu_the_architecture_must_be_named(monkeypatch):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    monkeypatch.setattr(CuteDSL, "available", lambda self: None)
    why = registry.describe("quantize_mxfp8_row", "cuda")[1]
    assert why == "there is no GPU here; name one in TE_FLAX_JIT_ARCH"


def dsl():
    pytest.importorskip("cutlass", reason="needs te_flax[cutedsl]")


# What the definition calls a zero is one in these instructions, and in no others.
FTZ = {"mul.rn.ftz.f32", "add.rn.ftz.f32", "ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}
KERNELS = {
    "row": {"row_format": "e4m3"},
    "col_float32_noop": {"col_format": "e5m2", "dtype": "float32", "noop": True},
    "both_float16": BOTH | {"dtype": "float16", "row_format": "e5m2"},
    "swizzled": BOTH | {"swizzled": True},
    "values": BOTH | {"row_values": True, "col_values": True, "dtype": "float32"},
    "dbias_noop": BOTH | {"dbias": True, "noop": True},
    "gelu": BOTH | {"activation": "gelu", "h": True},
    "dswiglu": BOTH
    | {"activation": "silu,linear", "backward": True, "dbias": True, "h": True},
}


def x_of(of, m, k):
    """Every kind of number, and blocks without NaN and Inf."""
    dtype, rng = DTYPES[of.dtype], np.random.default_rng(0)
    if of.activation:
        return (3 * rng.standard_normal((m, k * of.read_slices))).astype(dtype)
    every = rng.permutation(patterns(dtype))
    every = every[np.isfinite(every.astype(np.float32))]
    x = np.resize(every, (m, k))
    x[-1] = np.resize(patterns(dtype)[::97], k)
    x[:, -32:] = rng.standard_normal((m, 32)).astype(dtype)
    return x


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_a_gpu_to_named_instructions(name, arch, tmp_path):
    dsl()
    text = ptx(spec(**KERNELS[name]), tmp_path, arch)
    assert f".target {arch}" in text
    assert set(re.findall(r"\b\w+[\w.]*\.ftz[\w.]*", text)) <= FTZ
    assert re.search(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f32", text)
    assert not re.search(r"\.local\b", text), "an array is not in registers"


@pytest.mark.parametrize("name", KERNELS)
def test_the_ptx_gives_the_bits_of_the_oracle(name, tmp_path):
    dsl()
    of = spec(**KERNELS[name])
    m = 45 if of.col_format is None else 160
    x = x_of(of, m, 160)
    text, arrays = ptx(of, tmp_path), arrays_of(of, x)
    got = launch(of, text, arrays)
    h = got.get("h", x)
    expected = quantized(of, h)
    if of.row_values:
        formats = {"row_format": of.row_format, "col_format": of.col_format}
        values = quantize_values(
            jnp.asarray(x), k_ndim=1, values=("row", "col"), **formats
        )
        expected = dict(zip(expected, map(np.asarray, values), strict=True))
    for result, wanted in expected.items():
        assert got[result].tobytes() == wanted.tobytes(), result
    if of.dbias:
        wide = h.astype(np.float64)
        finite = np.abs(wide).sum(0) < 2.0**127
        bound = sum_bound(m, np.abs(wide).sum(0))
        close_to(got["dbias"][finite], wide.sum(0)[finite], bound[finite])
    if of.noop:
        arrays["noop"][0] = np.nan
        kept = launch(of, text, arrays)
        assert all(kept[n].tobytes() == a.tobytes() for n, a in arrays.items())


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "name", [a for a in activation.ACTIVATIONS if "clamp" not in a]
)
def test_activations_in_ptx_are_near_their_reference(name, backward, tmp_path):
    """To about the roundings of one more operation: the interpreter's ex2 is exact."""
    dsl()
    of = spec(**BOTH, activation=name, backward=backward, h=True)
    x = x_of(of, 64, 64)
    arrays = arrays_of(of, x)
    got = launch(of, ptx(of, tmp_path), arrays)["h"].astype(np.float32)
    sliced = jnp.asarray(x).reshape(64, of.read_slices, 64)
    attrs = {"activation": name, "k_ndim": 1, **PARAMETERS}
    if backward:
        (expected,) = activation._backward(jnp.asarray(arrays["dy"]), sliced, **attrs)
    else:
        (expected,) = activation._forward(sliced, **attrs)
    expected = np.asarray(expected).reshape(got.shape)
    bound = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) * np.abs(expected)
    assert (np.abs(got - expected) <= bound + 2.0**-100).all()


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """Lowering for a GPU that is not here."""
    dsl()
    configure(monkeypatch, cache=str(tmp_path / "cache"), jit_arch="sm_90a")
    return tmp_path / "cache" / "jit"


def lowered(x, how="quantize_mxfp8*=jit"):
    with te.kernels(how):
        traced = jax.jit(lambda x: ROW(x, **ATTRS)).trace(x)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


X = jnp.ones((64, 64), jnp.bfloat16)


def test_one_compilation_serves_processes_shapes_and_threads(hopper, monkeypatch):
    with ThreadPoolExecutor(8) as threads:
        shapes = [(8 * i + 8, 32 * i + 32) for i in range(8)]
        xs = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
        texts = list(threads.map(lowered, xs))
    target = re.search(r"te_flax\.jit\.quantize_mxfp8_row\.\w+", texts[0])[0]
    assert all(f"@{target}(" in text for text in texts)
    assert [origin for _, origin, _ in registry.made()] == ["compiled"]
    (file,) = hopper.glob("*")
    assert file.stem == target
    for damage in (False, True):
        registry._entries.clear()
        registry._targets.clear()
        monkeypatch.setattr(CuteDSL, "register", lambda *_: None)  # it was, for ever
        if damage:
            start = file.read_bytes()[:9000]
            file.unlink()  # this process has mapped it
            file.write_bytes(start)
        assert target in lowered(X)
        origin = "compiled" if damage else "from disk"
        assert [origin for _, origin, _ in registry.made()] == [origin]


def test_a_broken_source_falls_back_or_says_its_first_line(hopper, monkeypatch, caplog):
    from te_flax.backends import cutedsl_launch

    def broken(*_):
        raise RuntimeError("unknown name 'warpp'\nin line 3")

    monkeypatch.setattr(cutedsl_launch, "compile_kernel", broken)
    with pytest.raises(NotImplementedError, match="failed: RuntimeError: unknown name"):
        lowered(X)
    configure(monkeypatch, cache=str(hopper.parent), jit_arch="sm_90a", jit="1")
    assert "te_flax.jit" not in lowered(X, "quantize=auto")
    assert len(caplog.records) == 1


def test_the_report_names_the_backend(hopper, monkeypatch):
    lowered(X)
    monkeypatch.setattr("te_flax.ops._report.platforms", lambda: ("cuda",))
    with te.kernels("quantize_mxfp8=jit"):
        found = {r.op: r for r in rows()}
    assert re.fullmatch(
        r"cutedsl 4\.8\S* via tvm-ffi 0\.1\S* \| 1 config: 1 compiled \(\d+\.\d s\)",
        found["quantize_mxfp8_row"].why,
    )
    assert found["quantize_mxfp8_col"].runs == "jit"
    family = activation.QUANTIZE_DBIAS.ops[
        Variant("mxfp8", ("row",), h=False, dbias=True)
    ]
    assert found[family.name].runs != "jit"
