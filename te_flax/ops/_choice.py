"""Which implementation of an op runs: TE_FLAX_KERNELS and the `kernels` context."""

import contextlib
import fnmatch
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from te_flax.config import CONFIG
from te_flax.errors import message

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp

HOWS = ("auto", "native", "reference", "jit")
Rules = tuple[tuple[str, str], ...]

REGISTRY: "dict[str, KernelOp]" = {}  # filled where ops are declared, at import
_context = jax.make_user_context(())  # part of every jit cache key


def parse(spec: str, where: str = "kernels") -> Rules:
    """Reads ``"gemm=reference,quantize_*=native"``.

    Args:
        spec: comma list of ``op-glob=how``; empty means no rule.
        where: name of the setting, for the error.

    Returns:
        The (glob, how) pairs in order.

    Raises:
        ValueError: an item is not ``op-glob=auto|native|reference|jit``.
        TypeError: the spec is no string.
    """
    if not isinstance(spec, str):
        got = f"{spec!r} of {type(spec).__name__}"
        remedy = 'write "gemm=reference" for a family of ops'
        raise TypeError(message(where, "spec", "be of type str", got, remedy))
    rules = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        glob, _, how = (part.strip() for part in item.partition("="))
        if not glob or how not in HOWS:
            rule = f"be <op or glob>={'|'.join(HOWS)}"
            raise ValueError(
                message(where, item, rule, repr(item), "separate by commas")
            )
        rules.append((glob, how))
    return tuple(rules)


def matches(op: str, glob: str) -> bool:
    """Whether a rule is about an op: a name without wildcards covers its family."""
    family = not any(c in glob for c in "*?[") and op.startswith(f"{glob}_")
    return family or fnmatch.fnmatchcase(op, glob)


def _known(rules: Rules, where: str) -> Rules:
    for glob, how in rules:
        if not any(matches(op, glob) for op in REGISTRY):
            ops = f"the ops are {', '.join(sorted(REGISTRY))}"
            raise ValueError(message(where, glob, "match an op", f"{glob}={how}", ops))
    return rules


@functools.cache
def environment() -> Rules:
    """Returns the rules of TE_FLAX_KERNELS, checked when the first op is called."""
    return _known(parse(CONFIG.kernels, "TE_FLAX_KERNELS"), "TE_FLAX_KERNELS")


@contextlib.contextmanager
def kernels(spec: str) -> Iterator[None]:
    """Chooses implementations inside a ``with`` block.

    A name without wildcards stands for itself and its family: ``gemm`` for every
    ``gemm_*``. The last rule that matches an op decides; inner blocks refine outer
    ones, which refine ``TE_FLAX_KERNELS``. ``auto`` is the measured default,
    ``native`` a compiled handler (an error where there is none), ``reference`` the
    pure JAX definition, ``jit`` a kernel generated at run time. The choice is part of
    the jit cache key, and an op keeps the one it was traced under.

    Args:
        spec: comma list of ``op-glob=auto|native|reference|jit``.

    Yields:
        Nothing.

    Raises:
        ValueError: an item has another form, or its glob matches no op.
        TypeError: the spec is no string.

    Example:
        >>> import te_flax as te
        >>> with te.kernels("gemm=reference"):
        ...     pass
    """
    rules = _known(parse(spec), "kernels")
    with _context((*_context.value, *rules)):
        yield


def current() -> Rules:
    """Returns the rules in force, outermost first: a hashable static argument."""
    return (*environment(), *_context.value)


def how(op: str, rules: Rules) -> str:
    """Returns ``"auto"``, ``"native"``, ``"reference"`` or ``"jit"`` for one op."""
    return deciding(op, rules)[1]


def deciding(op: str, rules: Rules) -> tuple[str, str]:
    """Returns the (glob, how) that decides for one op; without one, its auto."""
    found = (rule for rule in reversed(rules) if matches(op, rule[0]))
    return next(found, (op, "auto"))
