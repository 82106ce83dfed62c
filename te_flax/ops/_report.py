"""What this machine would run for every op, and why."""

from typing import NamedTuple

from te_flax.ops import _choice, _extension
from te_flax.ops._lowering import PLATFORMS, why_reference


class Row(NamedTuple):
    """One line of the report."""

    op: str
    platform: str
    runs: str
    why: str


def rows() -> list[Row]:
    """Returns what would run for every op and platform under the rules in force.

    Returns:
        ``runs`` is "native", "reference" or "error"; ``why`` says what decided it.
    """
    rules = _choice.current()
    found = []
    for name, op in sorted(_choice.REGISTRY.items()):
        chosen = _choice.how(name, rules)
        for platform in PLATFORMS:
            reason = why_reference(op, platform, None, ())
            if chosen == "reference":
                row = Row(
                    name, platform, "reference", f"{name}=reference was asked for"
                )
            elif chosen == "jit":
                row = Row(name, platform, "error", "no kernel is generated at run time")
            elif reason and chosen == "native":
                row = Row(name, platform, "error", reason)
            elif reason:
                row = Row(name, platform, "reference", reason)
            else:
                row = Row(name, platform, "native", f"handler te_flax.{op.handler}")
            found.append(row)
    return found


def kernel_report() -> None:
    """Prints what was built and, for every op and platform, what would run and why.

    Example:
        >>> kernel_report()  # doctest: +ELLIPSIS
        build: ...
    """
    info = ", ".join(f"{k}={v}" for k, v in _extension.build_info().items())
    print(f"build: {info}")
    print(f"CPU handlers: SIMD {_extension.simd_level()}")
    rules = ",".join(f"{glob}={how}" for glob, how in _choice.current())
    print(f"rules: {rules or 'none'}")
    table = [Row("op", "platform", "runs", "why"), *rows()]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        cells = [text.ljust(n) for text, n in zip(row[:3], widths, strict=True)]
        print("  ".join((*cells, row.why)))
