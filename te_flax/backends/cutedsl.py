"""CuTeDSL kernels for MXFP8 quantization, called through TVM-FFI.

The extra ``te_flax[cutedsl]`` installs what is needed: the compiler (NVIDIA's
nvidia-cutlass-dsl, under its own licence), and the bridge from XLA (apache-tvm-ffi and
jax-tvm-ffi). A kernel that is on disk needs the bridge alone, and the DSL's runtime.
"""

import ctypes
import functools
import hashlib
import importlib.util
import math
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from te_flax.backends.cutedsl_spec import ROW_SUMS, spec_of
from te_flax.backends.protocol import Call, JitKey, KernelBackend, View

OPS = ("quantize_mxfp8_*", "quantize_dbias_mxfp8_*", "act_*_mxfp8_*")
_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "jax-tvm-ffi")
_BLOCKS = 2**31 - 1  # of a grid


@functools.cache
def _versions() -> tuple[str, ...] | str:
    """Versions of what is needed, or which of it is missing."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            return name
    return tuple(found)


class CuteDSL(KernelBackend):
    """One source for all variants; see :mod:`te_flax.backends.cutedsl_spec`."""

    name = "cutedsl"
    shape_attrs = ("k_ndim",)
    suffixes = (".so", ".o")

    def version(self) -> str:
        """Such as "4.8.1 via tvm-ffi 0.1.15"."""
        found = _versions()
        return "" if isinstance(found, str) else f"{found[0]} via tvm-ffi {found[1]}"

    @functools.cache  # noqa: B019 - one instance, which lives as long as the process
    def source_hash(self) -> str:
        """Of the kernels' files, and of all versions."""
        files = sorted(Path(__file__).parent.glob("cutedsl_*.py"))
        text = b"".join(file.read_bytes() for file in files)
        return hashlib.sha256(text + repr(_versions()).encode()).hexdigest()

    def available(self) -> str | None:
        """Whether the extra is installed."""
        found = _versions()
        if isinstance(found, str):
            return f"{found} is not installed: pip install te_flax[cutedsl]"
        return None

    def supports(self, call: Call) -> str | None:
        """Whole blocks, one dtype, and what fits into registers."""
        key = call.key
        prefix, _, number = key.arch.rstrip("af").partition("_")
        if prefix != "sm" or not number.isdigit():
            return f"{key.arch!r} is no architecture such as sm_90a"
        if int(number) < 89:
            return f"{key.arch} has no conversion to FP8"
        spec = spec_of(key)
        mixed = {*key.operands[int(spec.noop) :][: 1 + spec.backward]}
        mixed |= {key.attr("out_dtype", spec.dtype)}
        if len(mixed) > 1:
            return f"operands and h of {' and '.join(sorted(mixed))}"
        if "clamped" in spec.activation:
            return f"{spec.activation} is not generated"
        if spec.slices > 1 and spec.dtype == "float32":
            return "two slices of float32 do not fit into registers"
        m, k = _extent(call)
        if k % 32:
            return f"K % 32 = {k % 32}"
        if spec.col_format and m % 32:
            return f"M % 32 = {m % 32} with a copy along the tokens"
        if -(-m // 32) * -(-k // 64) > _BLOCKS:
            return "there are too many elements"
        return None

    def view(self, call: Call) -> View:
        """Rows and columns; scales in tiles are flat."""
        spec = spec_of(call.key)
        m, k = _extent(call)
        width = spec.slices * k
        shapes = {
            "noop": (1,),
            "dy": (m, k),
            "x": (m, spec.read_slices * k),
            **dict.fromkeys(("h", "row", "col"), (m, width)),
            "row_scale": (m, width // 32),
            "col_scale": (m // 32, width),
            "dbias": (width,),
            "amax": (2,),
        }
        if spec.swizzled:
            shapes["row_scale"] = (_tiles(m, width // 32),)
            shapes["col_scale"] = (_tiles(width, m // 32),)
        names = [name.removeprefix("prev_") for name in spec.tensors]
        count = len(call.operands)
        found = [shapes[name] for name in names if name != "sums"]
        space = 4 * -(-m // ROW_SUMS) * width if spec.dbias else 0
        return View(tuple(found[:count]), tuple(found[count:]), space)

    def build(self, key: JitKey, stem: Path) -> Path:
        """Compiles, for any shape, without a GPU.

        The file is a shared library, which loads without the DSL, where there is a
        linker, else an object.
        """
        from te_flax.backends.cutedsl_launch import compile_kernel

        file = stem.with_name(stem.name + ".o")
        function = compile_kernel(spec_of(key), key.arch)
        function.export_to_c(str(file), function_name=_symbol(stem))
        linker = shutil.which("cc") or shutil.which("gcc")
        if linker is None:
            return file
        library = file.with_suffix(".so")
        command = [linker, "-shared", "-o", str(library), str(file)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return library

    def load(self, file: Path) -> Any:
        """Links the file to the DSL's runtime in this process."""
        if file.suffix == ".so":
            import tvm_ffi  # pyright: ignore[reportMissingImports]

            _open_runtime()
            module = tvm_ffi.load_module(str(file))
        else:
            import cutlass.cute as cute  # pyright: ignore[reportMissingImports]

            module = cute.runtime.load_module(str(file), enable_tvm_ffi=True)
        return getattr(module, _symbol(file.with_suffix("")))


def _symbol(stem: Path) -> str:
    """The function in the file of an FFI target."""
    return "te_flax_" + stem.name.rsplit(".", 1)[-1]


@functools.cache
def _open_runtime() -> None:
    """Makes the DSL's runtime library visible to those that link to it."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = (spec and spec.submodule_search_locations) or ()
    for place in places:
        for file in sorted(Path(place).glob("cu*/lib/libcute_dsl_runtime.so")):
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            return
    raise ImportError("nvidia_cutlass_dsl/cu*/lib/libcute_dsl_runtime.so is missing")


def _extent(call: Call) -> tuple[int, int]:
    """Rows, and columns of one slice."""
    spec = spec_of(call.key)
    shape = call.operands[int(spec.noop)].shape  # x, or dy, which has no slices
    sliced = bool(spec.activation) and not spec.backward
    k_ndim = call.attrs["k_ndim"]
    split = len(shape) - k_ndim
    return math.prod(shape[: split - sliced]), math.prod(shape[split:])


def _tiles(rows: int, columns: int) -> int:
    """Bytes of scales in tiles of 128 x 4."""
    return -(-rows // 128) * -(-columns // 4) * 512
