"""Loading the compiled modules: good, absent, corrupt, stale, too new, not wanted."""

import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_flax._version import __version__
from te_flax.ops import _extension

ROOT = Path(__file__).parent.parent
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
LOADER = ("__init__.py", "_version.py", "config.py", "errors.py", "ops/_extension.py")
SHOW = "from te_flax.ops import _extension as e; print(e.has('amax', 'cpu'), e.{})"

FAKE = """
def build_info():
    made = {{"version": {version!r}, "ffi_api": {api}}}
    return {{"cuda": "13.0.1", "archs": "90a", **made}}
def registrations(): return {{}}
def simd_level(): return "base"
"""


def fake(version=__version__, api=(0, 1)):
    return FAKE.format(version=version, api=api)


@pytest.fixture
def package(tmp_path):
    """The loader and what it imports, in a copy that tests may spoil."""
    for name in LOADER:
        target = tmp_path / "te_flax" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "te_flax" / name, target)
    (tmp_path / "te_flax" / "__init__.py").write_text("")
    (tmp_path / "te_flax" / "ops" / "__init__.py").write_text("")
    return tmp_path / "te_flax"


def run(package, show="simd_level()", code=None, **env):
    """Imports the copy in a process of its own; returns (status, stdout, stderr)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TE_FLAX_")}
    done = subprocess.run(
        [sys.executable, "-c", code or SHOW.format(show)],
        env=clean | {"PYTHONPATH": str(package.parent), **env},
        cwd=package.parent,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_the_module_is_there():
    """Else every test of a handler would silently test the references."""
    assert _extension.build_info()["cpu"], _extension.why_not("amax", "cpu")
    assert _extension.build_info()["version"] == __version__
    assert _extension.simd_level() in ("base", "avx2", "avx512")


def test_every_handler_of_the_table_is_registered():
    table = re.findall(
        r"^X\((\w+),", (ROOT / "csrc/common/handlers.def").read_text(), re.MULTILINE
    )
    assert table
    assert _extension.load().handlers["cpu"] == set(table)


def test_unknown_handler():
    assert not _extension.has("no_such", "cpu")
    assert _extension.why_not("no_such", "cpu") == (
        "no handler no_such is compiled for cpu"
    )


def test_cuda_is_not_loaded_without_a_cuda_backend():
    if importlib.util.find_spec("jax_cuda13_plugin"):
        pytest.skip("jax has a CUDA backend")
    assert "jax has no CUDA backend" in _extension.why_not("amax", "cuda")
    assert "te_flax._cuda" not in sys.modules


def test_missing_module_is_logged_and_reported(package):
    (package / "_build_info.json").write_text(
        '{"cpu": false, "cuda": false, "reason": "no C++ compiler was found"}'
    )
    status, out, err = run(package, "why_not('amax', 'cpu')")
    assert status == 0
    assert out == (
        "False te_flax._C is not built (no C++ compiler was found); "
        "install it with a C++ compiler"
    )
    assert "all ops run as plain JAX" in err


@pytest.mark.parametrize("text", ['{"cpu": tr', "[1]", "", "\0"])
def test_corrupt_build_info(package, text):
    file = package / "_build_info.json"
    file.write_text(text)
    status, out, err = run(package, "why_not('amax', 'cpu')")
    assert status == 0, err
    rule = f"te_flax: {file} must be the JSON object that the installer wrote, got "
    assert f"{rule}" in err
    assert rule in out
    assert "; reinstall te_flax" in out
    (package / "_C.py").write_text(fake())  # sound: it loads, the file is only logged
    status, out, err = run(package)
    assert (status, out) == (0, "False base"), err
    assert rule in err


def test_corrupt_module(package):
    file = package / f"_C{SUFFIX}"
    file.write_bytes(b"\x7fELF, but cut short")
    status, _, err = run(package)
    assert status == 1
    assert f"ImportError: te_flax: {file} must load into this Python, got Import" in err
    assert "; reinstall te_flax, or set TE_FLAX_KERNELS='*=reference'" in err


def test_corrupt_module_stops_the_whole_package(tmp_path):
    """No importer between the loader and `import te_flax` swallows the error."""
    package = tmp_path / "te_flax"
    shutil.copytree(
        ROOT / "te_flax", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (package / f"_C{SUFFIX}").write_bytes(b"\x7fELF, but cut short")
    status, _, err = run(package, code="import te_flax")
    assert status == 1
    assert "must load into this Python" in err
    code = "import te_flax as te; te.load_recipe('mxfp8'); print('imported')"
    status, out, err = run(package, code=code, TE_FLAX_KERNELS="*=reference")
    assert (status, out) == (0, "imported"), err


def test_stale_module(package):
    (package / "_C.py").write_text(fake(version="0.0.9"))
    status, _, err = run(package)
    assert status == 1
    rule = f"_C.py must be of te_flax {__version__}, as the Python files are, got 0.0.9"
    assert f"{rule}; reinstall te_flax" in err


@pytest.mark.parametrize(("api", "shown"), [((0, 99), "0.99"), ((1, 0), "1.0")])
def test_module_for_a_newer_ffi_api(package, api, shown):
    (package / "_C.py").write_text(fake(api=api))
    status, _, err = run(package)
    assert status == 1
    rule = r"_C\.py must be built for at most XLA FFI API 0\.\d+, that of jaxlib [\d.]+"
    assert re.search(rf"ImportError: te_flax: .*{rule}, got {shown}; reinstall", err)


def test_module_for_an_older_ffi_api_loads(package):
    (package / "_C.py").write_text(fake(api=(0, 1)))
    assert run(package)[:2] == (0, "False base")


@pytest.mark.parametrize(
    ("kernels", "loads"),
    [
        ("*=reference", False),
        ("gemm*=native, *=reference", False),
        ("*=reference,gemm*=reference", False),
        ("*=reference,gemm*=auto", True),
        ("gemm*=reference", True),
    ],
)
def test_references_only(kernels, loads):
    assert _extension._references_only(kernels) is not loads


def test_references_only_imports_without_the_module(package):
    (package / f"_C{SUFFIX}").write_bytes(b"corrupt")
    status, out, err = run(
        package, "why_not('amax', 'cpu')", TE_FLAX_KERNELS="*=reference"
    )
    assert (status, err) == (0, "")
    assert out.startswith("False TE_FLAX_KERNELS lets references run only")


@pytest.fixture
def compiled(package):
    """The copy with the compiled module of this environment."""
    origin = importlib.import_module("te_flax._C").__file__
    assert origin
    (package / Path(origin).name).symlink_to(origin)
    return package


@pytest.mark.parametrize("percent", [10, 50, 90])
@pytest.mark.parametrize("name", ["_C", "_cuda"])
def test_truncated_module(cuda_plugin, name, percent):
    """The dynamic linker would map the file and die of SIGBUS."""
    origin = importlib.import_module("te_flax._C").__file__
    assert origin
    whole = Path(origin).read_bytes()
    part = whole[: len(whole) * percent // 100]
    file = cuda_plugin / f"{name}{SUFFIX}"
    (cuda_plugin / f"{name}.py").unlink(missing_ok=True)
    file.write_bytes(part)
    status, _, err = run(cuda_plugin)
    assert status == 1
    rule = f"ImportError: te_flax: {file} must be a whole file, got {len(part)} of at "
    assert f"{rule}least {len(whole)} bytes; reinstall te_flax, or set TE_FLAX" in err
    status, out, err = run(cuda_plugin, TE_FLAX_KERNELS="*=reference")
    assert (status, out) == (0, "False none"), err


@pytest.mark.parametrize("keep", [5, 63, 64, 200])
def test_module_cut_within_its_headers(tmp_path, keep):
    whole = Path(importlib.import_module("te_flax._C").__file__ or "").read_bytes()
    file = tmp_path / "cut.so"
    file.write_bytes(whole[:keep])
    assert _extension._cut_short(file).startswith(f"{keep} of at least ")
    # Without section headers, only the segments tell the end.
    file.write_bytes(whole[:40] + bytes(8) + whole[48:60] + bytes(4) + whole[64:4096])
    assert _extension._cut_short(file).startswith("4096 of at least ")
    file.write_bytes(whole)
    assert _extension._cut_short(file) == ""


def test_simd_by_name(compiled):
    assert run(compiled, TE_FLAX_SIMD="base")[:2] == (0, "True base")


def test_unknown_simd(compiled):
    status, _, err = run(compiled, TE_FLAX_SIMD="sse9")
    assert status == 1
    assert re.search(
        r"ValueError: te_flax: TE_FLAX_SIMD must be one of auto, .*base on this CPU, "
        r"got 'sse9'; unset it",
        err,
    )


@pytest.fixture
def cuda_plugin(package):
    """A package that looks like jax's CUDA plugin."""
    (package.parent / "jax_cuda13_plugin").mkdir()
    (package.parent / "jax_cuda13_plugin" / "__init__.py").write_text("")
    (package / "_C.py").write_text(fake())
    return package


