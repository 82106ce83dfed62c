"""The Plan: which mesh axes cut which named dim. The only place that decides it."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from te_flax.ops._dims import Block, Dims, Layout, names

NO_MESH = AbstractMesh((), ())
MeshAxes = tuple[str, ...]


def mesh_of(avals: Iterable[Any]) -> AbstractMesh:
    """Returns the mesh that the types of the arrays carry; plain arrays carry none."""
    return next((a.sharding.mesh for a in avals if not a.sharding.mesh.empty), NO_MESH)


def axes_of(mesh: AbstractMesh, kind: AxisType) -> MeshAxes:
    """Returns the mesh axes of one kind."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, k in kinds if k == kind)


def per_dim(spec: PartitionSpec | None, ndim: int = 0) -> list[MeshAxes]:
    """Spells a PartitionSpec as one tuple of mesh axes per dim."""
    axes = [
        s
        if isinstance(s, tuple)
        else ()
        if s is None or s is PartitionSpec.UNCONSTRAINED
        else (s,)
        for s in spec or ()
    ]
    return axes + [()] * (ndim - len(axes))


def to_spec(axes: Iterable[MeshAxes]) -> PartitionSpec:
    """Spells one tuple of mesh axes per dim as a PartitionSpec."""
    return PartitionSpec(*[a if len(a) > 1 else a[0] if a else None for a in axes])


