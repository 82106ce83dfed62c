"""What a compiled program sends."""

from collections import Counter

from benchmarks import wire


def collectives(text, devices=8):
    """How often each kind has a result of each shape, ``("all-reduce", "f32[2]")``."""
    found = wire.collectives(text, devices)
    return Counter((each.kind, shape) for each in found for shape in each.shapes)
