"""The order in which rows are gathered, normalised and quantized, by bytes sent."""

from typing import NamedTuple

TITLE = "allgather_rms_norm, by the outputs asked for"
OUTPUTS = ("normed", "quantized", "residual")


class Order(NamedTuple):
    """What happens to a row before and behind the gather.

    Attributes:
        first: what its owner computes: "" (nothing), "norm" or "quantized norm".
        then: what every device computes of the gathered rows, likewise or "quantize".
        why: what decided.
    """

    first: str
    then: str
    why: str

    def __str__(self) -> str:
        """The steps, in order."""
        return ", ".join(filter(None, (self.first, "gather", self.then)))

    def makes(self, outputs: tuple[str, ...]) -> bool:
        """Whether the steps give these outputs, and compute nothing else."""
        steps = (self.first, self.then)
        quantized = "quantized norm" in steps or "quantize" in steps
        normed = quantized or "norm" in steps
        return quantized == ("quantized" in outputs) and normed == (
            outputs != ("residual",)
        )


# By the outputs asked for. All orders give the same bits: each step is row by row.
_ALONE = Order("", "", "nothing else is asked for")
_NORM = Order("norm", "", "each row is normalised once and travels once")
_CODES = Order("quantized norm", "", "codes travel, half the bytes or fewer")
_BOTH = Order("norm", "quantize", "one array travels, codes are made of it")
_ROWS = Order("", "norm", "the residual travels anyway, then nothing else must")
_FUSED = Order("", "quantized norm", _ROWS.why)
ORDERS: dict[tuple[str, ...], Order] = {
    ("normed",): _NORM,
    ("quantized",): _CODES,
    ("residual",): _ALONE,
    ("normed", "quantized"): _BOTH,
    ("normed", "residual"): _ROWS,
    ("quantized", "residual"): _FUSED,
    OUTPUTS: _FUSED,
}


def lines() -> list[str]:
    """Returns what the kernel report says: a line for each set of outputs."""
    found = [(" + ".join(outputs), str(o), o.why) for outputs, o in ORDERS.items()]
    widths = [max(len(row[i]) for row in found) for i in range(2)]
    return ["  ".join(("", *map(str.ljust, row[:2], widths), row[2])) for row in found]
