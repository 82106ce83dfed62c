"""Generated kernels on disk: ``jit`` in the folder of TE_FLAX_CACHE.

The files are code, so the folder and they must belong to this user and to nobody else.
Each ends with the hash of what comes before it. What is damaged is deleted; that, and
what does not load, is made again. Without a folder every process makes its kernels.
"""

import functools
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from te_flax.backends.protocol import KernelBackend
from te_flax.config import CONFIG
from te_flax.errors import message

_MARK = b"te_flax.jit"
_TRAILER = hashlib.sha256().digest_size + len(_MARK)


@functools.cache
def warn(text: str) -> None:
    """Logs a text, once a process."""
    logging.getLogger("te_flax").warning("%s", text)


def _foreign(path: Path) -> str:
    """Who else could have written a file or folder, or nothing."""
    if not hasattr(os, "getuid"):  # no such owners
        return ""
    status = path.stat()
    for uid in (path.lstat().st_uid, status.st_uid):  # of a link, and behind it
        if uid != os.getuid():
            return f"one of user {uid}"
    return f"mode {status.st_mode & 0o777:o}" if status.st_mode & 0o022 else ""


def _replaceable(base: Path) -> str:
    """Who else could put another folder in the place of one in base, or nothing."""
    if not hasattr(os, "getuid"):
        return ""
    status = base.stat()
    if status.st_uid not in (0, os.getuid()):
        return f"one in a folder of user {status.st_uid}"
    # With the sticky bit, as in /tmp, an entry is its owner's. Many systems make
    # folders that a group of the user alone can write.
    free = status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
    return f"one in a folder of mode {status.st_mode & 0o777:o}" if free else ""


def folder() -> Path | None:
    """Returns the folder, made if there was none; None if it cannot be used."""
    base = CONFIG.cache_folder()
    if CONFIG.jit_cache == "0" or base is None:
        return None
    path = base / "jit"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        foreign = _foreign(path) or _replaceable(base)
    except OSError as error:
        foreign = str(error)
    if foreign:
        remedy = "kernels are generated anew in every process until it is"
        rule = "be a folder that this user alone can write"
        warn(message("te_flax", str(path), rule, foreign, remedy))
        return None
    return path


def _sound(file: Path) -> bool:
    """Whether a file is ours and whole."""
    if _foreign(file):
        return False
    data = file.read_bytes()
    body, tail = data[:-_TRAILER], data[-_TRAILER:]
    return tail == hashlib.sha256(body).digest() + _MARK


def load(backend: KernelBackend, name: str) -> Any | None:
    """Returns a kernel from its file, or None.

    Args:
        backend: that made it.
        name: of its FFI target.
    """
    base = folder()
    if base is None or Path(name).name != name:  # as one with folders in it
        return None
    for suffix in backend.suffixes:
        file = base / (name + suffix)
        try:
            if not file.exists():
                continue
            if _sound(file):
                return backend.load(file)
            why: object = "a damaged one, or one that others can write"
            file.unlink()
        except Exception as error:  # a loader raises what it likes
            why = error
        rule, remedy = "be a kernel of this user", "it is generated again"
        warn(message("te_flax", str(file), rule, why, remedy))
    return None


def keep(file: Path) -> Path:
    """Moves a new kernel's file to the folder, whole or not at all; never raises.

    Args:
        file: with the name of the kernel's FFI target and a suffix.

    Returns:
        Where it is now; where it was if it cannot be kept.
    """
    base = folder()
    if base is None:
        return file
    try:
        body = file.read_bytes()
        with tempfile.TemporaryDirectory(dir=base) as work:
            sealed = Path(work, file.name)
            sealed.write_bytes(body + hashlib.sha256(body).digest() + _MARK)
            sealed.chmod(0o600)
            return sealed.replace(base / file.name)
    except OSError as error:
        rule, remedy = "take a kernel", "it is generated anew in every process"
        warn(message("te_flax", str(base), rule, error, remedy))
        return file
