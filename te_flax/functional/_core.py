"""The passes around one GEMM that all functionals share.

Forward: an operand, straight from x or through a norm or an activation, times the
kernel. Backward: one quantized dy, read by the two gradient GEMMs.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from te_flax.functional import _gather
from te_flax.functional.config import (
    IDENTITY,
    DenseConfig,
    GemmState,
    NormConfig,
)
from te_flax.ops._op import cotangent_like
from te_flax.ops.norm import NORM_BWD, NORM_FWD
from te_flax.quantize.fused import Produced, produce, quantize_dbias
from te_flax.quantize.gemm import gemm
from te_flax.quantize.mailbox import MAILBOX_SIZE, encode
from te_flax.quantize.quantizer import Quantized, Scale
from te_flax.quantize.statistics import encode_statistics
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array, wider


@jax.tree_util.register_static
class Types(tuple):
    """Types of the operands, static among the residuals."""


class GemmResiduals(NamedTuple):
    """What the backward pass of one GEMM reads: one copy of each operand.

    Under a recipe that is one byte an element plus the scales:
    ``M K (1 + s) + K N (1 + s)`` with s = 0 (tensor scaling, plus 4 bytes a tensor) or
    1/32 (MXFP8).
    """

    x: ScaledTensor
    kernel: ScaledTensor
    dy_scale: Scale | None
    key: Array | None


def quantize_input(
    config: DenseConfig, x: Array, k_ndim: int, state: GemmState, *, backward: bool
) -> Produced:
    """Quantizes x itself."""
    copies = _gather.x_quantizer(config, x, k_ndim)(
        x,
        k_ndim=k_ndim,
        rowwise=True,
        colwise=backward,
        scale=state.scales.x,
        amax_axes=config.amax_axes,
        impl=config.impl,
    )
    return Produced(copies, None, None, ())


def normalize_input(
    config: DenseConfig,
    norm: NormConfig | None,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    state: GemmState,
    *,
    backward: bool,
    h: bool,
) -> Produced:
    """Quantizes the norm of x over its last dim, or x itself without a norm."""
    if norm is None:
        made = quantize_input(config, x, 1, state, backward=backward)
        return made._replace(h=x)
    made = normalize(
        config, norm, x, cast(Array, scale), bias, state, backward=backward, h=h
    )
    # With the copies saved, these alone would make a policy run the norm again.
    stats = (checkpoint_name(a, config.checkpoint_name) for a in made.extras)
    return made._replace(extras=tuple(stats))


def normalize(
    config: DenseConfig,
    norm: NormConfig,
    x: Array,
    scale: Array,
    bias: Array | None,
    state: GemmState,
    *,
    backward: bool,
    h: bool,
) -> Produced:
    """Runs the norm over the last dim of x, quantized for the GEMM behind it."""
    parameters = (scale,) if norm.kind == "rmsnorm" else (scale, bias)
    return produce(
        _gather.x_quantizer(config, x, 1),
        NORM_FWD[norm.kind],
        x,
        *(jnp.asarray(p) for p in parameters),
        k_ndim=1,
        rowwise=True,
        colwise=backward,
        scale=state.scales.x,
        h=h,
        out_dtype=norm.out_dtype or x.dtype.name,
        amax_axes=config.amax_axes,
        impl=config.impl,
        epsilon=norm.epsilon,
        zero_centered_gamma=norm.zero_centered_gamma,
    )


def multiply(
    config: DenseConfig,
    x: Quantized,
    kernel: Array,
    bias: Array | None,
    k_ndim: int,
    state: GemmState,
    out_dtype: str,
    *,
    backward: bool,
) -> tuple[Array, Array | None, Any]:
    """Computes ``y = x . kernel + bias``.

    Returns:
        y, the kernel's amax where it was measured, and GemmResiduals or None.
    """
    n_ndim = kernel.ndim - k_ndim
    copies = state.kernel
    if copies is None:
        copies = config.kernel(
            kernel,
            k_ndim=n_ndim,
            rowwise=backward,
            colwise=True,
            scale=state.scales.kernel,
            amax_axes=config.amax_axes,
            impl=config.impl,
        )
    route = _gather.x_route(config)
    rowwise = _named(config, _gather.travel(cast(ScaledTensor, x.rowwise), route))
    rowwise = _gather.values_of(rowwise, config.x, config.impl)
    ndim = rowwise.ndim
    y = gemm(
        rowwise,
        _named(config, copies.colwise),
        contracting_dims=(range(ndim - k_ndim, ndim), range(k_ndim)),
        bias=bias,
        out_dtype=out_dtype,
        split_accumulator=config.split_accumulator[0],
        precision=config.precision,
        out_sharding=config.out_sharding,
        impl=config.impl,
    )
    if not backward:
        return y, copies.amax, None
    saved = GemmResiduals(
        _named(config, x.colwise),
        _named(config, copies.rowwise),
        state.scales.dy,
        state.key,
    )
    return y, copies.amax, saved


def quantize_cotangent(
    config: DenseConfig,
    res: GemmResiduals,
    dy: Array,
    n_ndim: int,
    x_type: Any,
    *,
    dbias: bool,
) -> Produced:
    """Quantizes dy for both gradient GEMMs, with its sum over the tokens if wanted."""
    quantizer, colwise = _gather.dy_quantizer(config, x_type, dy, n_ndim)
    return quantize_dbias(
        quantizer,
        dy,
        k_ndim=n_ndim,
        rowwise=True,
        colwise=colwise,
        scale=res.dy_scale,
        dbias=dbias,
        amax_axes=config.amax_axes,
        key=shard_key(res.key, dy),
        impl=config.impl,
    )


def gradients(
    config: DenseConfig, res: GemmResiduals, dy: Quantized, k_ndim: int, x_type, k_type
) -> tuple[Array, Array]:
    """Computes ``dx = dy . kernel^T`` and ``dkernel = x^T . dy`` from one dy."""
    n_ndim = k_type.ndim - k_ndim
    rowwise, colwise = _gather.dy_copies(config, dy, x_type, n_ndim)
    x = _gather.travel(res.x, _gather.x_route(config))
    x = _like(x, colwise, config)
    kernel = _like(res.kernel, rowwise, config)
    options: dict[str, Any] = {"precision": config.precision, "impl": config.impl}
    ndim = rowwise.ndim
    tokens = range(ndim - n_ndim)
    dx = gemm(
        rowwise,
        kernel,
        contracting_dims=(range(len(tokens), ndim), range(k_ndim, k_type.ndim)),
        out_dtype=x_type.dtype,
        split_accumulator=config.split_accumulator[1],
        out_sharding=wanted(x_type),
        **options,
    )
    dkernel = gemm(
        x,
        colwise,
        contracting_dims=(tokens, tokens),
        batch_dims=(tokens, tokens),
        out_dtype=k_type.dtype,
        split_accumulator=config.split_accumulator[2],
        out_sharding=wanted(k_type),
        **options,
    )
    return dx, cotangent_like(dkernel, k_type)


def norm_gradients(
    config: DenseConfig,
    norm: NormConfig,
    dh: Array,
    x: Array,
    scale: Array,
    stats: tuple[Array, ...],
    types: tuple,
) -> tuple[Array, Array, Array | None]:
    """Computes the gradients of x and of the norm's parameters.

    Args:
        config: of the GEMM that the norm feeds; its kernel rules count.
        norm: the norm.
        dh: cotangent of its result.
        x: its input.
        scale: its gamma.
        stats: what the forward pass returned.
        types: of x, gamma and beta (None without).
    """
    made = produce(
        IDENTITY,
        NORM_BWD[norm.kind],
        dh,
        x,
        scale,
        *stats,
        k_ndim=1,
        rowwise=True,
        colwise=False,
        out_dtype=x.dtype.name,
        impl=config.impl,
        zero_centered_gamma=norm.zero_centered_gamma,
    )
    x_type, scale_type, bias_type = types
    dx = cotangent_like(made.h, x_type)
    dscale = cotangent_like(made.extras[0], scale_type)
    if bias_type is None:
        return dx, dscale, None
    return dx, dscale, cotangent_like(made.extras[1], bias_type)


def shard_key(key: Array | None, dy: Array) -> Array | None:
    """A key of its own for each shard of dy inside ``jax.shard_map``."""
    if key is not None:
        for axis in sorted(jax.typeof(dy).mat.varying):
            key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def mail_types(state: GemmState) -> tuple:
    """The types of what carries numbers out of the backward pass, None without."""
    return type_of(state.mailbox), type_of(state.record)


def state_cotangent(config: DenseConfig, made: Produced, types: tuple) -> GemmState:
    """Of a GemmState: amax(dy) and the statistics of dy where they are asked for.

    Args:
        config: of the GEMM.
        made: dy as ``h``, needed while its statistics are recorded, and its copies.
        types: as from :func:`mail_types`.
    """
    mail_type, record_type = types
    none: Any = None  # a cotangent of zeros for a whole subtree
    mail = record = none
    if mail_type is not None:
        mail = jnp.zeros(MAILBOX_SIZE, jnp.float32)
        if config.report_dy and made.quantized.amax is not None:
            mail = encode(made.quantized.amax)
        mail = cotangent_like(mail, mail_type)
    if record_type is not None:
        dy, copy = cast(Array, made.h), made.quantized.rowwise
        if copy is not None and copy.holds_values:  # codes show what was lost
            how = {"k_ndim": copy.k_ndim, "rowwise": True, "colwise": False}
            quantizer = _gather.codes_alone(config.dy)
            copy = quantizer(dy, impl=config.impl, **how).rowwise
        record = encode_statistics(dy, copy, config.amax_axes, config.impl)
        record = cotangent_like(record, record_type)
    return GemmState(none, mail, none, none, record)


def add(a: Array, b: Array) -> Array:
    """Adds two cotangents in the wider of their dtypes."""
    dtype = wider(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def cotangent(ct: Array | None, primal: Any) -> Any:
    """A cotangent with the type of its primal (or of that type); None stays None."""
    return None if primal is None or ct is None else cotangent_like(ct, primal)


def array(x: Array | None) -> Any:
    """A JAX array; None stays None."""
    return None if x is None else jnp.asarray(x)


def type_of(x: Array | None) -> Any:
    """The type that a cotangent of ``x`` must have; None stays None."""
    return None if x is None else jax.typeof(x)


def type_after(norm: NormConfig | None, x_type: Any) -> Any:
    """The type of the norm's result, and so of its cotangent."""
    if norm is None or norm.out_dtype is None:
        return x_type
    return x_type.update(dtype=jnp.dtype(norm.out_dtype))


def wanted(aval) -> PartitionSpec | None:
    """The sharding that a gradient should arrive in, where the type says it."""
    spec = aval.sharding.spec
    return spec if any(s is not None for s in spec) else None


def _like(saved: ScaledTensor, other: ScaledTensor, config: DenseConfig):
    """Saved codes as the values that the other operand of their product holds."""
    if saved.scaling == "none" or not other.holds_values:
        return saved
    return saved.values(other.data.dtype, impl=config.impl)


def _named(config: DenseConfig, x: ScaledTensor | None) -> ScaledTensor:
    """The copy under the name that checkpoint policies know."""
    x = cast(ScaledTensor, x)
    if x.format is None:
        return x
    return jax.tree.map(lambda a: _name(a, config.checkpoint_name), x)


def _name(a: Array, name: str) -> Array:
    """Names an array, FP8 by its bytes: what is saved gets rounded, 448 to infinity."""
    if a.dtype.itemsize > 1:
        return checkpoint_name(a, name)
    codes = checkpoint_name(lax.bitcast_convert_type(a, jnp.uint8), name)
    return lax.bitcast_convert_type(codes, a.dtype)
