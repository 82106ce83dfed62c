"""The dims of the batch: any number of them in a call, one inside of attention."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from te_flax.errors import message
from te_flax.typing import Array, Shape


class Batch(NamedTuple):
    """Joins the dims of the batch to one, and splits it again.

    Attributes:
        where: the layer.
        dims: sizes of the dims; a single one is left as it is.
        start: 1 where the sequence is in front of them, else 0.
    """

    where: str
    dims: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.dims)

    def joined_shape(self, shape: Shape) -> tuple[int, ...]:
        """The shape of an input behind :meth:`join`."""
        return (*shape[: self.start], math.prod(self.dims), *shape[self.end :])

    def join(self, name: str, array: Any) -> Any:
        """``[*batch, S, ...]``, or sequence first, with one dim for those of the batch.

        Args:
            name: of the argument.
            array: or None. Its dims may have size 1 where the batch has several.
        """
        if array is None or len(self.dims) == 1:
            return array
        found = array.shape[self.start : self.end]
        self._check(name, array, found)
        whole = (*array.shape[: self.start], *self.dims, *array.shape[self.end :])
        array = jnp.broadcast_to(array, whole)
        return array.reshape(self.joined_shape(array.shape))

    def join_argument(self, name: str, given: Any, *tails: int) -> Any:
        """The same of an argument, whose dims of the batch are always in front.

        Args:
            name: of the argument.
            given: an array, a pair of them, or None. What lacks dims of the batch, or
                has them joined, stays as it is.
            tails: how many dims may follow those of the batch.
        """
        if isinstance(given, tuple | list):
            return tuple(self.join_argument(name, array, *tails) for array in given)
        if given is None or len(self.dims) == 1:
            return given
        given = jnp.asarray(given)
        if given.ndim - len(self.dims) not in tails:
            return given
        return self._replace(start=0).join(name, given)

    def join_all(self, **given: Any) -> dict[str, Any]:
        """The arguments of attention that have dims of the batch, by name."""
        return {n: self.join_argument(n, a, *_TAILS[n]) for n, a in given.items()}

    def split(self, array: Array) -> Array:
        """The result of a call, with the dims of the batch."""
        if len(self.dims) == 1:
            return array
        before, after = array.shape[: self.start], array.shape[self.start + 1 :]
        return array.reshape(*before, *self.dims, *after)

    def _check(self, name: str, array: Any, found: tuple[int, ...]) -> None:
        pairs = zip(found, self.dims, strict=False)
        if len(found) != len(self.dims) or any(a not in (1, b) for a, b in pairs):
            rule, got = f"have the batch dims {self.dims}", f"shape {array.shape}"
            remedy = "give it those of the query"
            raise ValueError(message(self.where, name, rule, got, remedy))


# How many dims follow those of the batch.
_TAILS = {
    "mask": (3,),
    "bias": (3,),
    "segment_ids": (1,),
    "positions": (1,),
    "q_seqlen": (0, 1),
    "kv_seqlen": (0, 1),
    "offsets": (1,),
    "page_table": (1,),
}


def batch_of(where: str, shape: Shape, tail: int, sequence_first: bool) -> Batch:
    """The batch of an input.

    Args:
        where: the layer.
        shape: ``[*batch, S, ...]``, or with the sequence first.
        tail: number of dims behind batch and sequence.
        sequence_first: whether the sequence is in front.
    """
    dims = shape[1:-tail] if sequence_first else shape[: -tail - 1]
    return Batch(where, tuple(dims), int(sequence_first))
