"""The collectives of a compiled program, and the bytes that a device sends for them."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_CALL = re.compile(rf" = (.*?) ({_KINDS})(-start)?\((.*)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One instruction.

    Attributes:
        kind: as HLO calls it, such as "all-reduce".
        shapes: of its results on a device, such as "f32[8,2]".
        group: how many devices take part in it.
    """

    kind: str
    shapes: tuple[str, ...]
    group: int

    def sent(self) -> float:
        """Bytes that a device sends by the ring algorithm.

        With n devices and B bytes of results: all-reduce 2 (n - 1) / n B, all-gather
        and all-to-all (n - 1) / n B, reduce-scatter (n - 1) B, whose operand is n B,
        and collective-permute B.
        """
        n = self.group
        size = sum(map(bytes_of, self.shapes))
        factor = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "reduce-scatter": n - 1,
            "collective-permute": 1,
        }
        return factor[self.kind] * size


def collectives(text: str, devices: int) -> Iterator[Collective]:
    """Yields those of an optimized module between at least two devices.

    Args:
        text: the module; one in a loop counts once.
        devices: of the program.
    """
    for results, kind, start, rest in _CALL.findall(text):
        shapes = [f"{dtype}[{dims}]" for dtype, dims in _SHAPE.findall(results)]
        # The operands stand in front of the results, except where XLA has no need to.
        if start and (kind != "all-reduce" or results.startswith("((")):
            shapes = [s for s in shapes if s not in ("u32[]", "s32[]")]
            shapes = shapes[len(shapes) // 2 :]
        group = _group(rest, devices)
        if group > 1:
            yield Collective(kind, tuple(shapes), group)


def bytes_of(shape: str) -> int:
    """Bytes of an array such as "f32[8,2]"."""
    dtype, dims = _SHAPE.findall(shape)[0]
    if dtype.startswith(("f8", "pred")):
        width = 1
    else:
        width = int("".join(filter(str.isdigit, dtype))) // 8
    return width * math.prod(int(n) for n in dims.split(",") if n)


def _group(rest: str, devices: int) -> int:
    """The size of a group, from any form in which XLA writes replica_groups."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    return devices
