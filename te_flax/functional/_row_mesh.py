"""The mesh axis that row shards lie on: manual already, or made so for one call."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.errors import message
from te_flax.ops._plan import MeshAxes, axes_of, per_dim, to_spec
from te_flax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outside:
    """A mesh axis that is not manual.

    Attributes:
        mesh: its mesh.
        axis: its name.
        cut: the Explicit axes on each dim of x, with this one on the rows.
        in_context: whether the mesh is the context's.
    """

    mesh: Any
    axis: str
    cut: tuple[MeshAxes, ...]
    in_context: bool

    @property
    def explicit(self) -> MeshAxes:
        """The Explicit axes of the mesh."""
        return axes_of(self.mesh, AxisType.Explicit)

    @property
    def cuts(self) -> int:
        """In how many parts the rows are cut."""
        return math.prod(self.mesh.shape[a] for a in self.cut[0])

    def gather(self, a: Array) -> Array:
        """Asks for all rows along the axis on each of its devices."""
        return self._with_rows(a, tuple(n for n in self.cut[0] if n != self.axis))

    def scatter(self, a: Array) -> Array:
        """Asks for rows cut as those of x are."""
        return self._with_rows(a, self.cut[0])

    def _with_rows(self, a: Array, axes: MeshAxes) -> Array:
        if self.axis in self.explicit:
            others = per_dim(jax.typeof(a).sharding.spec, a.ndim)[1:]
            return self._reshard(a, to_spec([axes, *others]))
        # What Auto axes do with the other dims is XLA's to know.
        auto = self.axis if self.axis in axes else None
        spec: Any = P(auto, *[P.UNCONSTRAINED] * (a.ndim - 1))
        spec = spec if self.in_context else NamedSharding(self.mesh, spec)
        return lax.with_sharding_constraint(a, spec)

    def on_devices(
        self, fn: Callable, arrays: tuple, in_specs: tuple, out_specs: Any
    ) -> Any:
        """Runs fn on each device's part of the arrays, the axis manual."""
        if self.explicit:
            arrays = tuple(
                self._reshard(a, self._explicit_part(s))
                for a, s in zip(arrays, in_specs, strict=True)
            )
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis, *self.explicit},
            check_vma=False,
        )(*arrays)

    def _reshard(self, a: Array, spec: P) -> Array:
        return jax.sharding.reshard(a, NamedSharding(self.mesh, spec))

    def _explicit_part(self, spec: P) -> P:
        explicit = self.explicit
        dims = per_dim(spec)
        return to_spec(tuple(a for a in dim if a in explicit) for dim in dims)


def find(where: str, x: Array, axis: str) -> tuple[Any, bool]:
    """Returns the mesh with the axis, and whether it is the context's.

    Args:
        where: the function, for errors.
        x: the array, whose mesh counts where the context has none.
        axis: name of the mesh axis.

    Raises:
        ValueError: no mesh here has the axis.
        TypeError: the name is none.
    """
    if not isinstance(axis, str):
        rule, remedy = "be the name of one mesh axis", "gather over one axis at a time"
        raise TypeError(message(where, "axis", rule, repr(axis), remedy))
    meshes: list[Any] = [jax.sharding.get_abstract_mesh()]
    if not isinstance(x, Tracer):
        meshes.append(getattr(x.sharding, "mesh", meshes[0]))
    meshes.append(jax.typeof(x).sharding.mesh)
    for mesh in meshes:
        if axis in mesh.axis_names:
            return mesh, mesh is meshes[0]
    known = sorted({a for mesh in meshes for a in mesh.axis_names})
    rule = f"name an axis of the mesh{f' ({known})' if known else ''}"
    remedy = "enter jax.set_mesh(mesh), or call it inside jax.shard_map over that axis"
    raise ValueError(message(where, "axis", rule, repr(axis), remedy))


def outside(
    where: str, x: Array, mesh: Any, axis: str, in_context: bool
) -> Outside | None:
    """Plans a call where the axis is not manual; None where it is.

    Args:
        where: the function, for errors.
        x: the array, its rows cut over the axis.
        mesh: the mesh.
        axis: the axis to gather over.
        in_context: whether the mesh is the context's.

    Raises:
        ValueError: the type of x says that the axis does not cut its rows.
    """
    if axis in axes_of(mesh, AxisType.Manual):
        return None
    explicit = axes_of(mesh, AxisType.Explicit)
    cut = per_dim(jax.typeof(x).sharding.spec if explicit else None, x.ndim)
    if axis in explicit and (not cut[0] or cut[0][-1] != axis):
        rule = f"be cut over {axis!r} on axis 0, as the last of the axes there"
        remedy = "place it with jax.sharding.reshard"
        raise ValueError(message(where, "x", rule, str(to_spec(cut)), remedy))
    others = tuple(a for a in cut[0] if a != axis)
    return Outside(
        mesh=mesh, axis=axis, cut=((*others, axis), *cut[1:]), in_context=in_context
    )
