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
from te_flax.ops._gather_order import ORDERS, Order
from te_flax.ops._op import cotangent_like
from te_flax.quantize.fused import Produced
from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.quantize.quantizer import Quantizer
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

QUANTIZERS: dict[str, Quantizer] = {"mxfp8": MXFP8Quantizer()}


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
    outside: _row_mesh.Outside | None

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
        quantize: "mxfp8": e4m3 codes and e8m0 scales ``[.., features / 32]``.
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
    mesh, manual = _row_mesh.find(_gather_checks.WHERE, x, axis)
    size, shard, outside = mesh.shape[axis], x.shape[0], None
    if not manual:
        whole = group_size in (None, size)
        outside = _row_mesh.outside(_gather_checks.WHERE, x, mesh, axis, whole)
        shard = _gather_checks.shard_rows(x, outside.cuts)
    config = _Config(
        rows=_gather_checks.rows(axis, size, shard, group_size, rows),
        norm=norm,
        offset=float(weight_offset),
        quantizer=IDENTITY if quantize is None else QUANTIZERS[quantize],
        outputs=wanted,
        order=ORDERS[wanted],
        outside=outside,
    )
    made = _gathered(config, x, gamma)
    count = jax.tree.leaves(made)[0].shape[0]
    return made._replace(quantized=_of_shape(made.quantized, (count, *x.shape[1:])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(config: _Config, x: Array, gamma: Array) -> GatheredNorm:
    return _forward(config, x, gamma)[0]


def _forward(config: _Config, x: Array, gamma: Array):
    """The results, and 1 / sqrt(..) of the device's own rows where there is a norm."""
    fn = functools.partial(_on_device, config)
    if config.outside is None:
        return fn(x, gamma)
    rows, gathered = config.outside.rows, config.outside.gathered
    out = gathered, P(*rows[:-1])
    return config.outside.run(fn, (x, gamma), (rows, P(None)), out)


def _on_device(config: _Config, x: Array, gamma: Array):
    rows, order = config.rows, config.order
    quantized = "quantized" in config.outputs
    if order.first:
        made = _normalize(config, x, gamma, "quantized" in order.first, True)
        (rstd,) = made.extras
        if order.first == "norm":
            normed = rows.gather(_core.array(made.h))
            copy = _quantize(config, normed) if quantized else None
            return GatheredNorm(normed, copy, None), rstd
        copy = jax.tree.map(rows.gather, made.quantized.rowwise)
        return GatheredNorm(None, copy, None), rstd
    whole = rows.gather(x)
    if not order.then:
        return GatheredNorm(None, None, whole), None
    made = _normalize(config, whole, gamma, quantized, "normed" in config.outputs)
    copy = made.quantized.rowwise if quantized else None
    return GatheredNorm(made.h, copy, whole), rows.own(made.extras[0])


def _normalize(config: _Config, x: Array, gamma: Array, quantized, h) -> Produced:
    gemm = config.gemm if quantized else dataclasses.replace(config.gemm, x=IDENTITY)
    scale, state = _scale(config, gamma), GemmState()
    return _core.normalize(
        gemm, config.norm, x, scale, None, state, backward=False, h=h
    )


def _quantize(config: _Config, normed: Array) -> ScaledTensor | None:
    return config.quantizer(
        normed, k_ndim=1, rowwise=True, colwise=False, impl=config.norm.impl
    ).rowwise


def _scale(config: _Config, gamma: Array) -> Array:
    """Adds weight_offset, but for the 1 that the kernels add themselves."""
    if config.offset in (0.0, 1.0):
        return gamma
    return gamma.astype(jnp.float32) + jnp.float32(config.offset)


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
        valid = config.rows.counts(whole=config.outside is not None)
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
    zeros = functools.partial(_zeros, types)
    return zeros(0) if dx is None else dx, zeros(1) if dgamma is None else dgamma


_gathered.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _zeros(types: tuple, i: int) -> Any:
    aval = types[i]
    return cotangent_like(jnp.zeros(aval.shape, aval.dtype), aval)


def _brought_back(config: _Config, ct: Any) -> Array | None:
    """The cotangent of own rows, summed over the group; None if it is zero."""
    if ct is None or isinstance(ct, SymbolicZero):
        return None
    rows, outside = config.rows, config.outside
    if outside is None:
        return rows.scatter(ct)
    fn = rows.scatter
    if rows.group == rows.size:  # one array for all devices: nothing to sum
        ct, fn = rows.spread(ct), lambda a: a
    in_spec = outside.rows
    return outside.run(fn, (ct,), (in_spec,), outside.rows)


def _of_shape(q: ScaledTensor | None, shape: tuple[int, ...]) -> ScaledTensor | None:
    """A packed format names its logical shape, which is one shard's before."""
    if q is None or q.logical_shape is None:
        return q
    return dataclasses.replace(q, logical_shape=shape)
