"""A function's result as the quantized operand of a GEMM, in as few passes as go."""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from te_flax.ops._fused import Family, Variant
from te_flax.ops.activation import QUANTIZE_DBIAS
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.mxfp8 import MXFP8Quantizer
from te_flax.quantize.per_tensor import TensorQuantizer
from te_flax.quantize.quantizer import Quantized, Quantizer, Scale
from te_flax.typing import Array, wider


class Produced(NamedTuple):
    """What :func:`produce` returns.

    Attributes:
        quantized: the copies asked for, and the amax where it was measured.
        h: the function's result itself, where asked for.
        dbias: its sum over the tokens, float32 ``[K..]``, where asked for.
        extras: the family's own results.
    """

    quantized: Quantized
    h: Array | None
    dbias: Array | None
    extras: tuple[Array, ...]


def produce(
    quantizer: Quantizer,
    family: Family,
    *arrays: Array,
    k_ndim: int,
    rowwise: bool,
    colwise: bool,
    out_dtype: str,
    scale: Scale | None = None,
    h: bool = False,
    dbias: bool = False,
    amax_axes: tuple[str, ...] = (),
    key: Array | None = None,
    impl: tuple | None = None,
    **attrs: Any,
) -> Produced:
    """Runs a function and quantizes its result.

    One pass where the scales are known beforehand (delayed scaling) or local (MXFP8);
    current scaling takes the amax from the function's pass and reads h once more;
    other quantizers, and MXFP8 with values that the family does not make, read h.

    Args:
        quantizer: of the result.
        family: the function.
        *arrays: its operands.
        k_ndim: number of dims in its ``K..``.
        rowwise: whether the copy to contract over ``K..`` is needed.
        colwise: whether the copy to contract over the tokens is needed.
        out_dtype: that h is rounded to.
        scale: of h under tensor scaling, where it is known; None measures h.
        h: whether h itself is needed.
        dbias: whether its sum over the tokens is.
        amax_axes: manual mesh axes over which an amax is the maximum.
        key: random key of a quantizer that rounds stochastically.
        impl: kernel rules; None reads the context.
        **attrs: attributes of the function.

    Returns:
        The copies and what else was asked for.
    """
    call = {"k_ndim": k_ndim, "out_dtype": out_dtype, "impl": impl, **attrs}
    whole = k_ndim + bool(family.dim)
    copies = ("row",) * rowwise + ("col",) * colwise
    fused = _mxfp8_variant(quantizer, family, copies, h, dbias)
    if isinstance(quantizer, MXFP8Quantizer) and fused:
        made = family(fused, *arrays, format=quantizer.format, **call)
        measured = reduce_amax(made.amax, amax_axes)
        row = quantizer.tensor(made.row, made.row_scale, True, whole)
        col = quantizer.tensor(made.col, made.col_scale, False, whole)
    elif isinstance(quantizer, TensorQuantizer) and scale is not None:
        v = Variant("tensor", copies, h, dbias)
        made = family(v, *arrays, scale=scale.scale, format=quantizer.format, **call)
        measured = reduce_amax(made.amax, amax_axes)
        row = quantizer.tensor(made.row, scale.scale_inv, True, whole)
        col = quantizer.tensor(made.col, scale.scale_inv, False, whole)
    else:
        return _apart(
            quantizer,
            family,
            *arrays,
            how={"rowwise": rowwise, "colwise": colwise, "k_ndim": whole, "key": key},
            dbias=dbias,
            amax_axes=amax_axes,
            **call,
        )
    return Produced(Quantized(row, col, measured), made.h, made.dbias, made.extras)


def _mxfp8_variant(
    quantizer: Quantizer, family: Family, copies: tuple[str, ...], h: bool, dbias: bool
) -> Variant | None:
    """The variant that quantizes to MXFP8 in the function's pass, if there is one."""
    if not isinstance(quantizer, MXFP8Quantizer):
        return None
    values = tuple(copy for copy in copies if copy in quantizer.values)
    v = Variant("mxfp8", copies, h, dbias, values=values)
    return v if v in family.ops else None


def _apart(
    quantizer: Quantizer,
    family: Family,
    *arrays: Array,
    how: dict[str, Any],
    dbias: bool,
    amax_axes: tuple[str, ...],
    impl: tuple | None,
    **call: Any,
) -> Produced:
    """The function first, then the quantizer reads its result."""
    if any(a.dtype == jnp.float64 for a in arrays):  # plain JAX: layers without recipe
        call.pop("out_dtype")
        h, *extras = family.compute(*arrays, **call)
        sums = token_sum(h, how["k_ndim"]) if dbias else None
        return Produced(quantizer(h, **how), h, sums, tuple(extras))
    made = family(Variant(dbias=dbias), *arrays, impl=impl, **call)
    measured = None
    if isinstance(quantizer, TensorQuantizer):
        measured = reduce_amax(made.amax, amax_axes)
        how = how | {"scale": quantizer.scale(measured[0], impl=impl)}
    copies = quantizer(cast(Array, made.h), amax_axes=amax_axes, impl=impl, **how)
    if measured is not None:
        copies = copies._replace(amax=measured)
    return Produced(copies, made.h, made.dbias, made.extras)


def quantize_dbias(
    quantizer: Quantizer,
    x: Array,
    *,
    k_ndim: int,
    rowwise: bool,
    colwise: bool,
    scale: Scale | None = None,
    dbias: bool = True,
    amax_axes: tuple[str, ...] = (),
    key: Array | None = None,
    impl: tuple | None = None,
) -> Produced:
    """Quantizes ``x`` and sums it over the tokens, in one pass where that exists.

    Args:
        quantizer: of ``x``.
        x: ``[M.., K..]``.
        k_ndim: number of dims in ``K..``.
        rowwise: whether the copy to contract over ``K..`` is needed.
        colwise: whether the copy to contract over the tokens is needed.
        scale: of ``x`` under tensor scaling, where it is known; None measures ``x``.
        dbias: whether the sum is needed.
        amax_axes: manual mesh axes over which an amax is the maximum.
        key: random key of a quantizer that rounds stochastically.
        impl: kernel rules; None reads the context.

    Returns:
        The copies and the sum; ``h`` is ``x``.
    """
    how: dict[str, Any] = {
        "k_ndim": k_ndim,
        "rowwise": rowwise,
        "colwise": colwise,
        "amax_axes": amax_axes,
        "impl": impl,
    }
    copies = ("row",) * rowwise + ("col",) * colwise
    fused = _mxfp8_variant(quantizer, QUANTIZE_DBIAS, copies, False, True)
    if dbias and (fused or isinstance(quantizer, TensorQuantizer)):
        measured = None
        if scale is None and isinstance(quantizer, TensorQuantizer):
            scale, measured = quantizer.measure(x, amax_axes, impl=impl)
        out = {"out_dtype": x.dtype.name, "scale": scale, "dbias": True}
        made = produce(quantizer, QUANTIZE_DBIAS, x, **how, **out)
        if measured is not None:
            made = made._replace(quantized=made.quantized._replace(amax=measured))
        return made._replace(h=x)
    sums = token_sum(x, k_ndim) if dbias else None
    return Produced(quantizer(x, scale=scale, key=key, **how), x, sums, ())


def token_sum(x: Array, k_ndim: int) -> Array:
    """Sums over the leading dims, in float32 at least."""
    wide = wider(x.dtype, jnp.float32)
    return jnp.sum(x.astype(wide), tuple(range(x.ndim - k_ndim)))
