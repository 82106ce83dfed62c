"""Kernels by the names of their FFI targets, each made once."""

import dataclasses
import threading
from collections.abc import Callable

from te_flax.backends import disk
from te_flax.backends.protocol import JitKey

_INTERRUPTED = "interrupted"


@dataclasses.dataclass
class Entry:
    """One kernel: pending until ``done``, then ready or, with an error, failed."""

    backend: str
    key: JitKey
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: str = ""
    origin: str = ""  # "compiled" or "from disk"
    seconds: float = 0.0


class Entries(dict[str, Entry]):
    """Those of a process, or of all together."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # held for moments

    def once(self, name: str, new: Entry, make: Callable[[Entry], str]) -> str:
        """Makes a kernel unless it was; returns the error, if it has one.

        Args:
            name: of its FFI target.
            new: its entry, where there is none.
            make: fills the entry and returns the error; other threads wait for it.
        """
        entry = self._wait(name, new)
        if entry is new:
            try:
                entry.error = make(entry)
            except BaseException:  # interrupted: nothing is known of it
                with self._lock:
                    del self[name]
                entry.error = _INTERRUPTED
                raise
            finally:
                entry.done.set()
            if entry.error:
                op = entry.key.op
                disk.warn(f"{op}: no kernel of {entry.backend}: {entry.error}")
        return entry.error

    def _wait(self, name: str, new: Entry) -> Entry:
        """The entry when it is done, or ``new`` where it is left to the caller."""
        while True:
            with self._lock:
                entry = self.setdefault(name, new)
            if entry is new:
                return entry
            entry.done.wait()
            if entry.error != _INTERRUPTED:
                return entry

    def forget(self, which: Callable[[Entry], bool]) -> None:
        """Drops kernels that could not be made, so that they are tried again."""
        with self._lock:
            for name, entry in list(self.items()):
                if entry.done.is_set() and entry.error and which(entry):
                    del self[name]
