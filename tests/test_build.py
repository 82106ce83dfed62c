"""Installs from a copy of the tree: wheel, editable, sdist, no compiler, broken."""

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREE = ("csrc", "recipes", "te_flax")
FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup_ext.py")
PROBE = """
import json, te_flax as te
from te_flax.ops import _extension as e
te.load_recipe("mxfp8")
print(json.dumps([te.__file__, e.has("quantize_tensor", "cpu"), e.build_info()]))
"""
pytestmark = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "c++")), reason="needs a C++ compiler"
)


NVCC = """#!/bin/sh
echo 'nvcc fatal error: broken on purpose'
exit 1
"""


def copy_tree(target):
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.json")
    for name in TREE:
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a build reads, with a broken nvcc.

    The tests share its build folder, so one of them pays for the compilation.
    """
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    (tree / "nvcc").write_text(NVCC)
    (tree / "nvcc").chmod(0o755)
    return tree


def run(*command, cwd, **env):
    """Runs a command without what this environment says of te_flax."""
    ours = ("TE_FLAX_", "PYTHONPATH")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        command, cwd=cwd, env=clean | env, capture_output=True, text=True
    )
    return done.returncode, done.stderr + done.stdout


def settings(tree):
    """Environment of every build: another one would compile everything again."""
    nvcc = str(tree / "nvcc")
    return {"TE_FLAX_CUDA": "off", "TE_FLAX_WERROR": "ON", "CUDACXX": nvcc}


def pip_wheel(tree, target, **env):
    """Runs pip in the ready environment: isolation would fetch 100 MB a test."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-v", "-w")
    command = (sys.executable, "-m", "pip", "wheel", ".", *options, str(target))
    return run(*command, cwd=tree, **settings(tree) | env)


def wheel(tree, target, **env):
    status, log = pip_wheel(tree, target, **env)
    assert status == 0, log
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        info = json.loads(archive.read("te_flax/_build_info.json"))
        return path, set(archive.namelist()), info


def probe(folder, cwd):
    """Imports te_flax from `folder` and reports what it found."""
    status, log = run(sys.executable, "-c", PROBE, cwd=cwd, PYTHONPATH=str(folder))
    assert status == 0, log
    return json.loads(log.splitlines()[-1])


def suffixes(names):
    stems = (Path(name).name.partition(".") for name in names if name.endswith(".so"))
    return {stem: rest for stem, _, rest in stems}