@dataclasses.dataclass
class Plan:
    """Mesh axes of each named dim; Auto and Explicit meshes both ask here.

    Operands are served first, in order, then the results asked for. An axis serves one
    dim. A dim that cannot be cut into equal shards of whole blocks loses axes: it is
    gathered, never a block split.

    Attributes:
        layout: the concrete dims of the call.
        attrs: the op's static attributes.
        reduce: per result None, "sum" or "max".
        mesh_shape: size of every mesh axis.
        given: per operand, the mesh axes on its dims.
        want: per result, the mesh axes that its consumer would like on its dims.
        axes: the decision, after :meth:`assign`.
    """

    layout: Layout
    attrs: Mapping[str, Any]
    reduce: Sequence[str | None]
    mesh_shape: Mapping[str, int]
    given: list[dict[str, MeshAxes]]
    want: list[dict[str, MeshAxes]]
    axes: dict[str, MeshAxes] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(
        cls, layout, attrs, reduce, mesh_shape, specs, want, ones: bool = False
    ) -> "Plan":
        """Reads the specs of operands and wanted results.

        Args:
            layout: the concrete dims of the call.
            attrs: the op's static attributes.
            reduce: per result None, "sum" or "max".
            mesh_shape: size of every mesh axis.
            specs: PartitionSpec of every operand.
            want: PartitionSpec or None of every result.
            ones: whether mesh axes of size 1 count. They do in types, where dropping
                one would be a mismatch to the user's next operation; in lowering they
                cut nothing, and XLA fails on some of them.

        Returns:
            A plan without a decision.
        """

        def read(dims: Dims, spec) -> dict[str, MeshAxes]:
            found = {}
            for d, axes in zip(dims, per_dim(spec, len(dims)), strict=False):
                if isinstance(d, Block) and len(d.dims) == 1:
                    d = d.dims[0]
                if isinstance(d, str):
                    found[d] = tuple(a for a in axes if ones or mesh_shape[a] > 1)
            return found

        given = [read(d, s) for d, s in zip(layout.ins, specs, strict=True)]
        wanted = [read(d, s) for d, s in zip(layout.outs, want, strict=True)]
        return cls(layout, attrs, reduce, mesh_shape, given, wanted)

    def assign(self, replicated: Iterable[str], pinned: Mapping[str, MeshAxes]):
        """Decides: replicated dims, pinned dims, then first come first served."""
        self.axes = dict.fromkeys(replicated, ())
        for d, axes in pinned.items():
            self.axes[d] = self.fit(d, axes)
        for d, axes in [i for a in (*self.given, *self.want) for i in a.items()]:
            taken = {x for v in self.axes.values() for x in v}
            if axes and d not in self.axes and not set(axes) & taken:
                self.axes[d] = self.fit(d, axes)
        return self

    def of(self, dim: str) -> MeshAxes:
        """Returns the mesh axes of a dim."""
        return self.axes.get(dim, ())

    def fit(self, dim: str, axes: MeshAxes) -> MeshAxes:
        """Returns the longest prefix of axes that leaves equal shards, whole blocks."""
        while axes and not self._fits(dim, axes):
            axes = axes[:-1]
        return axes

    def _fits(self, dim: str, axes: MeshAxes) -> bool:
        if self.layout.sizes[dim] % self.count(axes):
            return False
        trial = dataclasses.replace(self, axes={**self.axes, dim: axes})
        return all(trial.view(b) is not None for b in self.layout.blocks_of(dim))

    def count(self, axes: MeshAxes) -> int:
        """Returns the number of shards that the axes make."""
        return math.prod(self.mesh_shape[a] for a in axes)

    def local(self, dim: str) -> int:
        """Returns the size of a dim in one shard."""
        return self.layout.sizes[dim] // self.count(self.of(dim))

    def view(self, block: Block) -> "tuple[list[int], int] | None":
        """Reads a shard's block dim as dims of its own, so that it can be joined.

        Blocks run along the flattened group, of which a shard may hold pieces (a
        sequence dim cut behind a batch dim). The last dim that is cut starts a tail;
        where blocks do not straddle tails, the block dim is [dims before it.., blocks
        of a tail].

        Returns:
            The shard's sizes of those dims and how many of the leading ones a
            PartitionSpec on the block dim can express, or None if blocks straddle.
        """
        sizes = [self.local(d) for d in block.dims]
        cut = [i for i, d in enumerate(block.dims) if self.of(d)]
        last = cut[-1] if cut else 0
        tail = math.prod(sizes[last:])
        if cut and tail % block.size:
            return None
        lead = next((i for i, n in enumerate(sizes) if n != 1), len(sizes) - 1)
        return [*sizes[:last], -(-tail // block.size)], min(lead, last) + 1

    def lead(self, entry: "str | int | Block") -> MeshAxes:
        """Returns the mesh axes that a PartitionSpec puts on one dim of an array."""
        if isinstance(entry, Block):
            view = self.view(entry)
            lead = view[1] if view else 0
            return tuple(a for d in entry.dims[:lead] for a in self.of(d))
        return self.of(entry) if isinstance(entry, str) else ()

    def summed(self, j: int) -> MeshAxes:
        """Returns the mesh axes over which result j must be reduced."""
        present = names(self.layout.outs[j])
        dims = dict.fromkeys(d for dims in self.layout.ins for d in names(dims))
        return tuple(a for d in dims if d not in present for a in self.of(d))

    def scattered(self, j: int) -> dict[str, MeshAxes]:
        """Returns summed axes that the consumer wants on a dim of result j.

        A psum_scatter moves 1/n of the bytes of a psum.
        """
        if self.reduce[j] != "sum":
            return {}
        summed = self.summed(j)
        new = {
            d: tuple(x for x in axes if x in summed)
            for d, axes in self.want[j].items()
            if d in self.layout.outs[j]
        }
        return {
            d: a
            for d, a in new.items()
            if a and self.fit(d, self.of(d) + a) == self.of(d) + a
        }

    def in_specs(self) -> tuple[PartitionSpec, ...]:
        """Returns the PartitionSpec of every operand."""
        return tuple(to_spec(map(self.lead, dims)) for dims in self.layout.ins)

    def out_specs(self) -> tuple[PartitionSpec, ...]:
        """Returns the PartitionSpec of every result."""
        return tuple(
            to_spec(
                self.lead(e) + (new.get(e, ()) if isinstance(e, str) else ())
                for e in dims
            )
            for j, dims in enumerate(self.layout.outs)
            for new in [self.scattered(j)]
        )

    def enter(self, arrays: Sequence[Any]) -> Iterator[Any]:
        """Cuts, per shard, the pieces of block dims that no PartitionSpec expresses."""
        for x, dims in zip(arrays, self.layout.ins, strict=True):
            for at, (sizes, rest) in self._pieces(dims):
                whole = [n * self.count(rest.get(i, ())) for i, n in enumerate(sizes)]
                x = x.reshape(*x.shape[:at], *whole, *x.shape[at + 1 :])
                for i, axes in rest.items():
                    start = lax.axis_index(axes) * sizes[i]
                    x = lax.dynamic_slice_in_dim(x, start, sizes[i], at + i)
                after = at + len(sizes)
                x = x.reshape(*x.shape[:at], math.prod(sizes), *x.shape[after:])
            yield x

    def finish(self, results: Sequence[Any], dtypes: Sequence[Any]) -> Iterator[Any]:
        """Reduces, scatters and joins, per shard, what the kernel returned."""
        for j, (r, dtype) in enumerate(zip(results, dtypes, strict=True)):
            done = self.scattered(j)
            for d, axes in done.items():
                at = self.layout.outs[j].index(d)
                r = lax.psum_scatter(r, axes, scatter_dimension=at, tiled=True)
            gone = {a for axes in done.values() for a in axes}
            rest = tuple(a for a in self.summed(j) if a not in gone)
            if rest:
                r = {"sum": lax.psum, "max": lax.pmax}[str(self.reduce[j])](r, rest)
            for at, (sizes, axes_at) in self._pieces(self.layout.outs[j]):
                after = r.shape[at + 1 :]
                r = r.reshape(*r.shape[:at], *sizes, *after)
                for i, axes in axes_at.items():
                    r = lax.all_gather(r, axes, axis=at + i, tiled=True)
                r = r.reshape(*r.shape[:at], -1, *after)
            yield r if r.dtype == dtype else r.astype(dtype)

    def _pieces(self, dims: Dims):
        """Block dims cut behind their leading pieces: position, sizes, axes."""
        for at, entry in enumerate(dims):
            view = self.view(entry) if isinstance(entry, Block) else None
            if isinstance(entry, Block) and view:
                sizes, lead = view
                rest = {
                    i: self.of(d)
                    for i, d in enumerate(entry.dims)
                    if i >= lead and self.of(d)
                }
                if rest:
                    yield at, (sizes, rest)


def bare_types(avals: Sequence[Any], maps) -> list[jax.ShapeDtypeStruct]:
    """Returns the operands' types without the vmap levels in front."""
    return [
        jax.ShapeDtypeStruct(a.shape[sum(m[i] for m in maps) :], jnp.dtype(a.dtype))
        for i, a in enumerate(avals)
    ]
