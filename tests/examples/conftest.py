"""Builds small data sets: IDX folders and files of sentences."""

import gzip

import jax
import numpy as np
import pytest


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


def write_sentences(folder):
    """A file of 150 sentences whose label one of their words decides."""
    rng = np.random.default_rng(0)
    poor = ["bleak", "cold", "cruel", "dull", "grim"]
    fine = ["bright", "calm", "fair", "kind", "warm"]
    nouns = [f"noun{i}" for i in range(12)]
    lines = ["sentence\tlabel"]
    for i in range(150):
        first, second, third = rng.choice(nouns, 3)
        word = rng.choice((poor, fine)[i % 2])
        lines.append(f"the {first} of {second} is {word} in {third} {i}\t{i % 2}")
    path = folder / "sentences.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


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
