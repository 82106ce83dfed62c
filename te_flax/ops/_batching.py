"""The vmap rule: a batch axis joins a group of the signature or becomes a level."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_flax.ops._dims import Array

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp


def _plain(array: Array, group: str | None) -> bool:
    return any(e.name == group and e.group and not e.block for e in array.entries)


def joins(op: "KernelOp", batched) -> bool:
    """Whether the batch axis can be one more dim of the op's batch group."""
    operands = [a for on, a in zip(batched, op.dims.ins, strict=True) if on]
    return all(_plain(a, op.batch_group) for a in (*operands, *op.dims.outs))


def batch(op: "KernelOp", args, bdims, *, maps, want, **params):
    """Batches one equation of ``op.primitive``; see jax.interpreters.batching."""
    on = tuple(d is not None for d in bdims)
    bind = op.primitive.bind
    if op.batch and not maps:

        def call(*arrays):
            return bind(*arrays, maps=maps, want=want, **params)

        front = _front(args, bdims, [0] * len(args))
        special = op.batch(call, front, on, dict(params["attrs"]))
        if special:
            return special
    if joins(op, on):
        new, at = _join(op, args, bdims, maps, params["attrs"])
    else:
        new, at = _front(args, bdims, [0] * len(args)), [0] * len(op.dims.outs)
        maps = (on, *maps)
    want = tuple(_insert(w, k) for w, k in zip(want, at, strict=True))
    return bind(*new, maps=maps, want=want, **params), at


def _front(args, bdims, at):
    """The operands with the batch axis, where there is one, at position ``at``."""
    return [
        a if d is None else jnp.moveaxis(a, d, k)
        for a, d, k in zip(args, bdims, at, strict=True)
    ]


def _insert(want: PartitionSpec | None, at: int) -> PartitionSpec | None:
    """The wanted sharding with an uncut dim put in at ``at``."""
    if want is None:
        return None
    dims = [*want, *[None] * (at - len(want))]
    return PartitionSpec(*dims[:at], None, *dims[at:])


def _join(op, args, bdims, maps, attrs):
    """The operands with the batch axis as first dim of the group, and the results'."""
    sig, group = op.dims, op.batch_group
    levels = [sum(m[i] for m in maps) for i in range(len(args))]
    shapes = [
        tuple(n for i, n in enumerate(a.shape) if i != d)[k:]
        for a, d, k in zip(args, bdims, levels, strict=True)
    ]
    lengths = sig.lengths(shapes, dict(attrs))
    places = [
        k + sig.position(a, group, lengths) if _plain(a, group) else 0
        for k, a in zip(levels, sig.ins, strict=True)
    ]
    size = next(a.shape[d] for a, d in zip(args, bdims, strict=True) if d is not None)
    new = [
        jnp.broadcast_to(jnp.expand_dims(a, k), (*a.shape[:k], size, *a.shape[k:]))
        if d is None and _plain(array, group)
        else a
        for a, d, k, array in zip(
            _front(args, bdims, places), bdims, places, sig.ins, strict=True
        )
    ]
    return new, [len(maps) + sig.position(a, group, lengths) for a in sig.outs]
