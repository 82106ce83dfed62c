"""The static choices of one MXFP8 quantize kernel, read from its key."""

from typing import NamedTuple

from te_flax.backends.protocol import JitKey

ROW_SUMS = 128  # rows of h in one partial sum, as kSumRows of column_sum.cuh


class Spec(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: of x and dy, which h and the sums over it are rounded to.
        row_format: of the row codes, or None.
        col_format: of the column codes, or None.
        row_values: whether the row copy holds the values of its codes in bfloat16.
        col_values: likewise.
        swizzled: whether the scales are in tiles of 128 x 4.
        noop: whether a flag keeps the previous results.
        h: whether h itself is a result.
        dbias: whether its sum over the rows is.
        activation: that h is one of, or of whose gradient; empty for h = x.
        backward: whether h is the gradient.
    """

    dtype: str
    row_format: str | None
    col_format: str | None
    row_values: bool
    col_values: bool
    swizzled: bool
    noop: bool
    h: bool
    dbias: bool
    activation: str
    backward: bool

    @property
    def slices(self) -> int:
        """Slices of h."""
        return len(self.activation.split(",")) if self.backward else 1

    @property
    def read_slices(self) -> int:
        """Slices of x."""
        return len(self.activation.split(","))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results, in order."""
        wanted = {
            "h": self.h,
            "row": self.row_format,
            "row_scale": self.row_format,
            "col": self.col_format,
            "col_scale": self.col_format,
            "dbias": self.dbias,
            "amax": True,
        }
        return tuple(name for name, given in wanted.items() if given)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all that the kernel is called with, in order."""
        first = ("noop",) * self.noop + ("dy",) * self.backward + ("x",)
        previous = tuple(f"prev_{name}" for name in self.results if self.noop)
        return (*first, *previous, *self.results, *("sums",) * self.dbias)


def spec_of(key: JitKey) -> Spec:
    """Reads the choices of a key."""
    found = Spec(
        dtype=key.operands[int(key.attr("noop", False))],
        row_format=key.attr("row_format"),
        col_format=key.attr("col_format"),
        row_values=False,
        col_values=False,
        swizzled=key.attr("swizzled", False),
        noop=key.attr("noop", False),
        h=key.attr("h", False),
        dbias=key.attr("dbias", False),
        activation=key.attr("activation", ""),
        backward=key.op.startswith("act_bwd"),
    )
    dtypes = dict(zip(found.results, key.results, strict=True))
    return found._replace(
        row_values=dtypes.get("row") == "bfloat16",
        col_values=dtypes.get("col") == "bfloat16",
    )
