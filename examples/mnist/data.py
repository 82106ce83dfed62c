"""The data sets of the example, and the batches that training draws from them."""

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.errors import invalid
from examples.mnist.fetch import digits

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels in [0, 1]
TEST_IMAGES = 1000
EVAL_BATCH = 500
SHIFT = 2


class Dataset(NamedTuple):
    """Images uint8 [n, 28, 28] with labels int32 [n], for training and for testing."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(data_dir: str | Path | None = None) -> Dataset:
    """Returns the data set.

    Args:
        data_dir: folder with the four standard IDX files of MNIST or Fashion-MNIST,
            gzipped or not. None: 5,000 MNIST digits, fetched once, of which a fixed
            hash of each image picks 1,000 for the test set.

    Returns:
        The images and labels of both parts.

    Raises:
        InputError: the files are missing or corrupt, or the digits cannot be fetched.
    """
    if data_dir is None:
        return split(*digits())
    folder = Path(data_dir)
    if not folder.is_dir():
        remedy = "name the folder that holds the four IDX files"
        raise invalid("--data-dir", "be a directory", f"'{folder}'", remedy)
    train, test = (read_part(folder, part) for part in ("train", "t10k"))
    return Dataset(*train, *test)


def split(images: np.ndarray, labels: np.ndarray) -> Dataset:
    """Moves the images with the smallest SHA-256 into the test set.

    The choice depends on the bytes of the images only: not on their order, on a
    seed or on a library's random numbers, so it is the same everywhere and forever.
    """
    digests = [hashlib.sha256(image.tobytes()).digest() for image in images]
    order = np.array(sorted(range(len(images)), key=digests.__getitem__))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Dataset(images[train], labels[train], images[test], labels[test])


def read_part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the images and labels of one part and checks that they belong together."""
    images, path = read_idx(folder, f"{part}-images-idx3-ubyte", ndim=3)
    labels, label_path = read_idx(folder, f"{part}-labels-idx1-ubyte", ndim=1)
    remedy = "take both files from the same data set"
    if images.shape[1:] != (28, 28) or not len(images):
        raise invalid(str(path), "hold 28x28 images", images.shape, remedy)
    if len(labels) != len(images) or labels.max() > 9:
        rule = f"hold {len(images)} labels from 0 to 9"
        got = f"{len(labels)} from 0 to {labels.max(initial=0)}"
        raise invalid(str(label_path), rule, got, remedy)
    return images, labels.astype(np.int32)


def read_idx(folder: Path, name: str, ndim: int) -> tuple[np.ndarray, Path]:
    """Reads one IDX file of bytes: 0, 0, 8, ndim, big-endian dims, then the data."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.exists() else packed
    if not path.exists():
        names = sorted(entry.name for entry in folder.iterdir())
        got = f"no such file among {names[:4]}" if names else "an empty directory"
        remedy = "name the folder that holds the four IDX files"
        raise invalid("--data-dir", f"hold {name} or {name}.gz", got, remedy)
    remedy = "the file is corrupt, fetch it again"
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path == packed else raw
    except (OSError, EOFError, zlib.error) as error:
        raise invalid(str(path), "be a readable file", error, remedy) from error
    start = 4 + 4 * ndim
    if raw[:4] != bytes([0, 0, 8, ndim]) or len(raw) < start:
        rule = f"begin with 0, 0, 8, {ndim} and the size of its {ndim} dims"
        raise invalid(str(path), rule, list(raw[:start]), remedy)
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", ndim, offset=4))
    size = math.prod(shape)
    if len(raw) - start != size:
        rule = f"hold {size} bytes for its shape {shape}"
        raise invalid(str(path), rule, f"{len(raw) - start}", remedy)
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape), path


def normalize(images: np.ndarray) -> np.ndarray:
    """Returns float32 [n, 28, 28, 1] with mean 0 and deviation 1 on MNIST."""
    scaled = images.astype(np.float32) / np.float32(255)
    return ((scaled - np.float32(MEAN)) / np.float32(STD))[..., None]


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves each image by up to SHIFT pixels each way; zeros come in at the edges."""
    n, height, width = images.shape
    padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
    down, right = rng.integers(0, 2 * SHIFT + 1, (2, n))
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def train_batches(
    data: Dataset, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields shuffled, shifted batches; the same ones for the same seed and epoch.

    The images that do not fill a last batch sit out this epoch.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(data.train_images))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        images = shift(data.train_images[chosen], rng)
        yield normalize(images), data.train_labels[chosen]


def eval_batches(data: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the whole test set in order."""
    for start in range(0, len(data.test_images), EVAL_BATCH):
        chosen = slice(start, start + EVAL_BATCH)
        yield normalize(data.test_images[chosen]), data.test_labels[chosen]
