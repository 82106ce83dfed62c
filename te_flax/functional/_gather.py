"""What travels where a product reads tokens that other devices hold.

Codes travel, not what they encode. Megatron's sequence parallelism follows: x is
gathered in front of a column-parallel product and once more for the kernel's gradient,
dy in front of both gradients of a row-parallel one.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198), section 4.2.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from te_flax.functional._sent import sent
from te_flax.functional.config import NOWHERE, DenseConfig
from te_flax.ops._plan import axes_of, per_dim, to_spec
from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.quantize.quantizer import Identity, Quantized, Quantizer
from te_flax.quantize.tensor import ScaledTensor
from te_flax.sharding import Placement
from te_flax.typing import Array

_ONE_SET_OF_CODES = (TensorQuantizer, Identity)  # for both copies


class Route(NamedTuple):
    """Where codes are made and where a product reads them.

    Attributes:
        start: where they are made, as far as Auto mesh axes go.
        end: where the product reads them.
    """

    start: Placement
    end: Placement


def x_route(config: DenseConfig) -> Route:
    """That of the copies of x, in either pass."""
    return Route(Placement(auto=config.input.auto), config.operand)


def x_quantizer(config: DenseConfig, x: Array, k_ndim: int) -> Quantizer:
    """What quantizes x: to codes where the product reads tokens of other devices."""
    asked, want = x_route(config)
    less = _gathered(x.ndim - k_ndim, jax.typeof(x), asked, want)
    return config.x if less == NOWHERE else codes_alone(config.x)


def dy_route(config: DenseConfig, x_type: Any, dy: Array, n_ndim: int) -> Route | None:
    """That of the copies of dy: to where the forward product had the tokens of x.

    Args:
        config: of the GEMM.
        x_type: type of its input.
        dy: the cotangent, or codes that are laid out like it.
        n_ndim: number of its dims that are no tokens.

    Returns:
        The route, None where no token travels.
    """
    want = config.operand
    if want.explicit is None:
        want = want._replace(explicit=x_type.sharding.spec)
    start = Placement()
    if want.auto is not None and config.out_sharding is not None:
        auto = axes_of(jax.sharding.get_abstract_mesh(), AxisType.Auto)
        dims = per_dim(config.out_sharding, dy.ndim)
        asked = to_spec(tuple(a for a in axes if a in auto) for axes in dims)
        start = Placement(auto=asked)
    end = _gathered(dy.ndim - n_ndim, jax.typeof(dy), start, want)
    return None if end == NOWHERE else Route(start, end)


def dy_quantizer(
    config: DenseConfig, x_type: Any, dy: Array, n_ndim: int
) -> tuple[Quantizer, bool]:
    """What quantizes dy, and whether it makes the colwise copy before that travels."""
    if dy_route(config, x_type, dy, n_ndim) is None:
        return config.dy, True
    return codes_alone(config.dy), not isinstance(config.dy, _ONE_SET_OF_CODES)


def dy_copies(
    config: DenseConfig, dy: Quantized, x_type: Any, n_ndim: int
) -> tuple[ScaledTensor, ScaledTensor]:
    """Both copies of dy where the gradients' products read them."""
    row, col = cast(ScaledTensor, dy.rowwise), dy.colwise
    route = dy_route(config, x_type, row.data, n_ndim)
    if route is not None:
        row = travel(row, route)
        col = _turned(row) if col is None else travel(col, route)
    how = config.dy, config.impl
    return values_of(row, *how), values_of(cast(ScaledTensor, col), *how)


def _gathered(tokens: int, have: Any, asked: Placement, want: Placement) -> Placement:
    """Where an array is, less the mesh axes that cut its tokens there and not in want.

    Args:
        tokens: number of its dims that are tokens.
        have: its type, which knows Explicit axes.
        asked: what is known of Auto ones.
        want: where the forward product had the tokens.
    """

    def less(spec: PartitionSpec | None, wanted: PartitionSpec | None):
        if spec is None or wanted is None:
            return None
        dims, others = per_dim(spec, have.ndim), per_dim(wanted, have.ndim)
        kept = [
            tuple(a for a in axes if i >= tokens or a in others[i])
            for i, axes in enumerate(dims)
        ]
        return None if kept == dims else to_spec(kept)

    return Placement(
        less(have.sharding.spec, want.explicit), less(asked.auto, want.auto)
    )


def codes_alone(quantizer: Any) -> Quantizer:
    """The same quantizer, without values in place of codes."""
    if getattr(quantizer, "values", ()):
        return dataclasses.replace(quantizer, values=())
    return quantizer


def _turned(row: ScaledTensor) -> ScaledTensor:
    """The copy to contract over the tokens, of the same codes."""
    if row.scaling == "none":
        return dataclasses.replace(row, rowwise=False)
    m = row.ndim - row.k_ndim
    data = jnp.transpose(row.data, (*range(m, row.ndim), *range(m)))
    return dataclasses.replace(row, data=data, rowwise=False, transposed=True)


def travel(x: ScaledTensor, route: Route) -> ScaledTensor:
    """The copy where its product reads it; one byte travels for each code.

    Copies whose data are packed follow the product that reads them.
    """
    start, end = route
    if end == NOWHERE or x.data.ndim != x.ndim:
        return x
    m = x.ndim - x.k_ndim
    data, scale = x.data, x.scale
    if scale is not None and scale.ndim:
        scale = Placement(*(p and _scale_spec(x, p) for p in end))(scale)
    if x.transposed:
        start, end = (p.permuted((*range(m, x.ndim), *range(m))) for p in route)
    if data.dtype.itemsize > 1:
        return dataclasses.replace(x, data=end(data), scale=scale)
    # Made at the start, else XLA gathers what the codes are made of.
    move = lambda a: end(start(a) if start.auto != end.auto else a)
    return dataclasses.replace(x, data=sent(data, move), scale=scale)


def _scale_spec(x: ScaledTensor, spec: PartitionSpec) -> PartitionSpec:
    """The spec of the scales of blocks, from that of ``[M.., K..]``.

    The dim of the blocks lies along the leading ones of its group that are cut.
    """
    scale, m = cast(Array, x.scale), x.ndim - x.k_ndim
    dims = per_dim(spec, x.ndim)
    kept, cut = (dims[:m], dims[m:]) if x.rowwise else (dims[m:], dims[:m])
    block = tuple(a for axes in itertools.takewhile(bool, cut) for a in axes)
    at = 0 if not (x.rowwise or x.transposed) else len(kept)
    sizes = jax.sharding.get_abstract_mesh().shape
    if scale.shape[at] % math.prod(sizes[a] for a in block):
        block = ()
    return to_spec((*kept[:at], block, *kept[at:]))


def values_of(
    x: ScaledTensor, quantizer: Any, impl: tuple | None = None
) -> ScaledTensor:
    """Codes that have travelled as the values that the quantizer makes without."""
    copy = "row" if x.rowwise else "col"
    if x.scaling == "none" or copy not in getattr(quantizer, "values", ()):
        return x
    return x.values(impl=impl)