@pytest.fixture(scope="module")
def native_wheel(tree, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    return wheel(tree, target, TE_FLAX_NATIVE="on")


def test_wheel_without_warnings(native_wheel, tmp_path):
    path, names, info = native_wheel
    assert info == {"cpu": True, "cuda": False, "reason": "TE_FLAX_CUDA=off"}
    assert set(suffixes(names)) == {"_C"}
    assert {"te_flax/py.typed", "te_flax/_C.pyi", "te_flax/recipes/mxfp8.toml"} <= names
    abi3 = sys.version_info >= (3, 12)
    tag = f"cp3{sys.version_info[1]}"
    assert suffixes(names)["_C"].startswith("abi3" if abi3 else "cpython-311")
    assert ("-cp312-abi3-" if abi3 else f"-{tag}-{tag}-") in path.name
    assert platform.machine() in path.name
    shutil.unpack_archive(path, tmp_path / "site", "zip")
    file, has, info = probe(tmp_path / "site", tmp_path)
    assert Path(file).is_relative_to(tmp_path)
    assert has
    assert info["cpu"]


def test_every_package_is_in_the_wheel(native_wheel):
    packages = {p.parent.relative_to(ROOT) for p in ROOT.glob("te_flax/**/__init__.py")}
    files = {str(p / f.name) for p in packages for f in (ROOT / p).glob("*.py")}
    assert files <= native_wheel[1]


def test_simd_objects_share_no_code(native_wheel, tree):
    """A weak symbol compiled with -mavx2 could be the copy that the linker keeps."""
    if not shutil.which("nm") or platform.machine() != "x86_64":
        pytest.skip("needs nm on x86-64")
    objects = tree.glob("build/native-*/CMakeFiles/te_cpu.dir/cpu/*.o")
    objects = {path.name.partition(".")[0]: path for path in objects}
    assert {"kernels_base", "kernels_avx2", "kernels_avx512", "dispatch"} <= set(
        objects
    )
    for name, path in objects.items():
        simd = name.endswith(("_avx2", "_avx512"))
        code = run("objdump", "-d", "--no-show-raw-insn", str(path), cwd=tree)[1]
        assert ("%ymm" in code or "%zmm" in code) is simd, name
        if simd:
            symbols = run("nm", "-C", str(path), cwd=tree)[1]
            assert not re.findall(r"^\S* [WVu] .*", symbols, re.MULTILINE), name


def hook(tree, call, **env):
    """Calls a PEP 517 hook as pip does, with the build folder of the other tests."""
    path = os.pathsep.join([str(tree), str(tree / "csrc")])
    env = {**settings(tree), "PYTHONPATH": path, **env}
    status, log = run(
        sys.executable, "-c", f"import setup_ext; setup_ext.{call}", cwd=tree, **env
    )
    assert status == 0, log


def test_editable_with_a_broken_cuda_part(tree, tmp_path):
    """The CPU part stays, says why there is no CUDA, and lies in the tree."""
    hook(tree, f"build_editable({str(tmp_path)!r})", TE_FLAX_CUDA="auto")
    (path,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(path, tmp_path / "site", "zip")
    # -S, and the copy first: an editable install of this environment stays out.
    site = f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r})"
    packages = f"sys.path.append({sysconfig.get_path('purelib')!r})"
    code = f"{site}; {packages}\n{PROBE}"
    status, log = run(sys.executable, "-S", "-c", code, cwd=tmp_path)
    assert status == 0, log
    file, has, info = json.loads(log.splitlines()[-1])
    assert Path(file).is_relative_to(tree)
    assert has
    assert (info["cpu"], info["cuda"]) == (True, False)
    assert "broken on purpose" in info["reason"]


def test_cuda_by_name_stops_at_a_broken_nvcc(tree, tmp_path):
    status, log = pip_wheel(tree, tmp_path, TE_FLAX_CUDA="on")
    assert status == 1
    assert "BuildError: nvcc: nvcc fatal error: broken on purpose" in log


def test_wheel_without_a_compiler(tree, tmp_path):
    """Without a compiler the build asks pip for nothing and gives pure Python."""
    bare = tmp_path / "bin"
    bare.mkdir()
    hidden = {"CXX": "/nonexistent/c++", "PATH": str(bare)}
    path, names, info = wheel(tree, tmp_path, **hidden)
    assert path.name.endswith("-py3-none-any.whl")
    assert not suffixes(names)
    assert info == {
        "cpu": False,
        "cuda": False,
        "reason": "no C++ compiler was found",
    }
    shutil.unpack_archive(path, tmp_path / "site", "zip")
    _, has, info = probe(tmp_path / "site", tmp_path)
    assert not has
    assert info["reason"] == "no C++ compiler was found"
    status, log = pip_wheel(tree, bare, TE_FLAX_NATIVE="on", **hidden)
    assert status == 1
    assert "BuildError: no C++ compiler was found" in log


def test_broken_source_falls_back_or_stops(tree, tmp_path):
    copy = copy_tree(tmp_path / "copy")
    with (copy / "csrc/CMakeLists.txt").open("a") as file:
        file.write('message(FATAL_ERROR "broken on purpose")\n')
    _, names, info = wheel(copy, tmp_path)
    assert not suffixes(names)
    assert info["reason"].startswith("cmake: CMake Error at CMakeLists.txt")
    status, _ = pip_wheel(copy, tmp_path, TE_FLAX_NATIVE="on")
    assert status == 1


