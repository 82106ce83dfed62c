"""Row shards gathered over a mesh axis, with their RMSNorm and its quantized copy."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from te_flax.functional import _core, _gather_checks, _row_mesh
from te_flax.functional._row_gather import RowGather
from te_flax.functional.config import IDENTITY, DenseConfig, GemmState, NormConfig
from te_flax.ops import _bits
from te_flax.ops._gather_order import ORDERS, Order
from te_flax.ops._op import cotangent_like
from te_flax.ops._plan import to_spec
from te_flax.quantize.fused import Produced
from te_flax.quantize.mxfp6 import MXFP6Quantizer
from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.quantize.quantizer import Quantizer
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

QUANTIZERS: dict[str, Quantizer] = {
    "mxfp8": MXFP8Quantizer(),
    "mxfp6_e2m3": MXFP6Quantizer(format="e2m3"),
    "mxfp6_e3m2": MXFP6Quantizer(format="e3m2"),
}


class GatheredNorm(NamedTuple):
    """What :func:`allgather_rms_norm` returns, None for what was not asked for.

    Attributes:
        normed: the RMSNorm of the gathered rows, of x's dtype.
        quantized: its row-wise quantized copy.
        residual: the gathered rows of x, to the bit.

    Example:
        >>> GatheredNorm().normed is None
        True
    """

    normed: Array | None = None
    quantized: ScaledTensor | None = None
    residual: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """All that both passes must know before tracing."""

    rows: RowGather
    norm: NormConfig
    offset: float
    quantizer: Quantizer
    outputs: tuple[str, ...]
    order: Order

    @property
    def gemm(self) -> DenseConfig:
        """The quantizer and the kernel rules, as the norm wants them."""
        return DenseConfig(x=self.quantizer, impl=self.norm.impl)


def allgather_rms_norm(
    x: Array,
    gamma: Array,
    *,
    axis: str,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    group_size: int | None = None,
    rows: Sequence[int] | None = None,
    quantize: str | None = None,
    outputs: Sequence[str] | None = None,
) -> GatheredNorm:
    """Gathers the row shards of x over a mesh axis and normalises each row.

    ``y = x / sqrt(mean(x^2) + epsilon) * (gamma + weight_offset)`` over the last dim,
    in float32, rounded once.

    Rows are quantized before they travel where the quantized copy alone is asked for,
    and normalised behind the gather where the residual travels anyway:
    ``te.kernel_report()`` lists the orders. The results are the same to the bit in all
    of them, and on every device of a group.

    Args:
        x: ``[rows, .., features]`` float32, bfloat16 or float16. Inside
            ``jax.shard_map`` over ``axis`` a device's own rows; outside, all rows, cut
            over ``axis``.
        gamma: ``[features]``, the same on all devices.
        axis: name of the mesh axis.
        epsilon: added to the mean of squares, >= 0.
        weight_offset: added to gamma in float32; 1 for a zero-centered gamma.
        group_size: neighbours along the axis that share their rows; None: all. Outside
            shard_map the results then hold what each device of the axis gets, one
            behind another, cut over ``axis``.
        rows: for each device of the axis the number of its rows that count, the first
            of its shard; None: all. What is behind them is padding, and appears in no
            result. They add up to the same in each group.
        quantize: "mxfp8" (e4m3 codes), "mxfp6_e2m3" or "mxfp6_e3m2" (four codes in
            three bytes, ``[.., 3 features / 4]``), each with row-wise e8m0 scales
            ``[.., features / 32]``, of whole blocks; None for none.
        outputs: of "normed", "quantized" and "residual" those wanted. None: all, the
            quantized copy only with ``quantize``.

    Returns:
        normed, quantized and residual. Gradients flow through the first and the last;
        the quantized copy is a constant to differentiation. Inside
        ``jax.shard_map(..., check_vma=False)`` the gradient of gamma is a device's
        part, as of any operand there: sum it over the axis.

    Raises:
        ValueError: shapes, rows or group_size do not fit, or a name is unknown.
        TypeError: an operand is no float array.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> x = jax.device_put(jnp.ones((8, 64)), jax.NamedSharding(mesh, P("tp")))
        >>> made = te.allgather_rms_norm(x, jnp.ones(64), axis="tp", quantize="mxfp8")
        >>> made.normed.shape, made.quantized.scale.shape
        ((8, 64), (8, 2))

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"
    (arXiv:1910.07467), equation 4; sequence parallelism of Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
    section 4.2.2.
    """
    _gather_checks.arrays(x, gamma)
    x, gamma = jnp.asarray(x), jnp.asarray(gamma)
    wanted = _gather_checks.outputs(x.shape[-1], quantize, outputs, QUANTIZERS)
    norm = _gather_checks.norm(epsilon, weight_offset)
    where = _gather_checks.WHERE
    mesh, in_context = _row_mesh.find(where, x, axis)
    size, shard = mesh.shape[axis], x.shape[0]
    outside = _row_mesh.outside(where, x, mesh, axis, in_context)
    if outside is not None:
        shard = _gather_checks.shard_rows(x, outside.cuts, size, rows)
    shared = _gather_checks.rows(axis, size, shard, group_size, rows)
    config = _Config(
        rows=dataclasses.replace(shared, outside=outside),
        norm=norm,
        offset=float(weight_offset) if abs(weight_offset) >= 2.0**-126 else 0.0,
        quantizer=IDENTITY if quantize is None else QUANTIZERS[quantize],
        outputs=wanted,
        order=ORDERS[wanted],
    )
    if outside is not None and shared.groups is not None:
        config = dataclasses.replace(config, rows=shared)
        made = _in_groups(config, outside, x, gamma)
    else:
        made = _gathered(config, x, gamma)
    count = jax.tree.leaves(made)[0].shape[0]
    return made._replace(quantized=_of_shape(made.quantized, (count, *x.shape[1:])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(config: _Config, x: Array, gamma: Array) -> GatheredNorm:
    return _forward(config, x, gamma)[0]


def _forward(config: _Config, x: Array, gamma: Array):
    """The results, and 1 / sqrt(..) of the rows before the gather, if there is one."""
    asked = config.outputs
    residual = None
    if "residual" in asked or not config.order.first:
        residual = config.rows.gather(x)
    normed = copy = rstd = None
    if config.order.first:
        normed, copy, rstd = _in_front(config, x, gamma)
    elif config.order.then:
        normed, copy, rstd = _behind(config, _core.array(residual), gamma)
    found = GatheredNorm(normed, copy, residual)
    kept = {name: getattr(found, name) for name in asked}
    return GatheredNorm(**kept), rstd


def _in_front(config: _Config, x: Array, gamma: Array):
    """Own rows normalised; what is asked for of them gathered."""
    gather, quantized = config.rows.gather, config.order.first == "quantized norm"
    h = not quantized or "normed" in config.outputs
    made = _normalize(config, x, gamma, quantized=quantized, h=h)
    normed = gather(_core.array(made.h)) if h else None
    copy = None
    if quantized:
        copy = jax.tree.map(gather, made.quantized.rowwise)
    elif config.order.then == "quantize":
        copy = _quantize(config, _core.array(normed))
    return normed, copy, made.extras[0]


def _behind(config: _Config, x: Array, gamma: Array):
    """Gathered rows normalised."""
    quantized, h = config.order.then == "quantized norm", "normed" in config.outputs
    made = _normalize(config, x, gamma, quantized=quantized, h=h)
    copy = made.quantized.rowwise if quantized else None
    found = jax.tree.map(config.rows.whole, (made.h, copy, made.extras[0]))
    normed, copy, rstd = found
    return normed, copy, config.rows.own(rstd)


def _normalize(config: _Config, x: Array, gamma: Array, *, quantized, h) -> Produced:
    gemm = config.gemm if quantized else dataclasses.replace(config.gemm, x=IDENTITY)
    scale, state = _scale(config, gamma), GemmState()
    return _core.normalize(
        gemm, config.norm, x, scale, None, state, backward=False, h=h
    )


def _quantize(config: _Config, normed: Array) -> ScaledTensor | None:
    """Gathered rows as codes."""
    copies = config.quantizer(
        normed, k_ndim=1, rowwise=True, colwise=False, impl=config.norm.impl
    )
    return jax.tree.map(config.rows.whole, copies.rowwise)


def _scale(config: _Config, gamma: Array) -> Array:
    """Adds weight_offset, but for the 1 that the kernels add themselves."""
    if config.offset in (0.0, 1.0):
        return gamma
    wide = _bits.as_float(_bits.flush(_bits.widen(gamma)))
    return wide + jnp.float32(config.offset)


def _forward_rule(config, x, gamma):
    x, gamma = x.value, gamma.value
    made, rstd = _forward(config, x, gamma)
    types = _core.Types((jax.typeof(x), jax.typeof(gamma), None))
    return made, (x, gamma, rstd, types)


def _backward_rule(config, res, cotangents):
    """Gradients of own rows, from what all devices of the group say of them."""
    x, gamma, rstd, types = res
    dnormed = _brought_back(config, cotangents.normed)
    dresidual = _brought_back(config, cotangents.residual)
    dx = dgamma = None
    if dnormed is not None:
        valid = config.rows.valid()
        if valid is not None:  # padding may hold NaN
            dims = (valid.shape[0], *[1] * (x.ndim - 1))
            x = jnp.where(valid.reshape(dims), x, jnp.ones((), x.dtype))
            rstd = jnp.where(valid.reshape(dims[:-1]), rstd, jnp.float32(1))
        dx, dgamma, _ = _core.norm_gradients(
            config.gemm, config.norm, dnormed, x, _scale(config, gamma), (rstd,), types
        )
    if dresidual is not None:
        dresidual = cotangent_like(dresidual, types[0])
        dx = dresidual if dx is None else dx + dresidual
    return dx, dgamma  # None: zeros


_rms_norm.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# An eager jax.shard_map knows no custom_vjp with symbolic zeros.
_gathered = jax.jit(_rms_norm, static_argnums=0)


def _brought_back(config: _Config, ct: Any) -> Array | None:
    """The cotangent of the rows before the gather; None where it is zero."""
    if ct is None or isinstance(ct, SymbolicZero):
        return None
    return config.rows.scatter(ct)


def _in_groups(config: _Config, outside: _row_mesh.Outside, x: Array, gamma: Array):
    """Groups are no sharding that JAX knows: each device's rows lie one behind another.

    The features are whole on each device.
    """
    spec = to_spec((*outside.cut[:-1], ()))
    fn = functools.partial(_gathered, config)
    return outside.on_devices(fn, (x, gamma), (spec, P(None)), spec)


def _of_shape(q: ScaledTensor | None, shape: tuple[int, ...]) -> ScaledTensor | None:
    """A packed format names its logical shape, which is one shard's before."""
    if q is None or q.logical_shape is None:
        return q
    return dataclasses.replace(q, logical_shape=shape)
