"""How the operands of FP8 layers fit their formats."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from te_flax.errors import message
from te_flax.paths import Place, check_model, places
from te_flax.quantize.quantizer import Scale
from te_flax.quantize.statistics import Statistics
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import resolve
from te_flax.recipe.record import kernel_statistics
from te_flax.recipe.state import Fp8Statistics


class OperandRow(NamedTuple):
    """One operand of one layer; NaN stands for what is not known.

    Attributes:
        path: of the layer; ``path[i]`` for the i-th of stacked layers.
        role: "x", "kernel" or "dy"; of attention "q", "k", "v", "s" (the probabilities)
            and "o", and of its gradients "do", "dp", "dq", "dk" and "dv".
        amax: the largest finite magnitude: the kernel's own, else that of the latest
            call, from the history or from ``te.record``.
        scale: what the operand is multiplied by; the smallest of all blocks.
        saturated: share of the elements beyond the format's range.
        flushed: share of the elements that are not zero and whose code is.
        nonfinite: number of NaN and infinite elements.
        bad_pushes: how often the layer pushed the amax of a tensor with such elements.
    """

    path: str
    role: str
    amax: float
    scale: float
    saturated: float
    flushed: float
    nonfinite: float
    bad_pushes: int


class Inspection(NamedTuple):
    """What :func:`te_flax.inspect` found; its ``str`` is a table.

    Attributes:
        rows: an :class:`OperandRow` for each operand of each layer with FP8 state of
            which anything is known.

    Example:
        >>> row = OperandRow("up", "kernel", 2.0, 224.0, 0.0, 0.25, 0.0, 0)
        >>> print(Inspection((row,)))
        path  role    amax  scale  saturated  flushed  nonfinite  bad_pushes
        up    kernel  2     224    0          0.25     0          0
    """

    rows: tuple[OperandRow, ...]

    def __str__(self) -> str:
        """The table."""
        table = [OperandRow._fields, *(tuple(map(_text, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in table
        )

    __repr__ = __str__


def inspect(model: Any) -> Inspection:
    """Shows how each layer's operands fit the format of the recipe in force here.

    The kernel is quantized as the layer would quantize it and compared with its
    codes. x and dy exist in a training step only. Between a recorded step and the
    ``step()`` that ends it (:func:`te_flax.record`) the numbers of that step are shown;
    otherwise amax comes from the histories and the scale from delayed scaling, where
    it follows from them. All else is NaN, printed as "-".

    Args:
        model: a module, or a pytree that holds modules.

    Returns:
        The table: for each layer and operand amax, scale, share of saturated and of
        flushed elements, non-finite counts.

    Raises:
        ValueError: the model has no layer with FP8 state, or a recipe looks at more
            history than a layer holds.
        TypeError: the model is none.

    Example:
        >>> import te_flax as te
        >>> from flax import nnx
        >>> model = nnx.Dict(up=te.DenseGeneral(32, 8, rngs=nnx.Rngs(0)))
        >>> with te.autocast(te.Float8CurrentScaling()):
        ...     row = te.inspect(model).rows[1]
        >>> row.path, row.role, row.saturated, row.nonfinite
        ('up', 'kernel', 0.0, 0.0)
    """
    rows: list[OperandRow] = []
    for place, owner in fp8_states("inspect", model):
        recipe = resolve(getattr(owner, "recipe", None))
        fp8: Any = place.module
        scales = fp8.scales(recipe) if fp8.scaled_by(recipe) else None
        layers: dict[str, list[OperandRow]] = {}
        for path, role, at in operands(place):
            found = _numbers(fp8, scales, at)
            if role == "kernel":
                found = _kernel_numbers(owner, recipe, scales, at[:-1]) or found
            bad = int(fp8.nonfinite[at[:-1]])
            numbers = (float(n) for n in found)
            row = OperandRow(path, role, *numbers, bad_pushes=bad)
            layers.setdefault(path, []).append(row)
        for found in layers.values():
            rows += found if any(map(_known, found)) else ()
    return Inspection(tuple(rows))


def fp8_states(where: str, model: Any) -> list[tuple[Place, Any]]:
    """Each FP8 state of a model once, with the layer that it belongs to."""
    check_model(where, model)
    found = {
        id(place.module): (place, (None, *place.ancestors)[-1])
        for place in reversed(places(model))
        if isinstance(place.module, Fp8Statistics)
    }
    if not found:
        rule = "hold a layer of te_flax with a GEMM or an attention"
        remedy = "te.convert makes some"
        got = f"a {type(model).__name__} without one"
        raise ValueError(message(where, "model", rule, got, remedy))
    return list(reversed(found.values()))


def operands(place: Place) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Path and role of each array of an FP8 state, and where its statistics lie."""
    fp8: Any = place.module
    # ("fp8",) is the layer's own; others are shown where they lie.
    keys = place.path[:-1] if place.path[-1:] == ("fp8",) else place.path
    roles = np.asarray(fp8.roles).T  # those of the backward pass come last
    for index in np.ndindex(fp8.dy.shape[: -roles.ndim]):
        path = "".join(["/".join(map(str, keys)), *(f"[{i}]" for i in index)])
        for place_in in np.ndindex(roles.shape):
            yield path, str(roles[place_in]), (*index, *place_in[::-1])


def _numbers(fp8: Any, scales: Any, at: tuple[int, ...]) -> Statistics:
    """What the state knows: of the recorded step, else of the histories."""
    if fp8.record is not None:
        held = Statistics(*map(float, np.asarray(fp8.record[...])[at]))
        if not math.isnan(held.amax):
            return held
    *row, which = at
    newest = float(getattr(fp8, fp8.histories[which])[(*row, 0)])
    found = Statistics(amax=newest if newest > 0 else math.nan)
    if scales is None:
        return found
    return found._replace(scale=scales[which].scale[tuple(row)])


def _kernel_numbers(
    owner: Any, recipe: Recipe | None, scales: Any, index: tuple[int, ...]
) -> Statistics | None:
    """The statistics of a layer's kernel, compared with its codes here."""
    kernel = getattr(owner, "kernel", None)
    if kernel is None:
        return None
    matrix = kernel[index or ...]
    if hasattr(owner, "matrix"):
        matrix = owner.matrix(matrix)
    known = None if scales is None else Scale(*(a[index] for a in scales[1]))
    k_ndim = len(owner.in_features)
    return kernel_statistics(recipe or Recipe(), matrix, k_ndim, known)


def _known(row: OperandRow) -> bool:
    """Whether any of the numbers is."""
    return not all(map(math.isnan, row[2:-1]))


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "-" if math.isnan(value) else f"{value:.4g}"