def test_sdist_holds_what_a_build_reads(tree, tmp_path):
    hook(tree, f"build_sdist({str(tmp_path)!r})")
    (archive,) = tmp_path.glob("te_flax-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    (sdist,) = tmp_path.glob("te_flax-*/")
    names = {str(p.relative_to(sdist)) for p in sdist.rglob("*") if p.is_file()}
    for folder in TREE:
        sources = (p for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc")
        sources = {str(p.relative_to(ROOT)) for p in sources if p.is_file()}
        sources = {s for s in sources if not s.endswith((".so", "_build_info.json"))}
        assert sources <= names
    assert set(FILES) <= names
    assert not [name for name in names if name.endswith(".so")]


@pytest.fixture
def cmake_build(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    return importlib.import_module("cmake_build")


def test_requirements(cmake_build, monkeypatch):
    monkeypatch.delenv("TE_FLAX_NATIVE", raising=False)
    lacks = {"cmake": True, "ninja": False}
    monkeypatch.setattr(cmake_build, "_lacks", lambda name, least: lacks[name])
    needed = ["nanobind==3.1.0", "jaxlib==0.10.2", "cmake>=3.26"]
    assert cmake_build.requirements() == needed
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert cmake_build.requirements() == []
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("TE_FLAX_NATIVE", "off")
    assert cmake_build.requirements() == []


def test_switch_must_be_known(cmake_build, monkeypatch):
    monkeypatch.setenv("TE_FLAX_NATIVE", "yes")
    rule = "setup_ext: TE_FLAX_NATIVE must be auto, on or off, got 'yes'; unset it"
    with pytest.raises(ValueError, match=rule):
        cmake_build.requirements()


def test_a_cache_of_other_tools_is_emptied(cmake_build, tmp_path, monkeypatch):
    build = tmp_path / "build"
    cmake_build._open(build, "cmake")
    (build / "kept").touch()
    cmake_build._open(build, "cmake")
    assert (build / "kept").exists()
    monkeypatch.setenv("CXXFLAGS", "-Og")
    cmake_build._open(build, "cmake")
    assert not (build / "kept").exists()


def test_placing_removes_what_was_not_built(cmake_build, tmp_path):
    suffix = cmake_build.EXTENSION_SUFFIXES[0]
    other = tmp_path / "_C.cpython-399-other.so"  # another Python's editable install
    for name in (f"_C{suffix}", f"_cuda{suffix}", other.name):
        (tmp_path / name).touch()
    new = tmp_path / "new" / f"_C{suffix}"
    new.parent.mkdir()
    new.write_text("new")
    cmake_build.place([new], {"cpu": True}, tmp_path)
    assert (tmp_path / f"_C{suffix}").read_text() == "new"
    assert not (tmp_path / f"_cuda{suffix}").exists()
    assert other.exists()
    assert json.loads((tmp_path / "_build_info.json").read_text()) == {"cpu": True}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_cuda_part_without_warnings(tree, tmp_path):
    real = {"CUDACXX": shutil.which("nvcc"), "TE_FLAX_CUDA_ARCHS": "90a"}
    _, names, info = wheel(tree, tmp_path, TE_FLAX_CUDA="on", **real)
    assert info == {"cpu": True, "cuda": True, "reason": ""}
    assert set(suffixes(names)) == {"_C", "_cuda"}


@pytest.mark.slow
def test_isolated_install(tree, tmp_path):
    """pip fetches the pinned build requirements; the headers are the oldest ones."""
    where = ("-m", "pip", "wheel", ".", "--no-deps", "-w", str(tmp_path))
    env = {"TE_FLAX_NATIVE": "on", "TE_FLAX_CUDA": "off"}
    status, log = run(sys.executable, *where, cwd=tree, **env)
    assert status == 0, log
    (path,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(path, tmp_path / "site", "zip")
    assert probe(tmp_path / "site", tmp_path)[2]["ffi_api"] == [0, 3]


def test_pins_are_stated_once():
    """The test extra must bring the nanobind that the build uses."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = re.findall(r"nanobind==[\d.]+", (ROOT / "csrc/cmake_build.py").read_text())
    assert set(pins) <= set(extras["optional-dependencies"]["test"])
