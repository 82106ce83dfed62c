"""What a backend is: it says which kernels it can make, and makes them."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from te_flax.errors import message


@dataclasses.dataclass(frozen=True)
class JitKey:
    """What one generated kernel is made for. Shapes are no part of it.

    Attributes:
        op: name of the op, as in :func:`te_flax.kernels`.
        platform: "cpu" or "cuda".
        arch: such as "sm_90a"; empty on the CPU.
        operands: names of the operands' dtypes.
        results: names of the results' dtypes.
        attrs: (name, value) of the static attributes that change the code, sorted: the
            op's own and those that tell its variant, such as row, col and noop.

    Example:
        >>> key = JitKey("amax", "cpu", "", ("float32",), ("float32",), (("n", 2),))
        >>> key.attr("n"), key.attr("swizzled", False)
        (2, False)
    """

    op: str
    platform: str
    arch: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...]

    def attr(self, name: str, default: Any = None) -> Any:
        """Returns the value of an attribute, or the default where there is none."""
        return dict(self.attrs).get(name, default)


class Call(NamedTuple):
    """One call of an op that a kernel is wanted for.

    Attributes:
        key: of the kernel.
        operands: their types, as one shard has them.
        results: likewise.
        attrs: all static attributes, also those that the key leaves out.
    """

    key: JitKey
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attrs: Mapping[str, Any]


class View(NamedTuple):
    """How a kernel sees a call.

    Attributes:
        operands: shape of each; of as many elements as the op's.
        results: likewise.
        workspace: bytes of scratch memory, a last result of uint8; 0 for none.
    """

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    workspace: int = 0


class KernelBackend:
    """Makes kernels: a base class, of which ``build`` alone must be written.

    A kernel is a ``tvm_ffi.Function`` that is called with the operands, the results
    and, if there is one, the workspace, as DLPack tensors. The results are memory to
    write to; one whose operand the op aliases is that operand's memory.

    Attributes:
        name: of the backend, in reports and errors.
        platform: where its kernels run, "cpu" or "cuda".
        shape_attrs: static attributes that change no code, only what ``view`` returns.
        bridge: further arguments of ``jax_tvm_ffi.register_ffi_target``.
        suffixes: of the files that ``build`` makes, the preferred one first.

    Example:
        >>> class Nothing(KernelBackend):
        ...     name = "nothing"
        ...
        ...     def supports(self, call):
        ...         return "it makes no kernels"
        >>> Nothing().available() is None
        True
    """

    name: str
    platform: str = "cuda"
    shape_attrs: tuple[str, ...] = ()
    bridge: Mapping[str, Any] = {}
    suffixes: tuple[str, ...] = ()

    def version(self) -> str:
        """Returns the versions of what makes the code; another makes other kernels."""
        return ""

    def source_hash(self) -> str:
        """Returns what changes with the kernels' source."""
        return ""

    def available(self) -> str | None:
        """Returns why no kernel can be had here, or None."""
        return None

    def supports(self, call: Call) -> str | None:
        """Returns why this call cannot be served, or None.

        After this there is no way back to the compiled handler: it must be complete.
        """
        return None

    def view(self, call: Call) -> View:
        """Returns how the kernel sees the call; by default as the op does."""
        shapes = lambda types: tuple(t.shape for t in types)
        return View(shapes(call.operands), shapes(call.results))

    def build(self, key: JitKey, stem: Path) -> Any:
        """Makes the kernel, or ``stem`` with a suffix: a file that ``load`` takes.

        One thread at a time is here. Files are kept on disk for later processes.
        """
        raise NotImplementedError(f"{self.name}: no kernel is made for {key.op}")

    def load(self, file: Path) -> Any:
        """Returns the kernel of a file that ``build`` made."""
        raise NotImplementedError(f"{self.name}: no kernel is kept in files")

    def register(self, name: str, function: Any) -> None:
        """Makes the kernel the FFI target ``name`` of this process."""
        import jax_tvm_ffi  # pyright: ignore[reportMissingImports]

        cuda = self.platform == "cuda"
        options = {"platform": "gpu" if cuda else "cpu", "allow_cuda_graph": cuda}
        options |= self.bridge
        jax_tvm_ffi.register_ffi_target(name, function, ["args", "rets"], **options)


def check(backend: Any, ops: Iterable[str]) -> tuple[str, ...]:
    """Returns the globs of a registration; refuses one that could never serve."""
    where = "register_backend"
    if not isinstance(backend, KernelBackend):
        rule, remedy = "be a KernelBackend", "derive its class from KernelBackend"
        got = type(backend).__name__
        raise TypeError(message(where, "backend", rule, got, remedy))
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name:
        rule, remedy = "have a name", "set name in its class"
        raise ValueError(message(where, "backend", rule, repr(name), remedy))
    if backend.platform not in ("cpu", "cuda"):
        rule, remedy = "have the platform 'cpu' or 'cuda'", "set platform in its class"
        got = repr(backend.platform)
        raise ValueError(message(where, "backend", rule, got, remedy))
    several = isinstance(ops, Iterable) and not isinstance(ops, str)
    globs = tuple(ops) if several else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        rule, remedy = "be a tuple of globs", 'write ("quantize_mxfp8_*",)'
        raise TypeError(message(where, "ops", rule, repr(ops), remedy))
    return globs
