"""Attention on a mesh: cut along batch and heads, never along tokens.

On an Auto mesh XLA partitions the program, inside ``jax.shard_map`` each device has
its examples and heads. On an Explicit mesh the call goes into a ``jax.shard_map`` of
its own, with the numbers of its examples and heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.functional.attention.checks import refuse
from te_flax.functional.attention.options import Operands, Options, Sizes
from te_flax.typing import Array

Axes = tuple[str, ...]


def run(attend: Callable, options: Options, operands: Operands, sizes: Sizes) -> Any:
    """Runs ``attend(operands, batch, heads)`` on each device's examples and heads."""
    batch = jnp.arange(sizes.batch, dtype=jnp.int32)
    heads = jnp.arange(sizes.heads, dtype=jnp.int32)
    mesh = jax.typeof(operands.q).sharding.mesh
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    found = _axes(options, operands)
    if not explicit:
        return attend(operands, batch, heads)
    batch_axes, head_axes = (tuple(a for a in d if a in explicit) for d in found)
    count = 1
    for axis in head_axes:
        count *= mesh.shape[axis]
    if sizes.kv_heads > 1 and sizes.kv_heads % count:
        rule = f"have a number of heads that {head_axes} of {count} shards divide"
        remedy = "repeat k and v to the heads of q, or shard fewer ways"
        raise refuse("k", rule, sizes.kv_heads, remedy)
    specs = _specs(options, operands, batch_axes, head_axes)
    specs = (specs, P(batch_axes or None), P(head_axes or None))
    arrays = (operands, batch, heads)
    placed = jax.tree.map(
        lambda spec, a: jax.sharding.reshard(a, NamedSharding(mesh, spec)),
        specs,
        arrays,
        is_leaf=lambda x: isinstance(x, P),
    )
    out = _in_layout(options.layout, batch_axes, head_axes)
    lse = P(batch_axes or None, head_axes or None, None)
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=specs,
        out_specs=(out, lse),
        axis_names=explicit,
        check_vma=False,
    )(*placed)


def _axes(options: Options, operands: Operands) -> tuple[Axes, Axes]:
    """The mesh axes that cut the examples and the heads of q; refuses others."""
    found = []
    for name, a in zip("qkv", operands[:3], strict=True):
        cut = dict(zip(options.layout[:3] + "H", _per_dim(a), strict=True))
        if cut["T"] or cut["H"]:
            dim = "sequence" if cut["T"] else "head_dim"
            rule = f"not be sharded along {dim}"
            remedy = "reshard it to batch and heads first: jax.sharding.reshard"
            raise refuse(name, rule, cut["T"] or cut["H"], remedy)
        found.append((cut["B"], cut["N"]))
    return found[0]


def _per_dim(a: Array) -> list[Axes]:
    """The mesh axes of every dim, as far as the type or a concrete array says."""
    sharding = jax.typeof(a).sharding
    if not isinstance(a, Tracer):
        sharding = a.sharding
    spec = tuple(getattr(sharding, "spec", ()))
    spec += (None,) * (a.ndim - len(spec))
    return [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]


def _in_layout(layout: str, batch: Axes, heads: Axes) -> Any:
    by = {"B": batch or None, "N": heads or None, "T": None}
    return P(*(by[d] for d in layout[:3]), None)


def _specs(options: Options, operands: Operands, batch: Axes, heads: Axes) -> Operands:
    """How every array is cut."""
    b, n = batch or None, heads or None
    q = _in_layout(options.layout, batch, heads)
    at = options.layout.index
    shared = operands.k.shape[at("N")] == 1
    kv = _in_layout(
        options.layout,
        () if operands.page_table is not None else batch,
        () if shared else heads,
    )

    def matrix(a: Array) -> P:
        by = (b, n, None, None)[4 - a.ndim :]
        pairs = zip(by, a.shape, strict=True)
        return P(*(s if size > 1 else None for s, size in pairs))

    def per_example(a: Array) -> P:
        return P(b, *[None] * (a.ndim - 1))

    def whole(a: Array) -> P:
        return P(*[None] * jnp.ndim(a))

    each = jax.tree.map
    return Operands(
        q=q,
        k=kv,
        v=kv,
        bias=each(matrix, operands.bias),
        mask=each(matrix, operands.mask),
        alibi_slopes=each(lambda _: P(n), operands.alibi_slopes),
        segment_ids=each(per_example, operands.segment_ids),
        positions=each(per_example, operands.positions),
        q_seqlen=each(per_example, operands.q_seqlen),
        kv_seqlen=each(per_example, operands.kv_seqlen),
        offsets=each(per_example, operands.offsets),
        sink=each(lambda _: P(n), operands.sink),
        dropout_key=each(whole, operands.dropout_key),
        score_mod_args=each(whole, operands.score_mod_args),
        page_table=each(per_example, operands.page_table),
    )
