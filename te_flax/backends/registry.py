"""Which backend serves an op, and the kernels of this process: made once per key."""

import dataclasses
import fnmatch
import functools
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from te_flax.backends import agreement, disk
from te_flax.backends.entries import Entries, Entry
from te_flax.backends.protocol import Call, JitKey, KernelBackend, check
from te_flax.config import CONFIG
from te_flax.errors import message

EXTRA = "pip install te_flax[cutedsl]"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is ready.

    Attributes:
        name: its FFI target.
        backend: that made it.
        call: that it serves.
    """

    name: str
    backend: KernelBackend
    call: Call


_registered: list[tuple[KernelBackend, tuple[str, ...]]] = []
_entries = Entries()  # of this process
_everywhere = Entries()  # of all processes together
_targets: dict[str, Any] = {}  # name -> kernel, kept alive: XLA forgets no target
_agreed: dict[str, bool] = {}
_lock = threading.Lock()  # of what is registered; held for moments
_building = threading.RLock()  # compilers are not made for threads


def register_backend(backend: KernelBackend, ops: Iterable[str]) -> None:
    """Adds a backend; of several that serve an op the last one added is asked first.

    Args:
        backend: it, with a name of its own. One of the same name is replaced, and what
            that could not make is tried again.
        ops: globs of the ops that it may serve.

    Raises:
        TypeError: the backend is no :class:`KernelBackend`, or ops are no globs.
        ValueError: it has no name, or no platform that ops have kernels for.

    Example:
        >>> class Mine(KernelBackend):
        ...     name, platform = "mine", "cpu"
        >>> register_backend(Mine(), ops=("no_such_op",))
    """
    globs = check(backend, ops)
    with _lock:
        _registered[:] = [b for b in _registered if b[0].name != backend.name]
        _registered.append((backend, globs))
    _forget(lambda entry: entry.backend == backend.name)


def _forget(which: Callable[[Entry], bool]) -> None:
    for kernels in (_entries, _everywhere):
        kernels.forget(which)


@functools.cache
def _own() -> tuple[tuple[KernelBackend, tuple[str, ...]], ...]:
    """The backends that come with the library."""
    from te_flax.backends.cutedsl import OPS, CuteDSL

    return ((CuteDSL(), OPS),)


def backends(op: str, platform: str) -> list[KernelBackend]:
    """Returns those that may serve an op on a platform, the first to ask first."""
    return [
        backend
        for backend, globs in (*reversed(_registered), *_own())
        if backend.platform == platform
        and any(fnmatch.fnmatchcase(op, glob) for glob in globs)
    ]


def arch(platform: str) -> tuple[str, str]:
    """Returns what to generate code for, or an empty string and why not.

    Args:
        platform: "cpu" or "cuda".
    """
    if platform != "cuda":
        return "", ""
    if CONFIG.jit_arch:
        return CONFIG.jit_arch, ""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return "", "there is no GPU here; name one in TE_FLAX_JIT_ARCH"
    found = {str(d.compute_capability).replace(".", "") for d in devices}
    if len(found) > 1:
        return "", f"the GPUs differ: sm_{', sm_'.join(sorted(found))}"
    number = found.pop()
    return f"sm_{number}{'a' if int(number) >= 90 else ''}", ""


def why_not(backend: KernelBackend, shared: bool) -> str | None:
    """Returns why a backend serves nothing, or None.

    Args:
        backend: it.
        shared: in a program of several processes, or of this one alone.
    """
    if why := backend.available():
        return why
    if shared and not (same := _agreed.get(_digest())):
        if same is False:
            return "the processes differ in what they would generate"
        since = " as it is now" * bool(_agreed)  # as after another registration
        return (
            f"the processes have not compared what they would generate{since}: call "
            "te.backends.agree() in each"
        )
    return arch(backend.platform)[1] or None


def resolve(
    op: str,
    platform: str,
    operands: tuple[jax.ShapeDtypeStruct, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    attrs: Mapping[str, Any],
    shared: bool,
) -> Kernel | str:
    """Finds a kernel for a call, and makes it where there is none.

    Args:
        op: name of the op.
        platform: "cpu" or "cuda".
        operands: their types.
        results: likewise.
        attrs: static attributes, those that tell the variant included.
        shared: whether other processes run the program too, and must find the same.

    Returns:
        The kernel, ready to be called, or why there is none.
    """
    reasons = []
    for backend in backends(op, platform):
        changing = {k: v for k, v in attrs.items() if k not in backend.shape_attrs}
        key = JitKey(
            op,
            platform,
            arch(platform)[0],
            tuple(t.dtype.name for t in operands),
            tuple(t.dtype.name for t in results),
            tuple(sorted(changing.items())),
        )
        found = _ask(backend, Call(key, operands, results, attrs), shared)
        if isinstance(found, Kernel):
            return found
        reasons.append(f"{backend.name}: {found}")
    return "; ".join(reasons) or f"no backend generates kernels for it on {platform}"


def _ask(backend: KernelBackend, call: Call, shared: bool) -> Kernel | str:
    """The kernel of one backend, or why there is none; a faulty one stops no run."""
    try:
        why = why_not(backend, shared) or backend.supports(call)
        name = "" if why else target(backend, call.key)
    except Exception as error:
        why = _failed(error)
        disk.warn(f"{call.key.op}: asking {backend.name} {why}")
    else:
        why = why or _make(backend, call.key, name, shared)
    return why or Kernel(name, backend, call)


def _failed(error: Exception) -> str:
    """The first line of an error."""
    return f"failed: {f'{type(error).__name__}: {error}'.strip().splitlines()[0]}"


def target(backend: KernelBackend, key: JitKey) -> str:
    """Returns the name of a key's FFI target, and of its file.

    It changes with all that the code depends on, so that no cache of compiled
    programs can pair a program with another kernel.
    """
    parts = (backend.name, backend.version(), backend.source_hash(), key)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"te_flax.jit.{key.op}.{digest[:16]}"


def _make(backend: KernelBackend, key: JitKey, name: str, shared: bool) -> str:
    """Makes the kernel of a key unless it was; returns the error, if it has one."""
    new = functools.partial(Entry, backend.name, key)
    error = _entries.once(name, new(), lambda entry: _built(entry, backend, name))
    if not shared:
        return error
    return _everywhere.once(name, new(), lambda _: agreement.settle(name, error))


def _built(entry: Entry, backend: KernelBackend, name: str) -> str:
    """Builds or loads the kernel here; returns the error, if there is one."""
    try:
        with _building:
            _fill(entry, backend, name)
    except Exception as error:
        return _failed(error)
    return ""


def _fill(entry: Entry, backend: KernelBackend, name: str) -> None:
    start = time.perf_counter()
    entry.origin = "from disk"
    function = _targets.get(name) or disk.load(backend, name)
    if function is None:
        entry.origin = "compiled"
        with tempfile.TemporaryDirectory() as work:
            function = backend.build(entry.key, Path(work, name))
            if isinstance(function, Path):
                function = backend.load(disk.keep(function))
    if name not in _targets:
        backend.register(name, function)
        _targets[name] = function
    entry.seconds = time.perf_counter() - start


def made() -> Iterator[tuple[JitKey, str, float]]:
    """Yields key, origin ("compiled" or "from disk") and seconds of each kernel."""
    for entry in list(_entries.values()):
        if entry.done.is_set() and not entry.error:
            yield entry.key, entry.origin, entry.seconds


def reset() -> None:
    """Forgets which kernels could not be made, so that they are tried again.

    Kernels that are there stay: XLA forgets no target. A function that was jitted
    meanwhile keeps what it was compiled with. Of several processes each must call it.

    Example:
        >>> reset()
    """
    _forget(lambda entry: True)
    agreement.again()
    disk.warn.cache_clear()


def ensure(names: Iterable[str]) -> None:
    """Loads kernels from disk by the names of their FFI targets.

    A program of ``jax.export`` calls them by name; what runs it must have them.

    Args:
        names: as in the program's text, ``te_flax.jit.<op>.<hash>``.

    Raises:
        ValueError: a kernel is neither here nor on disk.
        TypeError: names is a string.

    Example:
        >>> ensure([])
    """
    if isinstance(names, str):
        rule, remedy = "be a list of names", f"write [{names!r}]"
        raise TypeError(message("ensure", "names", rule, repr(names), remedy))
    for name in map(str, names):
        with _building:
            if name in _targets:
                continue
            for backend in _all():
                function = disk.load(backend, name)
                if function is not None:
                    backend.register(name, function)
                    _targets[name] = function
                    break
            else:
                rule = f"be a kernel on disk in {disk.folder()}"
                remedy = "copy its file from where the program was exported"
                raise ValueError(message("ensure", "names", rule, name, remedy))


def _all() -> Iterator[KernelBackend]:
    yield from (backend for backend, _ in (*reversed(_registered), *_own()))


def _facts(backend: KernelBackend) -> tuple:
    """What the kernels of a backend depend on; a faulty one stops no process."""
    try:
        made_by = backend.version(), backend.source_hash()
        return backend.name, *made_by, bool(backend.available()), arch(backend.platform)
    except Exception as error:
        return backend.name, _failed(error)


def _digest() -> str:
    """What must be equal in all processes for them to compile the same program."""
    text = repr(([*map(_facts, _all())], CONFIG.jit, CONFIG.kernels))
    return hashlib.sha256(text.encode()).hexdigest()


def agree() -> bool:
    """Compares what the processes would generate; each must call it, once.

    Without it, or where they differ, a program of several processes runs the compiled
    handlers: all must compile the same. So it does for a kernel that a process cannot
    make, or does not come to within some minutes. Programs of one process need none.

    Returns:
        Whether backends, versions, sources, GPUs and settings are equal everywhere.

    Example:
        >>> agree()
        True
    """
    mine = _digest()
    agreement.again()
    same = agreement.is_everywhere(mine)
    _agreed.clear()
    _agreed[mine] = same
    return same


def describe(op: str, platform: str) -> tuple[bool, str]:
    """What the kernel report says of an op.

    Args:
        op: its name.
        platform: "cpu" or "cuda".

    Returns:
        Whether a backend may serve it here, and which, with its kernels so far; or why
        none does.
    """
    reasons = []
    for backend in backends(op, platform):
        try:
            why = why_not(backend, jax.process_count() > 1)
            version = f"{backend.name} {backend.version()}"
        except Exception as error:
            why, version = _failed(error), ""
        if why:
            reasons.append(why)
            continue
        lacking = {n: e for n, e in list(_everywhere.items()) if e.error}
        known = (dict(_entries) | lacking).values()
        mine = [e for e in known if (e.backend, e.key.op) == (backend.name, op)]
        version = version.strip()
        return True, f"{version} | {_counted(mine)}" if mine else version
    return False, "; ".join(reasons) or "no backend generates kernels for it"


def _counted(entries: list[Entry]) -> str:
    """Such as "3 configs: 2 compiled (1.7 s), 1 from disk"."""
    parts = []
    for origin in ("compiled", "from disk"):
        found = [e for e in entries if not e.error and e.origin == origin]
        took = f" ({sum(e.seconds for e in found):.1f} s)" * (origin == "compiled")
        parts += [f"{len(found)} {origin}{took}"] * bool(found)
    failed = [e.error for e in entries if e.error]
    parts += [f"{len(failed)} {why}" for why in failed[:1]]
    plural = "s" * (len(entries) != 1)
    return f"{len(entries)} config{plural}: {', '.join(parts)}"
