"""Loads the compiled modules and registers their XLA FFI handlers, once, at import.

No other file imports ``te_flax._C`` or ``te_flax._cuda``. Neither is needed: without
them every op runs its reference, and :func:`why_not` says why.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import logging
import re
import struct
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from te_flax._version import __version__
from te_flax.config import CONFIG
from te_flax.errors import message

PACKAGE = Path(__file__).parent.parent
REINSTALL = (
    "reinstall te_flax, or set TE_FLAX_KERNELS='*=reference' to run without the module"
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What this process has.

    Attributes:
        handlers: names of the registered handlers, by platform.
        reasons: why a platform has none, by platform; absent where it has some.
        info: what was built, and with what.
    """

    handlers: Mapping[str, frozenset[str]]
    reasons: Mapping[str, str]
    info: Mapping[str, Any]


def _references_only(kernels: str) -> bool:
    """Whether the rules leave no op that could run a handler."""
    rules = [rule.replace(" ", "").split("=") for rule in kernels.split(",") if rule]
    last = max((i for i, rule in enumerate(rules) if rule[0] == "*"), default=None)
    return last is not None and all(rule[-1] == "reference" for rule in rules[last:])


def _runtime_api() -> tuple[int, int] | None:
    """XLA FFI API of the running jaxlib, which states it in its headers only."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return None
    found = re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header.read_text())
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _check(file: str, info: Mapping[str, Any]) -> None:
    """Refuses a module that another version left behind or that jaxlib cannot call."""
    if info["version"] != __version__:
        rule = f"be of te_flax {__version__}, as the Python files are"
        raise ImportError(message("te_flax", file, rule, info["version"], REINSTALL))
    runtime = _runtime_api()
    built = info["ffi_api"]
    # A handler with a newer API would make XLA refuse the whole platform later.
    if runtime and (built[0] != runtime[0] or built[1] > runtime[1]):
        rule = "be built for at most XLA FFI API {}.{}, that of jaxlib {}".format(
            *runtime, metadata.version("jaxlib")
        )
        raise ImportError(
            message("te_flax", file, rule, "{}.{}".format(*built), REINSTALL)
        )


def _cut_short(file: Path) -> str:
    """How much of an ELF64 file is missing, or nothing.

    The dynamic linker maps a truncated file without a look at its size, and the first
    access beyond the end kills the process; so the headers are compared with it here.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(64)
        if head[:5] != b"\x7fELF\x02":
            return ""
        order = ">" if head[5:6] == b"\x02" else "<"
        end = 64
        if size >= end:
            phoff, shoff = struct.unpack_from(order + "QQ", head, 32)
            phsize, phnum, shsize, shnum = struct.unpack_from(order + "4H", head, 54)
            end = max(end, phoff + phsize * phnum, shoff + shsize * shnum)
            stream.seek(phoff)
            table = stream.read(phsize * phnum)
            for at in range(0, len(table) - 39, phsize or 56):
                offset, _, _, length = struct.unpack_from(order + "4Q", table, at + 8)
                end = max(end, offset + length)
    return f"{size} of at least {end} bytes" if size < end else ""


def _import(name: str) -> ModuleType | None:
    """Imports a compiled module, or returns None where there is none."""
    # Beside this file only: an editable install of another tree would offer its own.
    spec = PathFinder.find_spec(f"te_flax.{name}", [str(PACKAGE)])
    if spec is None:
        return None
    missing = _cut_short(Path(spec.origin)) if spec.origin else ""
    if missing:
        raise ImportError(
            message("te_flax", str(spec.origin), "be a whole file", missing, REINSTALL)
        )
    try:
        module = importlib.import_module(f"te_flax.{name}")
        info = module.build_info()
    except Exception as error:
        rule = "load into this Python"
        raise ImportError(
            message("te_flax", str(spec.origin), rule, repr(error), REINSTALL)
        ) from error
    _check(str(spec.origin), info)
    return module


def _register(module: ModuleType, platform: str) -> frozenset[str]:
    registrations = module.registrations()
    for name, handler in registrations.items():
        jax.ffi.register_ffi_target(f"te_flax.{name}", handler, platform=platform)
    return frozenset(registrations)


def _built() -> dict[str, Any]:
    """What the installer noted: pip hides the output of a build that fell back."""
    file = PACKAGE / "_build_info.json"
    reason = "this source tree is not installed"
    if file.exists():
        try:
            return {
                "cpu": False,
                "cuda": False,
                "reason": "",
                **json.loads(file.read_text()),
            }
        except (TypeError, ValueError) as error:  # the modules may be sound
            rule = "be the JSON object that the installer wrote"
            reason = message(
                "te_flax", str(file), rule, repr(error), "reinstall te_flax"
            )
            logging.getLogger("te_flax").warning("%s", reason)
    return {"cpu": False, "cuda": False, "reason": reason}


def _load_cuda(info: dict[str, Any]) -> tuple[frozenset[str], str]:
    """Returns the CUDA handlers, or none and why; never touches a device."""
    plugins = [v for v in (12, 13) if importlib.util.find_spec(f"jax_cuda{v}_plugin")]
    if not plugins:
        return frozenset(), "jax has no CUDA backend here; install te_flax[cuda13]"
    module = _import("_cuda")
    if module is None:
        reason = info["reason"] or f"not for Python {sys.version.split()[0]}"
        install = "install te_flax where nvcc is on PATH"
        return frozenset(), f"te_flax._cuda is not built ({reason}); {install}"
    built = module.build_info()
    info.update(cuda_version=built["cuda"], cuda_archs=built["archs"].split(","))
    if int(built["cuda"].split(".")[0]) not in plugins:
        return frozenset(), (
            f"te_flax._cuda is built with CUDA {built['cuda']} and jax runs CUDA "
            f"{plugins[0]}; install te_flax with the nvcc of that version"
        )
    _configure(module, built["cuda"].split(".")[0])
    return _register(module, "CUDA"), ""


