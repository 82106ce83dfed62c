"""What this machine would run for every op, and why."""

from typing import NamedTuple

import jax

from te_flax.backends import registry
from te_flax.ops import _choice, _extension, _gather_order, _jit, _sizes
from te_flax.ops._lowering import PLATFORMS, why_reference

FOOTNOTE = (
    "Inside a shard_map that leaves two or more axes Auto, auto runs the reference of "
    "every op; make all but one of them manual or Explicit."
)


class Row(NamedTuple):
    """One line of the report."""

    op: str
    platform: str
    runs: str
    why: str


def platforms() -> tuple[str, ...]:
    """Returns the platforms with handlers that jax has here."""
    return tuple(p for p in PLATFORMS if _present(p))


def _present(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:  # jax has no such backend
        return False


def rows() -> list[Row]:
    """Returns what would run for every op and present platform under the rules.

    Returns:
        ``runs`` is "native", "jit", "reference" or "error"; ``why`` says what decided
        it.
    """
    rules, present = _choice.current(), platforms()
    return [
        _row(name, platform, rules)
        for name in sorted(_choice.REGISTRY)
        for platform in present
    ]


def _row(name: str, platform: str, rules: _choice.Rules) -> Row:
    op = _choice.REGISTRY[name]
    glob, chosen = _choice.deciding(name, rules)
    reason = why_reference(op, platform, None, (), chosen)
    if chosen == "reference":
        return Row(name, platform, "reference", f"{glob}=reference was asked for")
    aside = ""
    if _jit.wanted(chosen):
        usable, text = registry.describe(name, platform)
        if usable or chosen == "jit":
            return Row(name, platform, "jit" if usable else "error", text)
        aside = f" (jit: {text})"
    if reason:
        runs = "error" if chosen == "native" else "reference"
        return Row(name, platform, runs, reason + aside)
    classes = _sizes.of(name, platform) if chosen == "auto" else []
    why = [f"handler te_flax.{op.handler}", *(f"reference for {c}" for c in classes)]
    return Row(name, platform, "native", "; ".join(why) + aside)


def grouped(found: list[Row]) -> list[Row]:
    """Joins the rows of a family, ``gemm`` and all ``gemm_*``, where they are equal.

    Args:
        found: as :func:`rows` returns them.

    Returns:
        One row per platform for each largest family whose ops agree on all platforms,
        its op written ``gemm_* (24)``; the other ops as they were.
    """
    codes: dict[str, list[Row]] = {}
    values: dict[str, list[Row]] = {}  # variants of MXFP8 ops, a handler of their own
    for row in found:
        part = values if "values" in row.op else codes
        part.setdefault(row.op, []).append(row)
    families: dict[tuple[str, ...], list[str]] = {}
    for op, rows in values.items():
        tail = str([row[1:] for row in rows])
        families.setdefault((op.split("_")[0], tail), []).append(op)
    joined = [
        Row(f"{first}_*values ({len(ops)})", *row[1:])
        for (first, _), ops in families.items()
        for row in values[ops[0]]
    ]
    return [*_split("", 0, codes), *joined]


def _split(prefix: str, depth: int, by_op: dict[str, list[Row]]) -> list[Row]:
    """The rows of the ops that share ``depth`` words, as few as tell the truth."""
    tails = {tuple(row[1:] for row in rows) for rows in by_op.values()}
    if len(by_op) == 1:
        return next(iter(by_op.values()))
    if depth and len(tails) == 1:
        own = f"{prefix}, " if prefix in by_op else ""
        label = f"{own}{prefix}_* ({len(by_op)})"
        return [Row(label, *tail) for tail in next(iter(tails))]
    families: dict[str, dict[str, list[Row]]] = {}
    for op, rows in by_op.items():
        words = op.split("_")
        # An op that ends here is a family of its own.
        key = "_".join(words[: depth + 1]) if len(words) > depth else f"{op}_"
        families.setdefault(key, {})[op] = rows
    return [
        row for key, part in families.items() for row in _split(key, depth + 1, part)
    ]


def kernel_report() -> None:
    """Prints what was built and what would run, for every op, where and why.

    Columns of the table:

    - op: the op, or a family of ops whose rows are equal, with their number. A rule of
      :func:`te_flax.kernels` names either: ``gemm`` for all of ``gemm_*``.
    - platform: where it would run; only platforms that jax has here are listed.
    - runs: ``native`` (the compiled handler), ``jit`` (a kernel generated at run time,
      for the calls that its backend supports), ``reference`` (pure JAX, compiled by
      XLA) or ``error`` (the rules ask for what does not exist).
    - why: the handler, the backend and its kernels so far, the rule that was asked for,
      or what keeps the handler away.

    Below it stands in which order :func:`te_flax.allgather_rms_norm` takes its steps.

    Example:
        >>> kernel_report()  # doctest: +ELLIPSIS
        build: ...
    """
    info = ", ".join(f"{k}={v}" for k, v in _extension.build_info().items())
    print(f"build: {info}")
    print(f"CPU handlers: SIMD {_extension.simd_level()}")
    rules = ",".join(f"{glob}={how}" for glob, how in _choice.current())
    print(f"rules: {rules or 'none'}")
    table = [Row("op", "platform", "runs", "why"), *grouped(rows())]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        cells = [text.ljust(n) for text, n in zip(row[:3], widths, strict=True)]
        print("  ".join((*cells, row.why)))
    print(FOOTNOTE)
    print(f"{_gather_order.TITLE}:")
    print("\n".join(_gather_order.lines()))
