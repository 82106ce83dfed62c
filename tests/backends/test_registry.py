"""Which kernel is generated, once, and what happens where none is."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from _fake import TARGET, Fake, X, configure, text

import te_flax as te
from te_flax.backends import (
    KernelBackend,
    agreement,
    register_backend,
    registry,
    reset,
)
from te_flax.ops import _extension, _jit
from te_flax.ops._report import rows
from te_flax.ops.amax import AMAX

OPS = ("amax",)
NATIVE = _extension.has("amax", "cpu")


def add(*args, **options) -> Fake:
    backend = Fake(*args, **options)
    register_backend(backend, OPS)
    return backend


def row(op="amax"):
    return next(r for r in rows() if (r.op, r.platform) == (op, "cpu"))


def test_off_by_default():
    backend, before = add(), text(AMAX, X)
    assert TARGET not in before
    assert not backend.asked
    assert "jit" not in row().why


def test_by_name_it_runs_or_says_why():
    backend = add()
    with te.kernels("amax=jit"):
        assert TARGET in text(AMAX, X)
        assert row().runs == "jit"
        assert "fake 1.0 | 1 config: 1 compiled" in row().why
        backend.missing = "not here"
        match = "amax=jit was.*fake: not here; use"
        with pytest.raises(NotImplementedError, match=match):
            text(AMAX, X)
        assert row()[2:] == ("error", "not here")
    backend.missing, backend.refuses = None, "K % 32 = 8"
    with te.kernels("amax=jit"), pytest.raises(NotImplementedError, match="K % 32 = 8"):
        text(AMAX, X)
    with te.kernels("amax_to_scale=jit"):
        assert row("amax_to_scale").why == "no backend generates kernels for it"


def test_the_last_backend_is_asked_first_and_the_others_after_it():
    first, last = add("first"), add("last", refuses="not that")
    with te.kernels("amax=jit"):
        text(AMAX, X)
        assert (len(first.built), len(last.built)) == (1, 0)
        first.missing = "gone"
        with pytest.raises(NotImplementedError, match="last: not that; first: gone"):
            text(AMAX, X)
    replaced = add("last")
    with te.kernels("amax=jit"):
        text(AMAX, X)
    assert replaced.built


def test_where_supported_it_is_preferred_else_native(monkeypatch):
    configure(monkeypatch, jit="1")
    backend = add(refuses="K % 32 = 8")
    assert TARGET not in text(AMAX, X)
    backend.missing = "not installed"
    why = "handler te_flax.amax (jit: not installed)"
    if NATIVE:
        assert row()[2:] == ("native", why)
    backend.missing = backend.refuses = None
    assert TARGET in text(AMAX, X)
    with te.kernels("amax=native" if NATIVE else "amax=reference"):
        assert TARGET not in text(AMAX, X)
    assert TARGET not in text(AMAX, X[:0])
    with (
        te.kernels("amax=jit"),
        pytest.raises(NotImplementedError, match="there are no elements; use"),
    ):
        text(AMAX, X[:0])


def test_a_kernel_is_built_once_by_eight_threads():
    backend = add()
    types = (jax.ShapeDtypeStruct((8,), jnp.float32),)
    results = (jax.ShapeDtypeStruct((2,), jnp.float32),)

    def find(_):
        return registry.resolve("amax", "cpu", types, results, {}, False)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(find, range(8)))
    assert (
        len({getattr(k, "name", k) for k in found})
        == len(backend.built)
        == len(backend.named)
        == 1
    )


def test_a_failure_is_kept_said_once_and_forgotten_on_demand(monkeypatch, caplog):
    configure(monkeypatch, jit="1")
    backend = add(fails="line one\nline two")
    for _ in range(2):
        assert TARGET not in text(AMAX, X)
    assert len(backend.built) == 1
    said = [r.message for r in caplog.records]
    assert said == ["amax: no kernel of fake: failed: RuntimeError: line one"]
    assert (
        "1 config: 1 failed: RuntimeError: line one"
        in registry.describe("amax", "cpu")[1]
    )
    with (
        te.kernels("amax=jit"),
        pytest.raises(NotImplementedError, match="line one; use"),
    ):
        text(AMAX, X)
    backend.fails = None
    reset()
    assert TARGET in text(AMAX, X)
    assert len(backend.built) == 2


@pytest.mark.parametrize("method", ["available", "supports", "version"])
def test_a_faulty_backend_stops_no_run(monkeypatch, caplog, method):
    configure(monkeypatch, jit="1")
    backend = add()

    def broken(*_):
        raise AttributeError("no such thing\nat all")

    monkeypatch.setattr(backend, method, broken)
    for _ in range(2):
        assert TARGET not in text(AMAX, X)
    said = [r.message for r in caplog.records]
    assert said == ["amax: asking fake failed: AttributeError: no such thing"]
    match = "fake: failed: AttributeError: no such thing; use"
    with te.kernels("amax=jit"):
        with pytest.raises(NotImplementedError, match=match):
            text(AMAX, X)
        if method != "supports":
            assert row()[2:] == ("error", "failed: AttributeError: no such thing")
    assert te.backends.agree()


def test_a_backend_in_the_place_of_another_has_no_failures(monkeypatch):
    configure(monkeypatch, jit="1")
    add(fails="no compiler")
    assert TARGET not in text(AMAX, X)
    replaced = add()
    assert registry.describe("amax", "cpu") == (True, "fake 1.0")
    assert TARGET in text(AMAX, X)
    assert len(replaced.built) == 1
    add("other", fails="not here")
    assert TARGET in text(AMAX, X)
    add()
    kept = [e.error for e in registry._entries.values()]
    assert "failed: RuntimeError: not here" in kept  # that is another's


def test_a_kernel_that_another_process_lacks_is_not_used(monkeypatch, caplog):
    configure(monkeypatch, jit="1")
    backend = add()
    assert te.backends.agree()
    why = "process 1: failed: OSError: disk full"
    asked = []

    def settle(name, error):
        asked.append((name, error))
        return why

    monkeypatch.setattr(agreement, "settle", settle)
    assert TARGET in text(AMAX, X)  # a program of its own
    monkeypatch.setattr(_jit, "_is_shared", lambda ctx: True)
    for _ in range(2):
        assert TARGET not in text(AMAX, X)
    assert asked == [(backend.named[0], "")]
    assert [r.message for r in caplog.records] == [f"amax: no kernel of fake: {why}"]
    assert registry.describe("amax", "cpu") == (True, f"fake 1.0 | 1 config: 1 {why}")
    with te.kernels("amax=jit"), pytest.raises(NotImplementedError, match=why):
        text(AMAX, X)
    reset()
    monkeypatch.setattr(agreement, "settle", lambda name, error: error)
    assert TARGET in text(AMAX, X)
    assert len(backend.built) == 1


def test_an_interrupted_build_is_no_failure(monkeypatch):
    backend = add()

    def build(key, stem):
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "build", build)
    with te.kernels("amax=jit"), pytest.raises(KeyboardInterrupt):
        text(AMAX, X)
    assert not registry._entries


def test_reasons_are_logged_on_demand_once_each(monkeypatch, caplog):
    backend = add(refuses="it is raining")
    for warn, expected in (("", 0), ("1", 1)):
        configure(monkeypatch, jit="1", jit_warn=warn)
        with caplog.at_level(logging.WARNING, "te_flax"):
            text(AMAX, X)
            text(AMAX, X)
        assert len(caplog.records) == expected
    assert (
        "amax: no kernel is generated at run time: fake: it is raining" in caplog.text
    )
    backend.refuses = "it is snowing"
    text(AMAX, X)
    assert len(caplog.records) == 2


def test_the_name_changes_with_all_that_the_code_depends_on():
    backend = add()
    seen = set()

    def name(x=X):
        with te.kernels("amax=jit"):
            program = text(AMAX, x)
        return program.split(TARGET)[1].split("(")[0]

    seen.add(name())
    assert name(jnp.ones((3, 5))) in seen  # shapes are no part of it
    seen.add(name(X.astype(jnp.bfloat16)))
    backend.source = "2"
    seen.add(name())
    backend.release = "1.1"
    seen.add(name())
    assert len(seen) == 4
    assert {TARGET + n for n in seen} == set(backend.named)  # each is there


def test_the_choice_is_part_of_the_jit_key():
    add()
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return AMAX(x)[0]

    f.lower(X)
    with te.kernels("amax=jit"):
        assert TARGET in f.lower(X).as_text()
    assert TARGET not in f.lower(X).as_text()
    assert len(traces) == 2


def test_an_exported_program_has_kernels_by_name_only(monkeypatch):
    configure(monkeypatch, jit="1")
    add()
    allowed = [jax.export.DisabledSafetyCheck.custom_call("te_flax.amax")]
    exported = jax.export.export(jax.jit(lambda x: AMAX(x)), disabled_checks=allowed)(X)
    assert TARGET not in exported.mlir_module()
    with te.kernels("amax=jit"), pytest.raises(ValueError, match=TARGET):
        jax.export.export(jax.jit(lambda x: AMAX(x)))(X)


def test_processes_must_have_agreed(monkeypatch):
    from jax.experimental import multihost_utils

    configure(monkeypatch, jit="1")
    backend = add()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert registry.why_not(backend, False) is None
    assert TARGET in text(AMAX, X)  # on this process's device alone
    assert "call te.backends.agree()" in (registry.why_not(backend, True) or "")
    theirs = {}
    gather = lambda mine: [mine, theirs.get("words", mine)]
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(_jit, "_is_shared", lambda ctx: True)
    assert te.backends.agree()
    assert registry.why_not(backend, True) is None
    add("another")
    changed = registry.why_not(backend, True) or ""
    assert "would generate as it is now: call te.backends.agree() in each" in changed
    assert te.backends.agree()
    assert registry.why_not(backend, True) is None
    monkeypatch.setattr(registry, "arch", lambda platform: ("sm_100a", ""))
    assert "as it is now" in (registry.why_not(backend, True) or "")  # another GPU
    theirs["words"] = [0] * 8
    assert not te.backends.agree()
    assert (
        registry.why_not(backend, True)
        == "the processes differ in what they would generate"
    )
    assert TARGET not in text(AMAX, X)


def test_programs_of_other_processes_too_are_told_apart(monkeypatch):
    """By their devices; where these are not known, they may be anyone's."""

    def shared(**context):
        module = SimpleNamespace(axis_context=SimpleNamespace(**context))
        return _jit._is_shared(SimpleNamespace(module_context=module))

    def devices(*processes):
        return tuple(SimpleNamespace(process_index=i) for i in processes)

    mesh = jax.make_mesh((8,), ("d",))
    assert not shared(device_assignment=devices(0, 1))  # one process
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not shared(mesh=mesh)
    assert shared(mesh=mesh.abstract_mesh)
    assert not shared(device_assignment=devices(0, 0))
    assert shared(device_assignment=devices(0, 1))
    assert shared(device_assignment=devices(1))
    assert shared(device_assignment=None)


