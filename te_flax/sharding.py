"""Logical axes: names that users give to dims, and the mesh axes they stand for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax.core.spmd import get_logical_axis_rules
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from te_flax.errors import message
from te_flax.typing import Array, Axes

MeshAxes = str | tuple[str, ...] | None


def logical_axis_rules(
    *,
    dp: MeshAxes = None,
    fsdp: MeshAxes = None,
    tp: MeshAxes = None,
    sp: MeshAxes = None,
) -> tuple[tuple[str, MeshAxes], ...]:
    """Returns rules for the names that the documentation uses for its axes.

    ``batch -> dp + fsdp``, ``seqlen -> sp``, ``embed -> fsdp`` (kernels),
    ``mlp, heads, kv_heads, vocab -> tp``; every other name is not sharded.

    Args:
        dp: mesh axis or axes of data parallelism.
        fsdp: mesh axis or axes over which kernels and the batch are sharded.
        tp: mesh axis or axes of tensor parallelism.
        sp: mesh axis or axes over which the sequence is sharded between the GEMMs.

    Returns:
        Pairs of logical and mesh axis for ``flax.nnx.logical_axis_rules``.

    Raises:
        ValueError: one mesh axis serves two of the arguments dp, fsdp and tp.
        TypeError: an argument is no name or tuple of names.

    Example:
        >>> dict(logical_axis_rules(dp="data", tp="model"))["mlp"]
        'model'
    """
    for name, axes in (("dp", dp), ("fsdp", fsdp), ("tp", tp), ("sp", sp)):
        named = (axes,) if isinstance(axes, str) or axes is None else axes
        ok = isinstance(named, Sequence)
        if not ok or any(not isinstance(a, str | None) for a in named):
            rule, remedy = "be a mesh axis or a tuple of them", "use None for none"
            raise TypeError(message("logical_axis_rules", name, rule, axes, remedy))
    given = [a for axes in (dp, fsdp, tp) for a in _tuple(axes)]
    if len(set(given)) != len(given):
        raise ValueError(
            message(
                "logical_axis_rules",
                "dp, fsdp and tp",
                "name different mesh axes",
                given,
                "give each kind of parallelism its own axis",
            )
        )
    batch = (*_tuple(dp), *_tuple(fsdp))
    return (
        ("batch", batch or None),
        ("seqlen", sp),
        ("embed", fsdp),
        ("mlp", tp),
        ("heads", tp),
        ("kv_heads", tp),
        ("vocab", tp),
        ("layers", None),
    )


def param_metadata(axes: Axes | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a parameter whose dims carry logical names.

    A layer that names its axes must also work with no mesh, so the variable is
    sharded where it is made only if a mesh is set and can serve every name.

    Args:
        axes: a logical axis, or None, for each dim; None leaves ``metadata`` alone.
        metadata: the user's own metadata; its ``out_sharding`` wins.

    Returns:
        Keyword arguments for the variable.
    """
    if axes is None or "out_sharding" in metadata:
        return dict(metadata)
    mesh = jax.sharding.get_abstract_mesh()
    known = {a for axis in axes for a in _tuple(_mesh_axes(axis))}
    eager = not mesh.empty and known <= set(mesh.axis_names)
    eager = eager and not any(t == AxisType.Manual for t in mesh.axis_types)
    return {"out_sharding": tuple(axes), "eager_sharding": eager, **metadata}


class Placement(NamedTuple):
    """What logical axes ask for in one context, as a static argument.

    Attributes:
        explicit: the part over Explicit mesh axes; None asks for nothing.
        auto: the part over Auto mesh axes.
    """

    explicit: PartitionSpec | None = None
    auto: PartitionSpec | None = None

    def __call__(self, x: Array) -> Array:
        """Asks for it."""
        if self.explicit is not None:
            x = jax.sharding.reshard(x, self.explicit)
        if self.auto is not None:
            x = lax.with_sharding_constraint(x, self.auto)
        return x

    @property
    def spec(self) -> PartitionSpec | None:
        """Both parts together, as an out_sharding; None asks for nothing."""
        parts = [tuple(p) for p in (self.explicit, self.auto) if p is not None]
        if len(parts) < 2:
            return PartitionSpec(*parts[0]) if parts else None
        pairs = zip(*parts, strict=True)
        return PartitionSpec(*[(*_tuple(a), *_tuple(b)) or None for a, b in pairs])

    def permuted(self, order: Sequence[int]) -> "Placement":
        """That of the array with its dims in another order."""
        parts = [
            p if p is None else PartitionSpec(*(p[i] for i in order)) for p in self
        ]
        return Placement(*parts)


def placement(axes: Sequence[str | None] | None, ndim: int) -> Placement:
    """Reads what the logical ``axes`` of an array stand for in this context.

    Args:
        axes: a logical axis, or None, for each dim; None asks for nothing.
        ndim: number of dims of the array.

    Returns:
        Its placement, empty where no mesh is set. Manual axes, and names without a
        mesh axis, are left out; where nothing is left, names that all have a rule ask
        for an array that is not sharded, others for nothing.

    Raises:
        ValueError: ``axes`` has another length than the array has dims.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axes is None or mesh.empty:
        return Placement()
    if len(axes) != ndim:
        raise ValueError(
            message(
                "constrain",
                "axes",
                f"name each of the {ndim} dims of x",
                tuple(axes),
                "use None for dims that are not sharded",
            )
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    rules, named = dict(get_logical_axis_rules() or ()), set(axes) - {None}
    whole = bool(named) and named <= rules.keys() | kinds.keys()

    def part(kind: AxisType) -> PartitionSpec | None:
        names = [
            tuple(a for a in _tuple(_mesh_axes(axis)) if kinds.get(a) == kind) or None
            for axis in axes
        ]
        known = whole and kind in kinds.values()
        return PartitionSpec(*names) if known or any(names) else None

    return Placement(part(AxisType.Explicit), part(AxisType.Auto))


def constrain(x: Array, axes: Sequence[str | None] | None) -> Array:
    """Asks for the sharding that the logical ``axes`` of ``x`` stand for.

    Args:
        x: array with as many dims as ``axes``.
        axes: a logical axis, or None, for each dim; None asks for nothing.

    Returns:
        ``x``; the same array where no mesh is set.

    Raises:
        ValueError: ``axes`` has another length than ``x`` has dims.
    """
    return placement(axes, x.ndim)(x)


def _mesh_axes(axis: str | None) -> MeshAxes:
    """The mesh axes of a logical axis; a name without a rule is a mesh axis itself."""
    if axis is None:
        return None
    return dict(get_logical_axis_rules() or ()).get(axis, axis)


def _tuple(axes: MeshAxes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