def test_corrupt_cuda_module(cuda_plugin):
    (cuda_plugin / f"_cuda{SUFFIX}").write_bytes(b"corrupt")
    status, _, err = run(cuda_plugin)
    assert status == 1
    assert f"_cuda{SUFFIX} must load into this Python" in err


def test_missing_cuda_module(cuda_plugin):
    (cuda_plugin / "_build_info.json").write_text(
        '{"cpu": true, "cuda": false, "reason": "no nvcc was found"}'
    )
    status, out, _ = run(cuda_plugin, "why_not('amax', 'cuda')")
    assert (status, out) == (
        0,
        "False te_flax._cuda is not built (no nvcc was found); "
        "install te_flax where nvcc is on PATH",
    )


def test_cuda_module_for_another_cuda(cuda_plugin):
    (cuda_plugin / "_cuda.py").write_text(fake().replace("13.0.1", "12.4.1"))
    status, out, _ = run(cuda_plugin, "why_not('amax', 'cuda')")
    assert status == 0
    assert "is built with CUDA 12.4.1 and jax runs CUDA 13" in out


class _Gpu:
    def __init__(self, capability):
        self.compute_capability = capability

    def __str__(self):
        return "cuda:0"


@pytest.mark.parametrize(("capability", "fits"), [("9.0", True), ("12.0", False)])
def test_gpu_without_an_image(monkeypatch, capability, fits):
    loaded = _extension.Loaded({}, {}, {"cuda_archs": ["89", "90a", "100a"]})
    monkeypatch.setattr(_extension, "load", lambda: loaded)
    gpus = [_Gpu(capability)]
    monkeypatch.setattr(_extension.jax, "local_devices", lambda backend: gpus)
    why = _extension._no_image.__wrapped__()
    assert (why == "") is fits
    if not fits:
        assert "has code for sm_89, sm_90a, sm_100a and cuda:0 is sm_120" in why
        assert "TE_FLAX_CUDA_ARCHS=120" in why


@pytest.mark.parametrize(
    ("arch", "runs"),
    [
        ("80", "80 86 89"),
        ("86", "86 89"),
        ("89", "89"),
        ("90", "90"),
        ("90a", "90"),
        ("100", "100 103"),
        ("100a", "100"),
        ("100f", "100 103"),
        ("103f", "103"),
        ("120f", "120 121"),
    ],
)
def test_which_devices_run_an_architecture(arch, runs):
    devices = ["75", "80", "86", "89", "90", "100", "103", "120", "121"]
    assert [d for d in devices if _extension._runs(arch, d)] == runs.split()


def test_stub_file_matches_the_module():
    stubgen = pytest.importorskip("nanobind.stubgen")
    generator = stubgen.StubGen(importlib.import_module("te_flax._C"))
    generator.put(generator.module)
    assert (ROOT / "te_flax" / "_C.pyi").read_text() == generator.get()
