"""What a compiled program sends."""

import re
from collections import Counter


def collectives(text):
    """How often each kind has a result of each shape, ``("all-reduce", "f32[2]")``."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = Counter()
    for results, kind in re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text):
        shapes = re.findall(r"\w+\[[\d,]*\]", results)
        found.update((kind, shape) for shape in shapes)
    return found
