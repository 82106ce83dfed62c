"""How the operands of FP8 layers fit their formats."""

import math
from typing import Any, NamedTuple

import numpy as np

from te_flax.errors import message
from te_flax.paths import Place, check_model, places
from te_flax.quantize.statistics import Statistics
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import resolve
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.record import ROLES, kernel_statistics
from te_flax.recipe.state import Fp8State


class OperandRow(NamedTuple):
    """One operand of one layer; NaN stands for what is not known.

    Attributes:
        path: of the layer; ``path[i]`` for the i-th of stacked layers.
        role: "x", "kernel" or "dy".
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
        rows: an :class:`OperandRow` for each operand of each layer with FP8 state.

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
    for place, owner in gemm_states("inspect", model):
        recipe = resolve(getattr(owner, "recipe", None))
        fp8: Any = place.module
        for index in np.ndindex(fp8.x.shape[:-1]):
            path = "".join([owner_path(place), *(f"[{i}]" for i in index)])
            bad = int(fp8.nonfinite[index])
            found = _operands(fp8, owner, recipe, index)
            rows += [
                OperandRow(path, role, *(float(n) for n in numbers), bad_pushes=bad)
                for role, numbers in zip(ROLES, found, strict=True)
            ]
    return Inspection(tuple(rows))


def gemm_states(where: str, model: Any) -> list[tuple[Place, Any]]:
    """Each FP8 state of a model once, with the layer that it belongs to."""
    check_model(where, model)
    found = {
        id(place.module): (place, (None, *place.ancestors)[-1])
        for place in reversed(places(model))
        if isinstance(place.module, Fp8State)
    }
    if not found:
        rule, remedy = "hold a layer of te_flax with a GEMM", "te.convert makes some"
        got = f"a {type(model).__name__} without one"
        raise ValueError(message(where, "model", rule, got, remedy))
    return list(reversed(found.values()))


def owner_path(place: Place) -> str:
    """The path of the layer whose ``fp8`` a state is, else the state's own."""
    keys = place.path[:-1] if place.path[-1:] == ("fp8",) else place.path
    return "/".join(map(str, keys))


def _operands(
    fp8: Any, owner: Any, recipe: Recipe | None, index: tuple[int, ...]
) -> list[Statistics]:
    """The statistics of x, the kernel and dy of one layer."""
    delayed = recipe if isinstance(recipe, DelayedScaling) else None
    rows, known = [], {}
    for role in ROLES:
        newest = float(getattr(fp8, role)[(*index, 0)])
        row = Statistics(amax=newest if newest > 0 else math.nan)
        if delayed is not None:
            quantizer: Any = getattr(delayed.quantizers(), role)
            known[role] = quantizer.scale(fp8.amax(role, delayed)[index])
            row = row._replace(scale=known[role].scale)
        rows.append(row)
    if fp8.record is not None:
        held = [Statistics(*map(float, r)) for r in np.asarray(fp8.record[index])]
        rows = [a if math.isnan(b.amax) else b for a, b in zip(rows, held, strict=True)]
    kernel = getattr(owner, "kernel", None)
    if kernel is not None:
        k_ndim = len(owner.in_features)
        matrix = kernel[index or ...]
        if hasattr(owner, "matrix"):
            matrix = owner.matrix(matrix)
        rows[1] = kernel_statistics(
            recipe or Recipe(), matrix, k_ndim, known.get("kernel")
        )
    return rows


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "-" if math.isnan(value) else f"{value:.4g}"
