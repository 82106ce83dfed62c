"""Finds the tools and runs CMake over this folder; setup_ext.py is the only caller."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parent


class BuildError(RuntimeError):
    """The native build failed; the text is the reason that kernel_report() shows."""


def switch(name):
    """Value of an auto | on | off variable."""
    value = os.environ.get(name, "auto")
    if value not in ("auto", "on", "off"):
        raise ValueError(
            f"setup_ext: {name} must be auto, on or off, got {value!r}; "
            "unset it for auto"
        )
    return value


def _run(*command):
    """Runs a command; its output goes on to pip, its first error into BuildError."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, **pipes)
    print(done.stdout, flush=True)
    if done.returncode:
        error = re.search(r".*(\berror\b[^.]*:|Error at).*", done.stdout)
        reason = error[0].strip() if error else f"exit status {done.returncode}"
        raise BuildError(f"{Path(command[0]).name}: {reason}")
    return done.stdout


def _first(*names):
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def compiler():
    """The C++ compiler that CMake will choose, or None."""
    wanted = os.environ.get("CXX", "").split()[:1]
    return _first(*(wanted or ("c++", "g++", "clang++")))


def _nvcc():
    """Path of nvcc, or None. CMake itself never looks for it."""
    home = os.environ.get("CUDA_HOME")
    return _first(os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc")


def _tool(name, variable):
    """Path of cmake or ninja: the Python package's before the one on PATH."""
    try:
        path = Path(getattr(__import__(name), variable), name)
    except (ImportError, AttributeError):
        path = _first(name)
    if path is None:
        raise BuildError(f"the build needs {name}")
    return str(path)


def _folder(package):
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"the build needs the Python package {package}")
    return Path(spec.submodule_search_locations[0])


def _lacks(name, least):
    try:
        done = subprocess.run([name, "--version"], capture_output=True, text=True)
    except OSError:
        return True
    return tuple(map(int, re.findall(r"\d+", done.stdout)[:2])) < least


def requirements():
    """What pip must install to build; nothing without a C++ compiler."""
    if switch("TE_FLAX_NATIVE") == "off" or not compiler():
        return []
    # The oldest supported FFI headers: newer ones do not load on an older jaxlib.
    old = sys.version_info < (3, 15)
    packages = ["nanobind==3.1.0", "jaxlib==0.10.2" if old else "jaxlib>=0.10.2,<0.13"]
    packages += ["cmake>=3.26"] if _lacks("cmake", (3, 26)) else []
    return packages + (["ninja"] if _lacks("ninja", (1, 5)) else [])


def _cuda_options(nvcc):
    if not nvcc:
        return ["-DTE_FLAX_CUDA=OFF"]
    release = re.search(r"release (\d+)\.(\d+)", _run(nvcc, "--version"))
    blackwell = release and (int(release[1]), int(release[2])) >= (12, 8)
    archs = os.environ.get("TE_FLAX_CUDA_ARCHS") or (
        "89;90a;100a" if blackwell else "89;90a"
    )
    return [
        "-DTE_FLAX_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DTE_FLAX_CUDA_ARCHS={archs}",
    ]


def _open(build, *tools):
    """Empties a build folder that was made with other tools.

    A cache made in pip's deleted build environment, or with a broken compiler, would
    break or slow every later build.
    """
    flags = [os.environ.get(name) for name in ("CXX", "CXXFLAGS", "CUDAFLAGS")]
    stamp = repr((*tools, sys.executable, compiler(), _nvcc(), flags))
    file = build / "stamp"
    if not file.exists() or file.read_text() != stamp:
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        file.write_text(stamp)


def _compile(build, nvcc, abi3):
    """Configures and compiles into `build`; returns the modules that came out."""
    cmake, ninja = _tool("cmake", "CMAKE_BIN_DIR"), _tool("ninja", "BIN_DIR")
    nanobind, headers = _folder("nanobind") / "cmake", _folder("jaxlib") / "include"
    _open(build, cmake, ninja, nanobind, headers)
    version = runpy.run_path(str(ROOT / "te_flax" / "_version.py"))["__version__"]
    defines = {
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind,
        "TE_FLAX_FFI_INCLUDE": headers,
        "TE_FLAX_VERSION": version,
        "TE_FLAX_ABI3": "ON" if abi3 else "OFF",
        "TE_FLAX_WERROR": os.environ.get("TE_FLAX_WERROR", "OFF"),
    }
    options = [f"-D{name}={value}" for name, value in defines.items()]
    options += _cuda_options(nvcc)
    _run(cmake, "-S", str(SOURCES), "-B", str(build), "-G", "Ninja", *options)
    _run(cmake, "--build", str(build))
    stage = build / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    _run(cmake, "--install", str(build), "--prefix", str(stage))
    return sorted(stage.iterdir())


def build_modules(abi3):
    """Builds what this machine can; returns the module files and the build info."""
    native, cuda = switch("TE_FLAX_NATIVE"), switch("TE_FLAX_CUDA")
    build = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
    nvcc = _nvcc() if cuda != "off" else None
    reason = "TE_FLAX_CUDA=off" if cuda == "off" else "no nvcc was found"
    try:
        if native == "off":
            raise BuildError("TE_FLAX_NATIVE=off")
        if not compiler():
            raise BuildError("no C++ compiler was found")
        if cuda == "on" and not nvcc:
            raise BuildError(reason)
        try:
            modules = _compile(build, nvcc, abi3)
        except BuildError as error:
            if not nvcc or cuda == "on":
                raise
            nvcc, reason = None, str(error)
            modules = _compile(build, None, abi3)
    except BuildError as error:
        if "on" in (native, cuda):
            raise
        return [], {"cpu": False, "cuda": False, "reason": str(error)}
    return modules, {"cpu": True, "cuda": bool(nvcc), "reason": "" if nvcc else reason}


def place(modules, info, package):
    """Puts the results into a package folder.

    Each file is renamed into place: a running process keeps what it has mapped.
    """
    own = {f"{stem}{EXTENSION_SUFFIXES[0]}" for stem in ("_C", "_cuda")}
    for stale in own - {module.name for module in modules}:
        (package / stale).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=package) as folder:
        Path(folder, "_build_info.json").write_text(json.dumps(info) + "\n")
        for module in modules:
            shutil.copy(module, folder)
        for file in list(Path(folder).iterdir()):
            file.replace(package / file.name)
