"""Words and their numbers."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

PADDING, UNKNOWN = 0, 1
WORD = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")  # a run of letters and digits, or one sign


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case; a punctuation mark is a word too.

    Example:
        >>> words("Who's there?")
        ['who', "'", 's', 'there', '?']
    """
    return WORD.findall(text.lower())


class Tokenizer:
    """Numbers the words that occur often enough in the training texts.

    Args:
        texts: that the vocabulary is made from.
        min_count: a rarer word is unknown.

    Example:
        >>> tokenizer = Tokenizer(["a b", "b c b"], min_count=1)
        >>> tokenizer(["b a x"], length=4)
        array([[2, 3, 1, 0]], dtype=int32)
    """

    def __init__(self, texts: Iterable[str], *, min_count: int = 2):
        counts = Counter(word for text in texts for word in words(text))
        kept = sorted((-n, word) for word, n in counts.items() if n >= min_count)
        self.number = {word: 2 + i for i, (_, word) in enumerate(kept)}

    def __len__(self) -> int:
        """The number of different token numbers."""
        return 2 + len(self.number)

    def __call__(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Returns token numbers int32 [n, length], cut or padded with 0.

        A text without a word becomes one unknown word, so that no row is empty.
        """
        tokens = np.full((len(texts), length), PADDING, np.int32)
        for row, text in zip(tokens, texts, strict=True):
            found = [self.number.get(word, UNKNOWN) for word in words(text)]
            found = (found or [UNKNOWN])[:length]
            row[: len(found)] = found
        return tokens
