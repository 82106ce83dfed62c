"""Rows gathered over a mesh axis, and their cotangents brought back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from te_flax.functional._row_mesh import Outside
from te_flax.functional._sent import sent
from te_flax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGather:
    """Who shares rows with whom along one mesh axis.

    Attributes:
        axis: the mesh axis.
        size: its number of devices.
        group: number of neighbours that share their rows; it divides ``size``.
        shard: rows of a device's array, padding included.
        rows: how many of them count, for each device of the axis; the same sum in every
            group. None: all.
        outside: where the axis is not manual: arrays are whole, in their order.
    """

    axis: str
    size: int
    group: int
    shard: int
    rows: tuple[int, ...] | None = None
    outside: Outside | None = None

    @property
    def gathered(self) -> int:
        """The number of rows that a group has."""
        if self.rows is None:
            return self.group * self.shard
        return sum(self.rows[: self.group])

    @property
    def groups(self) -> list[list[int]] | None:
        """The devices of each group; None for all in one."""
        if self.group == self.size:
            return None
        starts = range(0, self.size, self.group)
        return [list(range(i, i + self.group)) for i in starts]

    def gather(self, a: Array) -> Array:
        """``[shard, ..]`` on every device -> ``[gathered, ..]``, bit by bit."""
        return self.whole(self._packed(sent(a, self._gather)))

    def _gather(self, a: Array) -> Array:
        if self.outside is not None:
            return self.outside.gather(a)
        if self.group == 1 or a.size == 0:  # XLA refuses to gather no rows
            return jnp.concatenate([a] * self.group)
        groups = self.groups
        return lax.all_gather(a, self.axis, axis_index_groups=groups, tiled=True)

    def whole(self, a: Array) -> Array:
        """Gathered rows, or computed of them: XLA might leave them cut on Auto axes."""
        return a if self.outside is None else self.outside.gather(a)

    def own(self, a: Array) -> Array:
        """``[gathered, ..]`` -> this device's ``[shard, ..]``, zeros for padding."""
        a = self._spread(a)
        if self.outside is not None:
            return self.outside.scatter(a)
        if self.group == 1:
            return a
        at = lax.axis_index(self.axis) % self.group * self.shard
        return lax.dynamic_slice_in_dim(a, at, self.shard)

    def scatter(self, a: Array) -> Array:
        """Sums ``[gathered, ..]`` of all devices of a group: ``[shard, ..]`` of it."""
        if self.outside is not None or self.group == 1 or a.size == 0:
            return self.own(a)
        a, groups = self._spread(a), self.groups
        if not any(jax.typeof(a).sharding.spec):
            return lax.psum_scatter(a, self.axis, axis_index_groups=groups, tiled=True)
        # JAX cannot lower a reduce-scatter beside Explicit axes: this sends as much.
        parts = lax.all_to_all(a, self.axis, 0, 0, axis_index_groups=groups, tiled=True)
        return jnp.sum(parts.reshape(self.group, self.shard, *a.shape[1:]), 0)

    def valid(self) -> Array | None:
        """Which of the rows before the gather count; None for all."""
        if self.rows is None:
            return None
        valid = np.arange(self.shard) < np.asarray(self.rows)[:, None]
        if self.outside is not None:
            return jnp.asarray(valid.reshape(-1))
        if self.size == 1:
            return jnp.asarray(valid[0])
        return jnp.asarray(valid)[lax.axis_index(self.axis)]

    def _packed(self, a: Array) -> Array:
        """``[group * shard, ..]`` without padding: each shard overwrites the last's."""
        if self.rows is None:
            return a
        starts, _ = self._places()
        room = [(0, self.gathered, 0), *[(0, 0, 0)] * (a.ndim - 1)]
        packed = lax.pad(a[: self.shard], jnp.zeros((), a.dtype), room)
        for i in range(1, self.group):
            shard = lax.slice_in_dim(a, i * self.shard, (i + 1) * self.shard)
            packed = lax.dynamic_update_slice_in_dim(packed, shard, starts[i], 0)
        return packed[: self.gathered]

    def _spread(self, a: Array) -> Array:
        """``[gathered, ..]`` -> ``[group * shard, ..]``, zeros for padding."""
        if self.rows is None:
            return a
        starts, counts = self._places()
        room = [(0, self.shard, 0), *[(0, 0, 0)] * (a.ndim - 1)]
        a = lax.pad(a, jnp.zeros((), a.dtype), room)
        at = jnp.arange(self.shard).reshape(-1, *[1] * (a.ndim - 1))
        shards = [
            jnp.where(at < n, lax.dynamic_slice_in_dim(a, start, self.shard), 0)
            for start, n in zip(starts, counts, strict=True)
        ]
        return jnp.concatenate(shards)

    def _places(self) -> tuple[list, list]:
        """Where the rows of each shard of this group start, and how many they are."""
        counts = np.asarray(self.rows, np.int32).reshape(-1, self.group)
        starts = np.cumsum(counts, axis=1, dtype=np.int32) - counts
        if self.group == self.size:
            return starts[0].tolist(), counts[0].tolist()
        at = lax.axis_index(self.axis) // self.group
        return list(jnp.asarray(starts)[at]), list(jnp.asarray(counts)[at])
