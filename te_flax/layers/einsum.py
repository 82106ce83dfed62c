"""Einsum: nnx.Einsum whose product follows the recipe."""

import functools
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from te_flax.errors import message
from te_flax.layers import _arguments, _gemm
from te_flax.layers._params import init_param
from te_flax.layers.dense_general import DEFAULT_KERNEL_INIT, ZEROS, DenseGeneral
from te_flax.layers.layer_norm_dense_general import refuse
from te_flax.typing import Array, Axes, Initializer

_WHERE = "Einsum"
_OWN = ("axis", "use_bias", "kernel_init", "kernel_axes", "bias_axes", "bias_init")


class Equation(NamedTuple):
    """An equation that is one product of matrices.

    Attributes:
        x: letters of the input, "..." included.
        kernel: letters of the kernel.
        y: letters of the result, "..." included.
        contracted: letters of both operands, in the order of the input.
        new: letters of the kernel alone, in the order of the result.
    """

    x: str
    kernel: str
    y: str
    contracted: str
    new: str


class Einsum(DenseGeneral):
    """A linear map in Einstein's notation: ``y = einsum(text, x, kernel) + bias``.

    The letters that x and the kernel share are summed over, so that each map is one
    product of matrices. Without a recipe it equals :class:`flax.nnx.Einsum`.
    Parameters: ``kernel`` of ``kernel_shape``, ``bias`` of ``bias_shape``.

    Args:
        einsum_str: the equation; x may have "...".
        kernel_shape: sizes of the kernel's letters.
        bias_shape: sizes of the kernel's own letters in the order of the result; None
            is no bias.
        kernel_init: called with ``kernel_shape``.
        bias_init: called with ``bias_shape``.
        kernel_axes: a logical axis, or None, for each dim of the kernel.
        bias_axes: likewise for the bias.
        rngs: keys for the parameters.
        **dense: the other arguments of :class:`te_flax.DenseGeneral`.

    Raises:
        ValueError: the equation is no product of matrices, or a shape does not fit it.
        TypeError: as :class:`te_flax.DenseGeneral`.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.Einsum("btd,ndh->btnh", (4, 64, 16), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 64))).shape
        (2, 8, 4, 16)

    Source: flax.nnx's layer of the same name.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        bias_init: Initializer = ZEROS,
        kernel_axes: Axes | None = None,
        bias_axes: Axes | None = None,
        rngs: nnx.Rngs,
        **dense: Any,
    ):
        _arguments.check_options(_WHERE, locals())
        refuse(_WHERE, dense, DenseGeneral, *_OWN)
        self.equation = equation(einsum_str)
        shape = _arguments.features(_WHERE, kernel_shape=kernel_shape)[0]
        letters = self.equation.kernel
        if len(shape) != len(letters):
            rule, remedy = f"have a size for each of {letters!r}", "change one of them"
            raise ValueError(message(_WHERE, "kernel_shape", rule, shape, remedy))
        contracted, new = self.equation.contracted, self.equation.new
        size = dict(zip(letters, shape, strict=True))
        out = tuple(size[a] for a in new)
        if bias_shape is not None and tuple(bias_shape) != out:
            rule, remedy = f"be {out}, the sizes of {new!r}", "use None for no bias"
            raise ValueError(message(_WHERE, "bias_shape", rule, bias_shape, remedy))
        super().__init__(
            tuple(size[a] for a in contracted),
            out,
            axis=tuple(range(-len(contracted), 0)),
            use_bias=bias_shape is not None,
            kernel_init=ZEROS,
            bias_init=bias_init,
            bias_axes=bias_axes,
            rngs=rngs,
            **dense,
        )
        self.kernel_order = tuple(letters.index(a) for a in contracted + new)
        make = functools.partial(init_param, _WHERE, kernel_init, shape, shape)
        self.kernel = make(
            kernel_axes=kernel_axes,
            dtype=self.param_dtype,
            metadata=dense.get("kernel_metadata", {}),
            rngs=rngs,
        )

    def __call__(
        self, x: Array, out_sharding: PartitionSpec | NamedSharding | None = None
    ) -> Array:
        """Applies the layer.

        Args:
            x: float array with the letters of the equation.
            out_sharding: wanted of y.

        Returns:
            y, with the letters of the equation.

        Raises:
            ValueError: the rank or the contracted sizes of x do not fit.
            TypeError: x is no float array.
        """
        x = _arguments.float_array(_WHERE, x)
        of_x, of_y = self._letters(x)
        rest = "".join(a for a in of_x if a not in self.equation.contracted)
        order = tuple(of_x.index(a) for a in rest + self.equation.contracted)
        x, axes = self._placed(x, order)
        found = rest + self.equation.new
        if out_sharding is not None:
            named = isinstance(out_sharding, NamedSharding)
            spec = tuple(out_sharding.spec if named else out_sharding)
            spec += (None,) * (len(of_y) - len(spec))
            out_sharding = PartitionSpec(*(spec[of_y.index(a)] for a in found))
        y, _ = _gemm.apply(self, x, axes=axes, out_sharding=out_sharding)
        return _ordered(y, found, of_y)

    def _letters(self, x: Array) -> tuple[str, str]:
        """A letter for each dim of x and of y."""
        of_x, of_y = self.equation.x, self.equation.y
        extra = x.ndim - len(of_x.replace("...", ""))
        if extra < 0 or (extra > 0 and "..." not in of_x):
            rule, got = f"have the dims {of_x!r}", f"shape {x.shape}"
            raise ValueError(message(_WHERE, "x", rule, got, "change the equation"))
        free = [a for a in string.ascii_letters if a not in of_x + of_y][:extra]
        of_x, of_y = (part.replace("...", "".join(free)) for part in (of_x, of_y))
        got = tuple(x.shape[of_x.index(a)] for a in self.equation.contracted)
        if got != self.in_features:
            rule = f"have the sizes {self.in_features} of {self.equation.contracted!r}"
            remedy = "change kernel_shape or the input"
            raise ValueError(message(_WHERE, "x", rule, got, remedy))
        return of_x, of_y


def equation(text: str) -> Equation:
    """Reads an equation; raises ValueError unless it is one product of matrices.

    Example:
        >>> equation("...d, dh -> ...h").new
        'h'
    """
    compact = text.replace(" ", "") if isinstance(text, str) else ""
    left, arrow, y = compact.partition("->")
    x, comma, kernel = left.partition(",")
    letters = [part.replace("...", "", 1) for part in (x, kernel, y)]
    shared = "".join(a for a in letters[0] if a in kernel)
    new = "".join(a for a in letters[2] if a in kernel)
    kept = "".join(a for a in letters[0] if a not in kernel)
    ok = bool(arrow and comma and shared and new) and "..." not in kernel
    ok = ok and all(p.isalpha() and len({*p}) == len(p) for p in letters)
    ok = ok and ("..." in x) == ("..." in y) and {*letters[1]} == {*shared, *new}
    if not ok or {*letters[2]} != {*kept, *new} or {*shared} & {*new}:
        rule = "sum over all letters that x and the kernel share, and keep the others"
        remedy = "write 'btd,ndh->btnh'"
        raise ValueError(message(_WHERE, "einsum_str", rule, repr(text), remedy))
    return Equation(x, kernel, y, shared, new)


def _ordered(array: Array, letters: str, wanted: str) -> Array:
    order = tuple(letters.index(a) for a in wanted)
    return array if letters == wanted else jnp.transpose(array, order)