def _configure(module: ModuleType, major: str) -> None:
    """Tells the CUDA module where files are, and whether it may time algorithms."""
    folder = CONFIG.cache_folder()
    file = str(folder / "cublaslt.txt") if folder else ""
    module.configure_gemm(CONFIG.autotune != "0", file)
    wheels = importlib.util.find_spec("nvidia")  # a namespace: each wheel adds to it
    for place in (wheels and wheels.submodule_search_locations) or ():
        for library in sorted(Path(place).glob(f"*/lib/libcublasLt.so.{major}")):
            module.set_cublaslt_path(str(library))


@functools.cache
def load() -> Loaded:
    """Imports the compiled modules and registers their handlers.

    Called once, when this file is imported; never needs a GPU, nor starts a backend.

    Returns:
        What was loaded.

    Raises:
        ImportError: a module is there, but corrupt, of another te_flax version or built
            for a newer XLA FFI API than jaxlib has.
        ValueError: ``TE_FLAX_SIMD`` names an instruction set that this CPU lacks.
    """
    info = {**_built(), "simd": "none"}
    if _references_only(CONFIG.kernels):
        why = "TE_FLAX_KERNELS lets references run only, so no module is loaded"
        return Loaded({}, {"cpu": why, "cuda": why}, info)
    module = _import("_C")
    if module is None:
        reason = info["reason"] or f"not for Python {sys.version.split()[0]}"
        info["cpu"] = False
        why = f"te_flax._C is not built ({reason}); install it with a C++ compiler"
        logging.getLogger("te_flax").warning("%s; all ops run as plain JAX", why)
        return Loaded({}, {"cpu": why, "cuda": why}, info)
    info.update(module.build_info(), simd=module.simd_level(), cpu=True)
    cuda, why = _load_cuda(info)
    handlers = {"cpu": _register(module, "cpu"), "cuda": cuda}
    return Loaded(handlers, {"cuda": why} if why else {}, info)


def _runs(arch: str, capability: str) -> bool:
    """Whether code for ``sm_<arch>`` runs on a device of a capability such as "90"."""
    number = arch.rstrip("af")
    if arch.endswith("a"):
        return number == capability
    same = number[:-1] == capability[:-1]
    return same and int(capability[-1]) >= int(number[-1])


@functools.cache
def _no_image() -> str:
    """Why the CUDA handlers cannot run on the local GPUs, or nothing."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # lowering for another machine
        return ""
    archs = load().info.get("cuda_archs", [])
    for device in devices:
        capability = str(device.compute_capability).replace(".", "")
        if not any(_runs(arch, capability) for arch in archs):
            return (
                f"te_flax._cuda has code for sm_{', sm_'.join(archs)} and {device} is "
                f"sm_{capability}; install te_flax with TE_FLAX_CUDA_ARCHS={capability}"
            )
    return ""


@functools.cache
def cublaslt() -> tuple[int, str]:
    """The cuBLASLt that the GEMM handler calls; never touches a device.

    Returns:
        Its version, ``10000 * major + 100 * minor + patch``, and an empty string; or 0
        and why there is none.
    """
    if reason := load().reasons.get("cuda"):
        return 0, reason
    return sys.modules["te_flax._cuda"].cublaslt()


@functools.cache
def compute_capability() -> int | None:
    """The lowest compute capability of the local GPUs, such as 90; None without any."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # lowering for another machine
        return None
    found = [str(d.compute_capability).replace(".", "") for d in devices]
    return min(map(int, found), default=None)


def has(handler: str, platform: str) -> bool:
    """Whether a handler is registered and can run.

    Args:
        handler: name without the ``te_flax.`` of the FFI target.
        platform: ``"cpu"`` or ``"cuda"``.

    Returns:
        True if an op may be lowered to it.

    Example:
        >>> has("no_such_handler", "cpu")
        False
    """
    return not why_not(handler, platform)


def why_not(handler: str, platform: str) -> str:
    """Why :func:`has` is False.

    Args:
        handler: name without the ``te_flax.`` of the FFI target.
        platform: ``"cpu"`` or ``"cuda"``.

    Returns:
        One clause for errors and the kernel report, empty if the handler can run.
    """
    loaded = load()
    if platform in loaded.reasons:
        return loaded.reasons[platform]
    if handler not in loaded.handlers.get(platform, ()):
        return f"no handler {handler} is compiled for {platform}"
    return _no_image() if platform == "cuda" else ""


def build_info() -> dict[str, Any]:
    """What was built, and what this process uses of it.

    Returns:
        ``cpu`` and ``cuda`` (whether the parts were built), ``reason`` (why one was
        not), ``simd``; with a module also ``version``, ``ffi_api`` and ``compiler``;
        with the CUDA module also ``cuda_version`` and ``cuda_archs``.
    """
    return dict(load().info)


def simd_level() -> str:
    """Instruction set of the CPU handlers.

    Returns:
        ``"base"``, ``"avx2"`` or ``"avx512"``; ``"none"`` without compiled handlers.
    """
    return load().info["simd"]


load()
