"""Auto meshes: custom_partitioning with a Shardy rule derived from the signature."""

import math
import re
from typing import TYPE_CHECKING

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from te_flax.ops._dims import Block, Layout, names
from te_flax.ops._plan import NO_MESH

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp


class ShardyRule:
    """What XLA's propagation is told; :class:`Plan` decides what then happens.

    A dim that ends a blocked group and divides into whole blocks is the product of
    factors ``d_n d_s``, and the block dim is ``d_n`` behind the group's other dims. Of
    two block sizes the smaller one must divide the other: ``d_n d_m d_s``, and the
    block dims are ``d_n`` and ``d_n d_m``. A block dim that cannot be spelled so has a
    factor of its own: nothing propagates through it. A lone ragged dim must be
    replicated.
    """

    def __init__(self, layout: Layout, replicated, axis_sizes):
        self.layout = layout
        self.block_size: dict[str, int] = {}
        self.inner_size: dict[str, int] = {}  # of the smaller blocks, if there are two
        self.keep: set[str] = set()
        self.sizes: dict[str, int] = {}  # of factors that only occur in products
        self._count = 0
        entries = [e for dims in (*layout.ins, *layout.outs) for e in dims]
        blocks = {e for e in entries if isinstance(e, Block)}
        for d in {b.dims[-1] for b in blocks if b.dims}:
            *inner, size = sorted({b.size for b in blocks if d in b.dims})
            count, ragged = divmod(layout.sizes[d], size)
            nested = not inner or (len(inner) == 1 and size % inner[0] == 0)
            whole = nested and not ragged and count > 1
            if whole and not _splits(count, axis_sizes):
                self.block_size[d] = size
                self.keep.add(f"{d}_s")
                if inner:
                    self.inner_size[d] = inner[0]
                    self.keep.add(f"{d}_m")
            elif not whole and any(b.dims == (d,) for b in blocks):
                self.keep.add(d)
        self.keep |= {self.factor(d) for d in replicated}
        self.text = " -> ".join(
            ", ".join(" ".join(map(self._spell, array)) for array in side)
            for side in (layout.ins, layout.outs)
        )

    def factor(self, dim: str) -> str:
        """The factor along which a dim may be sharded."""
        return f"{dim}_n" if dim in self.block_size else dim

    def _outer(self, dim: str) -> list[str]:
        """The factors of a blocked dim down to its smallest blocks."""
        return [f"{dim}_n", *([f"{dim}_m"] if dim in self.inner_size else [])]

    def _spell(self, entry: str | int | Block) -> str:
        if isinstance(entry, str):
            if entry not in self.block_size:
                return entry
            return f"({' '.join(self._outer(entry))} {entry}_s)"
        self._count += 1
        own = f"own{self._count}"
        if isinstance(entry, Block) and entry.dims:
            *before, last = entry.dims
            words = [d for d in before if self.layout.sizes[d] > 1]
            blocks, ragged = divmod(self.layout.sizes[last], entry.size)
            if last in self.block_size:
                largest = entry.size == self.block_size[last]
                words += [f"{last}_n"] if largest else self._outer(last)
            elif words and not ragged and blocks > 1:
                words.append(own)
                self.sizes[own] = blocks
            if words and not ragged:  # a product must have no factors of size 1
                return f"({' '.join(words)})" if len(words) > 1 else words[0]
        if isinstance(entry, int) or self.keep.intersection(entry.dims):
            self.keep.add(own)
        return own

    def options(self) -> dict:
        """Keyword arguments of ``def_partition``."""
        kept = {d for dims in self.layout.outs for d in names(dims)}
        lost = {d for dims in self.layout.ins for d in names(dims)} - kept
        alone = set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", self.text)))
        order = re.findall(r"\w+", self.text)  # jax wants factors as they appear
        summed = {self.factor(d) for d in lost} - self.keep
        sizes = self.sizes | {
            f"{d}_s": self.inner_size.get(d, n) for d, n in self.block_size.items()
        }
        sizes |= {f"{d}_m": self.block_size[d] // n for d, n in self.inner_size.items()}
        for d, n in self.block_size.items():
            if f"{d}_n" not in alone:  # jax asks for factors seen only in products
                sizes[f"{d}_n"] = self.layout.sizes[d] // n
        return {
            "sharding_rule": self.text,
            "need_replication_factors": tuple(sorted(self.keep, key=order.index)),
            "reduction_factors": tuple(sorted(summed, key=order.index)),
            **sizes,
        }


def _spec(sharding) -> PartitionSpec:
    """The spec of a sharding; arrays that were never placed on the mesh have none.

    Their program runs on one device, or on copies of the whole.
    """
    return getattr(sharding, "spec", PartitionSpec())


def _splits(count: int, axis_sizes) -> bool:
    """Whether Shardy would cut an axis to fit a factor, which no spec can express."""
    return any(1 < math.gcd(count, n) < n for n in axis_sizes)


def partitioned(op: "KernelOp", shapes, maps, attrs, shard, dtypes, axis_sizes, full):
    """Wraps the per-shard function so that XLA's partitioner asks the Plan.

    Args:
        op: the op.
        shapes: global shapes of the operands.
        maps: vmap levels.
        attrs: static attributes, as sorted pairs.
        shard: ``(plan or None, *arrays) -> results`` of one shard.
        dtypes: of the results.
        axis_sizes: of the Auto mesh axes.
        full: the whole mesh inside a partly manual shard_map, else None.

    Returns:
        A function of the operands.
    """
    layout = op.dims.layout(shapes, maps, attrs)
    rule = ShardyRule(layout, op.concrete(op.replicated, layout), axis_sizes)

    def partition(mesh, args, results):
        specs = [_spec(a.sharding) for a in args]
        wanted = [_spec(r.sharding) for r in results]
        plan = op.plan(shapes, maps, attrs, specs, wanted, mesh.shape)

        def body(*arrays):
            # XLA calls this inside the user's set_mesh: psum would emit sharding ops
            # that nothing can compile on an Explicit mesh (jax 0.11 and later).
            with jax.sharding.use_abstract_mesh(NO_MESH):
                return tuple(plan.finish(shard(plan, *arrays), dtypes))

        def named(specs):
            return tuple(NamedSharding(mesh, s) for s in specs)

        # Collectives number all devices (full), shardings name only the Auto axes.
        return full or mesh, body, named(plan.out_specs()), named(plan.in_specs())

    fn = custom_partitioning(lambda *arrays: tuple(shard(None, *arrays)))
    fn.def_partition(partition, **rule.options())
    return fn
