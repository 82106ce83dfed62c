"""Attention on a mesh: cut along batch and heads, never along tokens.

On an Auto mesh XLA partitions the program, inside ``jax.shard_map`` each device has
its examples and heads. On an Explicit mesh the call goes into a ``jax.shard_map`` of
its own, with the numbers of its examples and heads.
"""

import functools
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


def run(
    attend: Callable, options: Options, operands: Operands, sizes: Sizes, shared: Any
) -> Any:
    """Runs attention on each device's examples and heads.

    Args:
        attend: ``(axes, operands, batch, heads, shared) -> o, log-sum-exp, others``,
            with the mesh axes that are manual for it alone and the numbers of its
            examples and heads; the others are the same on all devices.
        options: the static part.
        operands: the arrays.
        sizes: the dims.
        shared: arrays that every device sees whole.
    """
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
        return attend((), operands, batch, heads, shared)
    batch_axes, head_axes = (tuple(a for a in d if a in explicit) for d in found)
    count = 1
    for axis in head_axes:
        count *= mesh.shape[axis]
    if sizes.kv_heads > 1 and sizes.kv_heads % count:
        rule = f"have a number of heads that {head_axes} of {count} shards divide"
        remedy = "repeat k and v to the heads of q, or shard fewer ways"
        raise refuse("k", rule, sizes.kv_heads, remedy)
    specs = _specs(options, operands, batch_axes, head_axes)
    numbers = P(batch_axes or None), P(head_axes or None)
    specs = (specs, *numbers, jax.tree.map(_whole, shared))
    arrays = (operands, batch, heads, shared)
    placed = jax.tree.map(
        lambda spec, a: jax.sharding.reshard(a, NamedSharding(mesh, spec)),
        specs,
        arrays,
        is_leaf=lambda x: isinstance(x, P),
    )
    out = _in_layout(options.layout, batch_axes, head_axes)
    lse = P(batch_axes or None, head_axes or None, None)
    return jax.shard_map(
        functools.partial(attend, tuple(sorted(explicit))),
        mesh=mesh,
        in_specs=specs,
        out_specs=(out, lse, P()),
        axis_names=explicit,
        check_vma=False,
    )(*placed)


def _axes(options: Options, operands: Operands) -> tuple[Axes, Axes]:
    """The mesh axes that cut the examples and the heads of q; refuses others."""
    found = []
    for name, a in zip("qkv", operands[:3], strict=True):
        cut = dict(zip(options.layout[:3] + "H", _per_dim(a), strict=True))
        for dim, word in (("T", "sequence"), ("H", "head_dim")):
            if cut[dim]:
                rule = f"not be sharded along {word}"
                remedy = "reshard it to batch and heads first: jax.sharding.reshard"
                raise refuse(name, rule, cut[dim], remedy)
        found.append((cut["B"], cut["N"]))
    return found[0]


def _per_dim(a: Array) -> list[Axes]:
    """The mesh axes that cut each dim, as far as the type or a concrete array says."""
    sharding: Any = jax.typeof(a).sharding
    if not isinstance(a, Tracer):
        sharding = a.sharding
    spec = tuple(getattr(sharding, "spec", ()))
    spec += (None,) * (a.ndim - len(spec))
    dims = [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]
    return [tuple(x for x in axes if sharding.mesh.shape[x] > 1) for axes in dims]


def _in_layout(layout: str, batch: Axes, heads: Axes) -> Any:
    by = {"B": batch or None, "N": heads or None, "T": None}
    return P(*(by[d] for d in layout[:3]), None)


def _whole(a: Array) -> P:
    return P(*[None] * jnp.ndim(a))


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
        dropout_key=each(_whole, operands.dropout_key),
        score_mod_args=each(_whole, operands.score_mod_args),
        page_table=each(per_example, operands.page_table),
    )
