"""What a compiled program sends."""

import re
from collections import Counter


def collectives(text):
    """How often each kind has a result of each shape, ``("all-reduce", "f32[2]")``."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = Counter()
    alone = r".*replica_groups=\{(\{\d+\},?)+\}.*"  # over a mesh axis of size 1
    text = re.sub(alone, "", text)
    for results, kind, start in re.findall(rf" = (.*?) ({kinds})(-start)?\(", text):
        shapes = re.findall(r"\w+\[[\d,]+\]|f32\[\]", results)
        if start and kind != "all-reduce":  # operands stand in front of results
            shapes = shapes[len(shapes) // 2 :]
        found.update((kind, shape) for shape in shapes)
    return found
