"""A small file of labelled sentences."""

import numpy as np


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
