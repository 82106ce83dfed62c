"""Auto meshes: custom_partitioning with a Shardy rule derived from the signature."""

from typing import TYPE_CHECKING

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from te_flax.ops._dims import Block, Layout, names
from te_flax.ops._plan import NO_MESH

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp


class ShardyRule:
    """What XLA's propagation is told; :class:`Plan` decides what then happens.

    A dim with block scales that divides into whole blocks is the product of factors
    ``d_n d_s``, and its block dim is ``d_n``. A ragged one must be replicated. A block
    dim over several dims has a factor of its own: nothing propagates through it.
    """

    def __init__(self, layout: Layout, replicated):
        self.layout = layout
        self.block_size: dict[str, int] = {}
        self.keep: set[str] = set()
        self._count = 0
        dims = (*layout.ins, *layout.outs)
        single: dict[str, set[int]] = {}
        for e in (e for array in dims for e in array if isinstance(e, Block)):
            if len(e.dims) == 1:
                single.setdefault(e.dims[0], set()).add(e.size)
        for d, sizes in single.items():
            if len(sizes) == 1 and layout.sizes[d] % min(sizes) == 0:
                self.block_size[d] = min(sizes)
                self.keep.add(f"{d}_s")
            else:
                self.keep.add(d)
        self.keep |= {self.factor(d) for d in replicated}
        self.text = " -> ".join(
            ", ".join(" ".join(map(self._spell, array)) for array in side)
            for side in (layout.ins, layout.outs)
        )

    def factor(self, dim: str) -> str:
        """The factor along which a dim may be sharded."""
        return f"{dim}_n" if dim in self.block_size else dim

    def _spell(self, entry: str | int | Block) -> str:
        if isinstance(entry, str):
            whole = entry in self.block_size
            return f"({entry}_n {entry}_s)" if whole else entry
        single = isinstance(entry, Block) and len(entry.dims) == 1
        if single and self.block_size.get(entry.dims[0]) == entry.size:
            return f"{entry.dims[0]}_n"
        self._count += 1
        own = f"own{self._count}"
        if isinstance(entry, int) or single:
            self.keep.add(own)
        return own

    def options(self) -> dict:
        """Keyword arguments of ``def_partition``."""
        kept = {d for dims in self.layout.outs for d in names(dims)}
        lost = {d for dims in self.layout.ins for d in names(dims)} - kept
        return {
            "sharding_rule": self.text,
            "need_replication_factors": tuple(sorted(self.keep)),
            "reduction_factors": tuple(
                sorted({self.factor(d) for d in lost} - self.keep)
            ),
            **{f"{d}_s": n for d, n in self.block_size.items()},
        }


def partitioned(op: "KernelOp", shapes, maps, attrs, shard, dtypes, full):
    """Wraps the per-shard function so that XLA's partitioner asks the Plan.

    Args:
        op: the op.
        shapes: global shapes of the operands.
        maps: vmap levels.
        attrs: static attributes, as sorted pairs.
        shard: ``(plan or None, *arrays) -> results`` of one shard.
        dtypes: of the results.
        full: the whole mesh inside a partly manual shard_map, else None.

    Returns:
        A function of the operands.
    """
    layout = op.dims.layout(shapes, maps, attrs)
    rule = ShardyRule(layout, op.concrete(op.replicated, layout))

    def partition(mesh, args, results):
        specs = [a.sharding.spec for a in args]
        wanted = [r.sharding.spec for r in results]
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
