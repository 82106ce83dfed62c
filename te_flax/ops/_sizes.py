"""Measured defaults: operands so small that XLA's code for the reference is faster.

``python -m benchmarks.sizes`` measures them, and docs/perf.md has its tables.
"""

from typing import NamedTuple


class SizeClass(NamedTuple):
    """Calls that ``auto`` leaves to the reference."""

    platform: str
    op: str
    dtype: str  # of the largest operand
    below: int  # elements of it

    def __str__(self) -> str:
        return f"fewer than {self.below} elements of {self.dtype}"


WIDENED = ("dequantize_mxfp8_row", "dequantize_mxfp8_col", "dequantize_block")
SMALL = {
    "bfloat16": ("act_fwd",),
    "float32": ("act_fwd",),
    "float8_e4m3fn": WIDENED,
    "float8_e5m2": WIDENED,
}
REFERENCE = tuple(
    SizeClass("cuda", op, dtype, below=64 * 1024 + 1)
    for dtype, ops in SMALL.items()
    for op in ops
)


def of(op: str, platform: str) -> list[SizeClass]:
    """Returns the classes of an op that the reference serves on a platform."""
    return [c for c in REFERENCE if (c.platform, c.op) == (platform, op)]


def why(op: str, platform: str, avals) -> str | None:
    """Returns why ``auto`` leaves a call to the reference, or None.

    Args:
        op: name of the op.
        platform: "cpu" or "cuda".
        avals: types of the operands.
    """
    largest = max(avals, key=lambda aval: aval.size)
    for found in of(op, platform):
        if largest.dtype.name == found.dtype and largest.size < found.below:
            return f"XLA was measured faster for {found}"
    return None
