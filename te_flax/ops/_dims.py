"""Signatures of named dimensions: the grammar, the shape errors, the layout of a call.

``"x: M.. K.., scale: -> row: M.. K.., row_scale: M.. K../32, amax: 2"`` names every
operand and result and its dims: ``d`` is one dim, ``G..`` a group of any number of
dims, ``d/32`` or ``G../32`` one dim with an entry per (partial) block of 32 consecutive
elements of the flattened group, ``d+G../32`` the same over ``d`` and the group behind
it, and an integer a dim of that size.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from te_flax.errors import message
from te_flax.typing import Shape

_WORD = re.compile(r"(?:([A-Za-z]+)\+(?=.*/))?([A-Za-z]+)(\.\.)?(?:/([1-9]\d*))?|(\d+)")
Maps = tuple[tuple[bool, ...], ...]  # per vmap level that joined no group: the operands
Dims = tuple["str | int | Block", ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One word of a signature, as declared."""

    name: str
    group: bool = False
    block: int = 0
    literal: int | None = None
    before: str | None = None  # of a block: a dim that is flattened with the group

    def __str__(self) -> str:
        dots = ".." if self.group else ""
        before = f"{self.before}+" if self.before else ""
        return f"{before}{self.name}{dots}{f'/{self.block}' if self.block else ''}"


@dataclasses.dataclass(frozen=True)
class Block:
    """A concrete dim with one entry per ``size`` elements of the flattened ``dims``."""

    dims: tuple[str, ...]
    size: int


