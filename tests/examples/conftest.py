"""Builds small data sets: IDX folders and files of sentences."""

import gzip

import jax
import numpy as np
import pytest
from _sentences import write_sentences


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam raises a float to an integer power, which strict mode refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX file of a uint8 array, written out from the format's description."""
    header = bytes([0, 0, 8, array.ndim])
    return (
        header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    )


@pytest.fixture
def idx_folder(tmp_path):
    """A folder of 120 training and 30 test images, half of the files gzipped."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "idx"
    folder.mkdir()
    for part, count in (("train", 120), ("t10k", 30)):
        images = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        packed = gzip.compress(idx_bytes(images))
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(packed)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder


@pytest.fixture
def sentences(tmp_path):
    """That file."""
    return write_sentences(tmp_path)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Cuts pip off from every index and gives the example an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("TE_FLAX_CACHE", str(tmp_path / "cache"))
    return links
