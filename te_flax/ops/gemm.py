"""GEMM over groups of dims: ``out[B.., N..] = sum_K lhs[B.., K..] rhs[K.., N..]``."""

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_flax.errors import message
from te_flax.ops._op import KernelOp, check_arrays
from te_flax.ops.gemm_variants import GEMMS, ORIENTATIONS, SCALINGS
from te_flax.typing import Array

PRECISIONS = ("default", "high", "highest")


def gemm_op(orientation: str, scaling: str, bias: bool) -> KernelOp:
    """Returns the op of one variant.

    Args:
        orientation: of lhs and rhs, "n" or "t" each: lhs n ``[B.., K..]``, t
            ``[K.., B..]``; rhs n ``[K.., N..]``, t ``[N.., K..]``.
        scaling: "none", "tensor", "mxfp8", "block_1d", "block_2d", "nvfp4_1d" or
            "nvfp4_2d".
        bias: whether a bias is added.

    Returns:
        The op ``gemm_<orientation>[_scaled|_mxfp8|_block|_block2d][_bias]``.

    Raises:
        ValueError: there is no such variant.

    Example:
        >>> gemm_op("nt", "tensor", True).name
        'gemm_nt_scaled_bias'
    """
    known = SCALINGS[scaling].orientations if scaling in SCALINGS else ORIENTATIONS
    allowed = {"scaling": SCALINGS, "orientation": known, "bias": (False, True)}
    given = {"scaling": scaling, "orientation": orientation, "bias": bias}
    for name, value in given.items():
        if value not in allowed[name]:
            rule = f"be one of {', '.join(map(str, allowed[name]))}"
            raise ValueError(message("gemm", name, rule, repr(value), "choose one"))
    return GEMMS[orientation, scaling, bias]


def gemm(
    lhs: Array,
    rhs: Array,
    *,
    orientation: str = "nn",
    scaling: str | None = None,
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
    lhs_global_scale: Array | None = None,
    rhs_global_scale: Array | None = None,
    bias: Array | None = None,
    k_ndim: int = 1,
    keep_contraction: bool = False,
    out_dtype: str | None = None,
    split_accumulator: bool = False,
    precision: str = "default",
    out_sharding: PartitionSpec | None = None,
    impl: tuple | None = None,
) -> Array:
    """Multiplies over ``K..``, accumulates in float32 and casts once.

    ``out = ((lhs . rhs) * lhs_scale_inv) * rhs_scale_inv + bias``; under block scalings
    the scales of a block multiply its elements instead.

    Args:
        lhs: ``[B.., K..]`` (n) or ``[K.., B..]`` (t); float32, bfloat16 or float16
            without scales, float8_e4m3fn or float8_e5m2 with them.
        rhs: ``[K.., N..]`` (n) or ``[N.., K..]`` (t).
        orientation: of lhs and rhs, "nn", "nt", "tn" or "tt".
        scaling: "none", "tensor", "mxfp8", or, in orientation "nt" only, "block_1d",
            "block_2d", "nvfp4_1d" and "nvfp4_2d" (how rhs is cut; lhs has blocks along
            ``K..`` alone); None takes one of the first three by the scales.
        lhs_scale_inv: float32 ``[]``; or laid out like lhs with one entry in place of
            ``K..`` for each 32 (uint8 e8m0 bytes), 128 (float32) or 8 (NVFP4, whose K
            counts bytes; float8_e4m3fn).
        rhs_scale_inv: as lhs_scale_inv, for rhs; under "block_2d" and "nvfp4_2d" one
            entry in place of ``N..`` too, for each 128 or 16.
        lhs_global_scale: float32 ``[]``, under NVFP4.
        rhs_global_scale: as lhs_global_scale, for rhs.
        bias: ``[N..]``, added in float32.
        k_ndim: number of dims in ``K..``.
        keep_contraction: ``K..`` holds data (tokens): its mesh axes are never gathered,
            a side that lacks them is cut, and the sum is taken here.
        out_dtype: name of the result's dtype; None takes lhs's, float32 for codes.
        split_accumulator: whether FP8 partial sums move to float32 registers often
            (exact) or seldom (fast); the CPU is always exact.
        precision: "default", "high" or "highest", of operands without scales.
        out_sharding: wanted of the result; a summed axis on one of its dims makes the
            sum a psum_scatter.
        impl: kernel rules; None reads the context.

    Returns:
        ``[B.., N..]`` of ``out_dtype``.

    Raises:
        ValueError: shapes or an option do not fit.
        TypeError: a dtype does not fit, the two operands differ without scales, or
            both are e5m2.

    Example:
        >>> gemm(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
        (2, 4)
    """
    if precision not in PRECISIONS:
        rule = f"be one of {', '.join(PRECISIONS)}"
        raise ValueError(
            message("gemm", "precision", rule, repr(precision), "choose one")
        )
    given = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    given |= {"lhs_global_scale": lhs_global_scale}
    given |= {"rhs_global_scale": rhs_global_scale, "bias": bias}
    given = {k: v for k, v in given.items() if v is not None}
    check_arrays("gemm", lhs=lhs, rhs=rhs, **given)
    scaling = scaling or _scaling(lhs_scale_inv, rhs_scale_inv)
    _check_pair(lhs, rhs, scaling)
    if out_dtype is None:
        out_dtype = lhs.dtype.name if scaling == "none" else "float32"
    return gemm_op(orientation, scaling, bias is not None)(
        *(lhs, rhs, *given.values()),
        k_ndim=k_ndim,
        out_dtype=jnp.dtype(out_dtype).name,
        split_accumulator=split_accumulator,
        precision=precision,
        keep_contraction=keep_contraction,
        out_sharding=out_sharding,
        impl=impl,
    )[0]


def _scaling(lhs_scale_inv: Array | None, rhs_scale_inv: Array | None) -> str:
    if (lhs_scale_inv is None) != (rhs_scale_inv is None):
        missing = "lhs_scale_inv" if lhs_scale_inv is None else "rhs_scale_inv"
        remedy = "pass the scales of both operands or of none"
        raise ValueError(message("gemm", missing, "be given too", None, remedy))
    if lhs_scale_inv is None:
        return "none"
    return "tensor" if lhs_scale_inv.dtype == jnp.float32 else "mxfp8"


def _check_pair(lhs: Array, rhs: Array, scaling: str) -> None:
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
        remedy = "quantize one operand to e4m3"
        rule = "not be e5m2 like lhs"
        raise TypeError(message("gemm", "rhs", rule, rhs.dtype, remedy))
    if scaling == "none" and lhs.dtype != rhs.dtype:
        rule = f"have dtype {lhs.dtype} like lhs"
        raise TypeError(message("gemm", "rhs", rule, rhs.dtype, "cast it first"))