@dataclasses.dataclass(frozen=True)
class Array:
    """A named operand or result and its entries."""

    name: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"[{' '.join(map(str, self.entries))}]"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The concrete dims of one call: ``K..`` of two dims is spelled ``K0 K1``.

    Attributes:
        ins: dims of every operand, vmap levels first as ``map0``, ``map1`` ...
        outs: dims of every result, all vmap levels first.
        sizes: global size of every named dim.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sizes: Mapping[str, int]

    def blocks_of(self, dim: str) -> set[Block]:
        """Returns every block dim that ``dim`` is part of."""
        entries = {e for dims in (*self.ins, *self.outs) for e in dims}
        return {e for e in entries if isinstance(e, Block) and dim in e.dims}

    def shape(self, dims: Dims) -> Shape:
        """Returns the global shape of an array with these dims."""
        return tuple(self._size(e) for e in dims)

    def _size(self, entry: "str | int | Block") -> int:
        if isinstance(entry, Block):
            return -(-math.prod(self.sizes[d] for d in entry.dims) // entry.size)
        return entry if isinstance(entry, int) else self.sizes[entry]


def names(dims: Dims) -> tuple[str, ...]:
    """Returns the named dims that ``dims`` covers, those inside blocks included."""
    return tuple(
        n
        for e in dims
        if not isinstance(e, int)
        for n in (e.dims if isinstance(e, Block) else (e,))
    )


class Signature:
    """A parsed signature. It reports misfits by operand and dimension name."""

    def __init__(self, op: str, text: str, groups: Mapping[str, str]):
        sides = text.split("->")
        if len(sides) != 2:
            raise TypeError(f"{op}: signature must be 'operands -> results': {text}")
        self.op, self.groups = op, dict(groups)
        self.ins, self.outs = (
            tuple(self._parse(a) for a in side.split(",")) for side in sides
        )
        self._declared()
        # The same few shapes come back for every abstract evaluation and lowering.
        self.layout = functools.lru_cache(1024)(self._layout)

    def _parse(self, text: str) -> Array:
        name, colon, dims = text.partition(":")
        if not colon:
            raise TypeError(f"{self.op}: {text.strip()!r} is no 'name: dims'")
        entries = []
        for word in dims.split():
            found = _WORD.fullmatch(word)
            if not found or word.startswith("map"):
                raise TypeError(f"{self.op}: {word!r} in {text.strip()!r} is no dim")
            before, dim, dots, block, literal = found.groups()
            entries.append(
                Entry(literal, literal=int(literal))
                if literal
                else Entry(dim, bool(dots), int(block or 0), before=before)
            )
        return Array(name.strip(), tuple(entries))

    def _declared(self) -> None:
        """Every group must follow from the attributes or one operand at a time."""
        known = set(self.groups)
        for a in self.ins:
            unknown = {e.name for e in a.entries if e.group and not e.block} - known
            if len(unknown) > 1:
                raise TypeError(f"{self.op}: {a.name} {a} leaves {unknown} open")
            known |= unknown
        plain = {e.name for a in self.ins for e in a.entries if not e.block}
        for a in (*self.ins, *self.outs):
            for e in a.entries:
                if e.literal is None and not {e.name, e.before or e.name} <= plain:
                    raise TypeError(f"{self.op}: no operand defines {e} of {a.name}")

    def position(self, array: Array, group: str, lengths: Mapping[str, int]) -> int:
        """Returns the index of the first dim of ``group`` in an operand or result."""
        at = 0
        for e in array.entries:
            if e.name == group and not e.block:
                return at
            at += self._count(e, lengths)
        raise KeyError(group)

    def lengths(
        self, shapes: Sequence[Shape], attrs: Mapping[str, Any]
    ) -> dict[str, int]:
        """Returns the number of dims of every group, or raises on a misfit of rank."""
        lengths = {group: attrs[attr] for group, attr in self.groups.items()}
        for group, n in lengths.items():
            if n < 0:
                attr = self.groups[group]
                raise ValueError(
                    message(
                        self.op, attr, "be >= 0", n, f"it counts the dims of {group}.."
                    )
                )
        for array, shape in zip(self.ins, shapes, strict=True):
            plain = [e for e in array.entries if e.group and not e.block]
            unknown = next((e.name for e in plain if e.name not in lengths), None)
            spare = len(shape) - sum(self._count(e, lengths) for e in array.entries)
            if spare < 0 or (spare and unknown is None):
                raise ValueError(self._rank_error(array, shape, lengths, spare))
            if unknown is not None:
                lengths[unknown] = spare
        return lengths

    def check(self, shapes: Sequence[Shape], attrs: Mapping[str, Any]) -> None:
        """Raises ValueError when an operand's shape does not fit the signature."""
        lengths = self.lengths(shapes, attrs)
        first: dict[str, tuple[str, Shape]] = {}
        for blocks in (False, True):  # block dims after the dims that they summarize
            for array, shape in zip(self.ins, shapes, strict=True):
                at = 0
                for e in array.entries:
                    n = self._count(e, lengths)
                    got, at = shape[at : at + n], at + n
                    if bool(e.block) == blocks:
                        self._check_entry(array, e, got, shape, first)

    def _check_entry(
        self, array: Array, e: Entry, got: Shape, shape: Shape, first: dict
    ) -> None:
        if e.literal is not None:
            want, why = (e.literal,), ""
        elif e.block:
            who, whole = first[e.name]
            if e.before:
                whole = (*first[e.before][1], *whole)
            want = (-(-math.prod(whole) // e.block),)
            why = f" (one per {e.block} of {e.name} = {_short(whole)} of {who})"
        else:
            who, want = first.setdefault(e.name, (array.name, got))
            why = f" like {who}"
        if got != want:
            rule = f"have {e} = {_short(want)}{why}"
            seen = f"{_short(got)} in shape {shape}"
            remedy = f"{array.name} has dims {array}"
            raise ValueError(message(self.op, array.name, rule, seen, remedy))

    def _rank_error(
        self, array: Array, shape: Shape, lengths: Mapping[str, int], spare: int
    ) -> str:
        least = (
            "at least "
            if spare < 0
            and any(
                e.group and not e.block and e.name not in lengths for e in array.entries
            )
            else ""
        )
        rule = f"have {least}{len(shape) - spare} dims {array}"
        known = [
            f"{self.groups[e.name]}={lengths[e.name]}"
            for e in array.entries
            if e.name in self.groups and not e.block
        ]
        remedy = f"with {' and '.join(known)}" if known else "reshape it"
        return message(self.op, array.name, rule, f"shape {shape}", remedy)

    @staticmethod
    def _count(e: Entry, lengths: Mapping[str, int]) -> int:
        return lengths.get(e.name, 0) if e.group and not e.block else 1

    def _layout(
        self, shapes: tuple[Shape, ...], maps: Maps, attrs: tuple[tuple[str, Any], ...]
    ) -> Layout:
        depth = [sum(m[i] for m in maps) for i in range(len(shapes))]
        bare = [s[n:] for s, n in zip(shapes, depth, strict=True)]
        lengths = self.lengths(bare, dict(attrs))
        ins = tuple(
            (*(f"map{k}" for k, m in enumerate(maps) if m[i]), *_spell(a, lengths))
            for i, a in enumerate(self.ins)
        )
        levels = tuple(f"map{k}" for k in range(len(maps)))
        outs = tuple((*levels, *_spell(a, lengths)) for a in self.outs)
        sizes = {
            d: n
            for dims, shape in zip(ins, shapes, strict=True)
            for d, n in zip(dims, shape, strict=True)
            if isinstance(d, str)
        }
        return Layout(ins, outs, sizes)


def _spell(array: Array, lengths: Mapping[str, int]) -> Dims:
    """The concrete dims of an operand or result."""
    dims: list[str | int | Block] = []
    for e in array.entries:
        one = [f"{e.name}{i}" for i in range(lengths[e.name])] if e.group else [e.name]
        if e.literal is not None:
            dims.append(e.literal)
        elif e.block:
            before = (e.before,) if e.before else ()
            dims.append(Block((*before, *one), e.block))
        else:
            dims.extend(one)
    return tuple(dims)


def _short(sizes: Shape) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(sizes)
