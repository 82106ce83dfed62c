"""Which layer of a model runs under which recipe here, and why."""

from typing import Any, NamedTuple, TextIO

from flax import nnx

from te_flax.adapters import adapter, class_name, refusal
from te_flax.fusion import Passthrough
from te_flax.paths import Place, check_model, places, variables
from te_flax.recipe.base import HighPrecision
from te_flax.recipe.context import resolve
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.state import Fp8State

HIGH = "high precision"


class Row(NamedTuple):
    """One layer of a :class:`Report`.

    Attributes:
        path: where it is; the first path of a shared layer.
        layer: its class.
        shape: of the kernel, else of its first parameter.
        runs: the recipe that it would follow here, or "high precision".
        why: what decided that.
    """

    path: str
    layer: str
    shape: str
    runs: str
    why: str


class Report(NamedTuple):
    """What :func:`te_flax.report` found; its ``str`` is the printed table.

    Attributes:
        rows: one :class:`Row` for each layer that has parameters of its own.

    Example:
        >>> print(Report((Row("up", "te.DenseGeneral", "4x8", HIGH, "an example"),)))
        path  class            shape  runs            why
        up    te.DenseGeneral  4x8    high precision  an example
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        """The table."""
        table = [Row("path", "class", "shape", "runs", "why"), *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        return "\n".join(
            "  ".join((*map(str.ljust, row[:4], widths), row.why)) for row in table
        )


def report(model: Any, *, file: TextIO | None = None) -> Report:
    """Prints which layer runs under which recipe here, and why.

    The recipe is that of a call made where the report is: inside the same
    ``te.autocast``, say.

    Args:
        model: a module, or a pytree that holds modules.
        file: where to print; None is standard output.

    Returns:
        The table.

    Raises:
        TypeError: the model is none.

    Example:
        >>> import te_flax as te
        >>> model = nnx.Sequential(te.DenseGeneral(4, 8, rngs=nnx.Rngs(0)), nnx.relu)
        >>> with te.autocast(te.MXFP8BlockScaling()):
        ...     _ = te.report(model)
        path      class            shape  runs                                  why
        layers/0  te.DenseGeneral  4x8    MXFP8BlockScaling(fp8_format='e4m3')  autocast
    """
    check_model("report", model)
    seen: set[int] = set()
    rows = []
    for place in places(model):
        if id(place.module) not in seen:
            seen.add(id(place.module))
            row = _row(place)
            rows += [] if row is None else [row]
    found = Report(tuple(rows))
    print(found, file=file)
    return found


def _row(place: Place) -> Row | None:
    """The row of one layer; None for modules without parameters of their own."""
    module = place.module
    held = variables(module)
    params = {n: v for n, v in held.items() if isinstance(v, nnx.Param)}
    gemm = any(isinstance(child, Fp8State) for child in vars(module).values())
    ours = type(module).__module__.startswith("te_flax.")
    if isinstance(module, Passthrough):
        target = module.rule.linear
        runs, why = "-", f"fused into {target}"
    elif not params and not gemm and adapter(module) is None:
        return None
    elif gemm:
        runs, why = _followed(module)
    elif hasattr(module, "converted_from") or ours:
        runs, why = HIGH, "it has no GEMM" + _difference(module)
    elif (reason := refusal(module, place.ancestors)) is not None:
        runs, why = HIGH, f"not converted: {reason}"
    else:
        runs, why = HIGH, "not converted: no rule of te.convert chose it"
    main = params.get("kernel", next(iter(params.values()), None))
    dims = None if main is None else getattr(main.get_value(), "shape", None)
    shape = "-" if dims is None else "x".join(map(str, dims)) or "scalar"
    return Row(place.name, class_name(type(module)), shape, runs, why)


def _difference(module: Any) -> str:
    """What a converted norm computes otherwise than the one before it."""
    source = getattr(module, "converted_from", None)
    if source is None or source.kind is not nnx.LayerNorm:
        return ""
    fast = dict(source.attributes).get("use_fast_variance")
    return "; its variance is not nnx's fast, less exact one" if fast else ""


def _followed(module: Any) -> tuple[str, str]:
    """The recipe that a layer with a GEMM follows here, and what decided that."""
    own = getattr(module, "recipe", None)
    recipe = resolve(own)
    if recipe is not None:
        return repr(recipe), "autocast" if own is None else "its own recipe"
    # Nothing but a disabling context turns an explicit recipe off.
    if resolve(DelayedScaling()) is None:
        return HIGH, "autocast(enabled=False)"
    if isinstance(own, HighPrecision):
        return HIGH, "its own recipe is te.HIGH_PRECISION"
    return HIGH, "no recipe in context"
