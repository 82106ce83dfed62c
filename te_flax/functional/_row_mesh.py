"""The mesh axis that row shards lie on: manual already, or made so for one call."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.errors import message
from te_flax.ops._plan import axes_of, per_dim, to_spec
from te_flax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outside:
    """A call outside ``jax.shard_map``, with the shard_map that it needs.

    Attributes:
        mesh: the mesh.
        manual: the axes made manual: the Explicit ones, and the one gathered over.
        rows: how x is cut, over the manual axes.
        gathered: how the results are.
    """

    mesh: Any
    manual: frozenset[str]
    rows: P
    gathered: P

    @property
    def cuts(self) -> int:
        """In how many parts the rows of x are cut."""
        return math.prod(self.mesh.shape[a] for a in per_dim(self.rows)[0])

    def run(self, fn: Callable, arrays: tuple, in_specs: tuple, out_specs: Any) -> Any:
        """Runs fn on each device's part of the arrays."""
        explicit = axes_of(self.mesh, AxisType.Explicit)
        if explicit:
            arrays = tuple(
                jax.sharding.reshard(a, NamedSharding(self.mesh, _only(s, explicit)))
                for a, s in zip(arrays, in_specs, strict=True)
            )
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.manual,
            check_vma=False,
        )(*arrays)


def find(where: str, x: Array, axis: str) -> tuple[Any, bool]:
    """Returns the mesh with the axis, of the context or of x, and if that is manual.

    Args:
        where: the function, for errors.
        x: the array.
        axis: name of the mesh axis.

    Raises:
        ValueError: no mesh here has the axis.
        TypeError: the name is none.
    """
    if not isinstance(axis, str):
        rule, remedy = "be the name of one mesh axis", "gather over one axis at a time"
        raise TypeError(message(where, "axis", rule, repr(axis), remedy))
    meshes = [jax.sharding.get_abstract_mesh()]
    if not isinstance(x, Tracer):
        meshes.append(getattr(x.sharding, "mesh", meshes[0]))
    meshes.append(jax.typeof(x).sharding.mesh)
    remedy = "enter jax.set_mesh(mesh), or call it inside jax.shard_map over that axis"
    for mesh in meshes:
        if axis in mesh.axis_names:
            break
    else:
        known = sorted({a for mesh in meshes for a in mesh.axis_names})
        rule = f"name an axis of the mesh{f' ({known})' if known else ''}"
        raise ValueError(message(where, "axis", rule, repr(axis), remedy))
    # Kernels that XLA cuts over the other axes must know the devices.
    others = set(axes_of(mesh, AxisType.Auto)) - {axis}
    if others and mesh is not meshes[0] and isinstance(mesh, AbstractMesh):
        rule = f"be of a mesh in context, which has the Auto axes {sorted(others)} too"
        raise ValueError(message(where, "axis", rule, repr(axis), remedy))
    return mesh, axis in axes_of(mesh, AxisType.Manual)


def outside(where: str, x: Array, mesh: Any, axis: str, whole: bool) -> Outside:
    """Plans a call outside ``jax.shard_map``.

    Args:
        where: the function, for errors.
        x: the array, its rows cut over the axis.
        mesh: the mesh.
        axis: the axis to gather over.
        whole: whether all of it shares its rows, not groups.

    Raises:
        ValueError: the type of x says that the axis does not cut its rows.
    """
    explicit = axes_of(mesh, AxisType.Explicit)
    cut = per_dim(jax.typeof(x).sharding.spec if explicit else None, x.ndim)
    if axis in explicit and (not cut[0] or cut[0][-1] != axis):
        rule = f"be cut over {axis!r} on axis 0, the last of the axes there"
        remedy = "place it with jax.sharding.reshard"
        raise ValueError(message(where, "x", rule, str(to_spec(cut)), remedy))
    others = tuple(a for a in cut[0] if a != axis)
    inner = [*cut[1:-1], ()]
    rows = (*others, axis)
    return Outside(
        mesh=mesh,
        manual=frozenset({axis, *explicit}),
        rows=to_spec([rows, *inner]),
        gathered=to_spec([others if whole else rows, *inner]),
    )


def _only(spec: P, axes: tuple[str, ...]) -> P:
    """The part of a spec over some axes."""
    return to_spec(tuple(a for a in dim if a in axes) for dim in per_dim(spec))
