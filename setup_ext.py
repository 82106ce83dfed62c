"""In-tree PEP 517 backend: setuptools' own, plus a CMake build of csrc/.

The native build runs first and the wheel's tag follows from it: with te_flax/_C a
platform wheel, without a C++ compiler a pure Python one, whose ops run their JAX
references. A failing CUDA part leaves the CPU part. pip hides a backend's output unless
-v is given, so te_flax/_build_info.json keeps the outcome for te.kernel_report().

Environment: TE_FLAX_NATIVE and TE_FLAX_CUDA = auto | on | off (on: a failure stops the
install), TE_FLAX_CUDA_ARCHS (list such as "89;90a"), TE_FLAX_WERROR=1, CXX, CXXFLAGS,
CUDACXX, CUDA_HOME.
"""

import contextlib
import fcntl
import re
import tempfile
from pathlib import Path

import cmake_build
import setuptools
from setuptools.build_meta import build_wheel as _setuptools_hook
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


@contextlib.contextmanager
def _locked():
    """Two installs from one tree would build into one folder."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Backend(_setuptools_hook.__self__.__class__):
    native = None  # (modules, build info) of the wheel that is being made

    def run_setup(self, setup_script="setup.py"):
        native = self.native

        class BuildPy(build_py):
            def run(self):
                super().run()
                if native:
                    cmake_build.place(*native, Path(self.build_lib, "te_flax"))

        class BuildExt(build_ext):  # BuildPy has placed the modules
            def run(self):
                pass

        modules = native[0] if native else []
        abi3 = any(".abi3." in module.name for module in modules)
        with tempfile.TemporaryDirectory() as base:  # build/lib would keep old modules
            setuptools.setup(
                ext_modules=[setuptools.Extension("te_flax._C", [])] if modules else [],
                cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
                options={
                    "build": {"build_base": base},
                    "bdist_wheel": {"py_limited_api": "cp312"} if abi3 else {},
                },
            )

    def get_requires_for_build_wheel(self, config_settings=None):
        return cmake_build.requirements()

    def build_wheel(self, *arguments, **options):
        with _locked():
            self.native = cmake_build.build_modules(abi3=True)
            return super().build_wheel(*arguments, **options)

    def build_editable(self, *arguments, **options):
        with _locked():
            native = cmake_build.build_modules(abi3=False)
            cmake_build.place(*native, ROOT / "te_flax")
        return super().build_editable(*arguments, **options)


_backend = _Backend()
for _name in dir(_backend):
    if re.match("(get_requires|prepare_metadata|build)_", _name):
        globals()[_name] = getattr(_backend, _name)