def test_an_explicit_mesh_of_one_process_needs_no_other(monkeypatch):
    """Within its shard_map nothing says which devices the program has."""
    configure(monkeypatch, jit="1")
    add()
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert TARGET in text(AMAX, x)


def test_bad_arguments():
    with pytest.raises(
        TypeError, match="register_backend: backend must be a KernelBackend"
    ):
        register_backend(object(), OPS)
    with pytest.raises(
        TypeError, match=r"register_backend: ops must .* got 'amax'; write"
    ):
        register_backend(Fake(), "amax")
    for ops in ((3,), 3, [None]):
        with pytest.raises(TypeError, match="register_backend: ops must be a tuple of"):
            register_backend(Fake(), ops)
    with pytest.raises(ValueError, match="backend must have a name, got None; set na"):
        register_backend(KernelBackend(), OPS)
    wrong = Fake()
    wrong.platform = "gpu"
    match = "backend must have the platform 'cpu' or 'cuda', got 'gpu'; set platform"
    with pytest.raises(ValueError, match=match):
        register_backend(wrong, OPS)
    with pytest.raises(ValueError, match="ensure: names must be a kernel on disk in"):
        te.backends.ensure(["te_flax.jit.amax.0"])
    with pytest.raises(TypeError, match="ensure: names must be a list of names"):
        te.backends.ensure("a")
    base = KernelBackend()
    base.name = "base"
    key = registry.JitKey("amax", "cpu", "", (), (), ())
    for call in (lambda: base.build(key, None), lambda: base.load(None)):
        with pytest.raises(NotImplementedError, match="base: no kernel is"):
            call()


def test_import_loads_no_backend():
    code = "import sys, te_flax\n"
    code += "print([m for m in sys.modules if 'cute' in m or 'tvm' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_several_auto_axes_are_an_error_by_name():
    add()
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3)
    spec = jax.P("a")
    f = jax.shard_map(
        lambda x: AMAX(x)[0], mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"}
    )
    with (
        te.kernels("amax=jit"),
        pytest.raises(NotImplementedError, match="amax=jit inside"),
    ):
        jax.jit(f).lower(X)
