"""Rows gathered over a manual mesh axis, and their cotangents brought back."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from te_flax.typing import Array

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


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
    """

    axis: str
    size: int
    group: int
    shard: int
    rows: tuple[int, ...] | None = None

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
        # As integers: XLA's CPU backend sends bfloat16 as float32, which loses NaN
        # payloads, and FP8 as float16.
        kind = _BITS[a.dtype.itemsize]
        bits = lax.bitcast_convert_type(a, kind)
        if self.group > 1:
            bits = lax.all_gather(
                bits, self.axis, axis_index_groups=self.groups, tiled=True
            )
        if self.rows is not None:
            bits = jnp.take(bits, self._own(self._places()), axis=0, mode="clip")
        return lax.bitcast_convert_type(bits, a.dtype)

    def spread(self, a: Array) -> Array:
        """``[gathered, ..]`` -> ``[group * shard, ..]`` with zeros for padding."""
        if self.rows is None:
            return a
        places = self._places()
        back = np.full((len(places), self.group * self.shard), self.gathered, np.int32)
        np.put_along_axis(back, places, np.arange(self.gathered, dtype=np.int32), 1)
        return jnp.take(a, self._own(back), axis=0, mode="fill", fill_value=0)

    def own(self, a: Array) -> Array:
        """``[gathered, ..]`` -> this device's ``[shard, ..]``."""
        a = self.spread(a)
        if self.group == 1:
            return a
        at = lax.axis_index(self.axis) % self.group * self.shard
        return lax.dynamic_slice_in_dim(a, at, self.shard)

    def scatter(self, a: Array) -> Array:
        """Sums ``[gathered, ..]`` of all devices of a group: ``[shard, ..]`` of it."""
        a = self.spread(a)
        if self.group == 1:
            return a
        return lax.psum_scatter(a, self.axis, axis_index_groups=self.groups, tiled=True)

    def counts(self, whole: bool) -> Array | None:
        """Which rows count: of this device's, or of all along the axis; None for all.

        Args:
            whole: whether the caller has the shards of all devices, in order.
        """
        if self.rows is None:
            return None
        valid = np.arange(self.shard) < np.asarray(self.rows)[:, None]
        if whole:
            return jnp.asarray(valid.reshape(-1))
        if self.size == 1:
            return jnp.asarray(valid[0])
        return jnp.asarray(valid)[lax.axis_index(self.axis)]

    def _places(self) -> np.ndarray:
        """Where the rows of each group are among its shards: ``[groups, gathered]``."""
        valid = np.arange(self.shard) < np.asarray(self.rows)[:, None]
        by_group = valid.reshape(-1, self.group * self.shard)
        return np.stack([np.flatnonzero(v) for v in by_group]).astype(np.int32)

    def _own(self, table: np.ndarray) -> Array:
        """The row of this device's group in a table with a row for each group."""
        if len(table) == 1:
            return jnp.asarray(table[0])
        return jnp.asarray(table)[lax.axis_index(self.axis) // self.group]
