"""One answer for all processes, since a program of several must be the same in each.

Whether a kernel can be had they settle through the service that ``jax.distributed``
keeps, by the kernel's name: a collective of devices would have to come in one order
everywhere, and a process that does not come would stop the others.
"""

import contextlib
from typing import Any

import jax
import numpy as np

PATIENCE = 300  # seconds that the first process waits for another one
_READY = "ready"
_try = 0  # all processes count alike


def is_everywhere(digest: str) -> bool:
    """Returns whether every process has this digest (hexadecimal); all must ask."""
    if jax.process_count() == 1:
        return True
    from jax.experimental import multihost_utils

    words = np.frombuffer(bytes.fromhex(digest), np.uint32)
    everywhere = np.asarray(multihost_utils.process_allgather(words))
    return bool((everywhere == words).all())


def again() -> None:
    """Begins another try of every kernel; each process must call it."""
    global _try
    _try += 1


def settle(name: str, error: str) -> str:
    """Returns why a kernel cannot be used, the same text in every process.

    It can be used if every process has it. The first verdict is written once and read
    by all, those that come late included.

    Args:
        name: of its FFI target.
        error: why this process does not have it; empty if it does.
    """
    store = _store()
    if store is None:
        return "jax.distributed.initialize() was not called: processes cannot agree"
    mine, place = jax.process_index(), f"{name}/{_try}"
    store.key_value_set(f"{place}/{mine}", error or _READY, allow_overwrite=True)
    if error:
        verdict = f"process {mine}: {error}"
    elif mine == 0:
        verdict = _of_all(store, place)
    else:
        # Twice, since the first process may be waiting for a third one.
        verdict = _read(store, f"{place}/verdict", 2 * PATIENCE) or _missing(0)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was first
        store.key_value_set(f"{place}/verdict", verdict)
    verdict = store.blocking_key_value_get(f"{place}/verdict", 10_000)  # it is there
    return "" if verdict == _READY else verdict


def _of_all(store: Any, place: str) -> str:
    for i in range(jax.process_count()):
        found = _read(store, f"{place}/{i}", PATIENCE)
        if found != _READY:
            return f"process {i}: {found}" if found else _missing(i)
    return _READY


def _missing(process: int) -> str:
    return f"process {process} did not come to this kernel in time"


def _read(store: Any, key: str, seconds: float) -> str:
    """What a process wrote; empty if it does not come."""
    try:
        return store.blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return ""
        raise


def _store() -> Any:
    """The client of the service, None where there is none."""
    from jax._src.distributed import global_state

    return global_state.client
