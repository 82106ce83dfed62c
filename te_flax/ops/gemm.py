"""GEMM over two groups of dims: ``out[B.., N..] = sum_K lhs[B.., K..] rhs[K.., N..]``.

Operands are never flattened outside the shard: a reshape would lose their sharding.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from te_flax.errors import message
from te_flax.ops import dequantize
from te_flax.ops._op import Case, KernelOp, check_arrays
from te_flax.ops._plan import MeshAxes, Plan
from te_flax.typing import FLOATS, FP8, Array

ORIENTATIONS = ("nn", "nt", "tn", "tt")
SCALINGS = ("none", "tensor", "mxfp8")
PRECISIONS = ("default", "high", "highest")
BLOCK = 32
_FP8 = tuple(FP8.values())
_WIDE = (*FLOATS, jnp.float64)  # float64 serves layers without a recipe under x64


def _reference(
    lhs: Array,
    rhs: Array,
    *rest: Array,
    orientation: str,
    scaling: str,
    with_bias: bool,
    k_ndim: int,
    out_dtype: str,
    split_accumulator: bool,
    precision: str,
    keep_contraction: bool,
) -> tuple[Array]:
    """Codes upcast exactly, one dot in float32, scales, bias, one cast."""
    del split_accumulator, keep_contraction  # exact anyway; a matter of sharding
    if scaling == "mxfp8":
        lhs = _blocks_to_float(lhs, rest[0], k_ndim, last=orientation[0] == "n")
        rhs = _blocks_to_float(rhs, rest[1], k_ndim, last=orientation[1] == "t")
    elif scaling == "tensor":
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    first, last = range(k_ndim), lambda a: range(a.ndim - k_ndim, a.ndim)
    contract = (
        tuple(last(lhs) if orientation[0] == "n" else first),
        tuple(last(rhs) if orientation[1] == "t" else first),
    )
    acc = lax.dot_general(
        lhs,
        rhs,
        (contract, ((), ())),
        precision=precision if scaling == "none" else "highest",
        preferred_element_type=_accumulator(lhs),
    )
    if scaling == "tensor":  # the product of the two scales could overflow
        acc = (acc * rest[0]) * rest[1]
    if with_bias:
        acc = acc + rest[-1].astype(acc.dtype)
    return (acc.astype(out_dtype),)


def _blocks_to_float(data: Array, scale: Array, k_ndim: int, *, last: bool) -> Array:
    n = k_ndim if last else data.ndim - k_ndim
    return dequantize._dequantize_mxfp8(
        data, scale, k_ndim=n, out_dtype="float32", axis=int(last)
    )[0]


def _pin_contraction(plan: Plan) -> dict[str, MeshAxes]:
    """Contract shard by shard where both sides agree, or where the dims hold data.

    Anything else is gathered: an FSDP kernel as codes, before the product.
    """
    lhs, rhs = plan.given[:2]
    pinned: dict[str, MeshAxes] = {}
    for d in lhs:
        if d in rhs:
            a, b = lhs[d], rhs[d]
            taken = {x for axes in pinned.values() for x in axes}
            keep = a if a == b else (a or b) if plan.attrs["keep_contraction"] else ()
            pinned[d] = () if set(keep) & taken else keep
    return pinned


def _localize(plan: Plan, arrays, attrs: dict[str, Any], *, with_bias: bool):
    """A shard whose result is summed returns float32, and only one adds the bias."""
    summed = plan.summed(0)
    if not summed:
        return arrays, attrs
    if with_bias:
        bias = arrays[-1]
        own = lax.axis_index(summed) == 0
        arrays = (*arrays[:-1], jnp.where(own, bias, jnp.zeros_like(bias)))
    return arrays, {**attrs, "out_dtype": _accumulator(arrays[0])}


def _accumulator(lhs: Array) -> str:
    """The dtype of the sum: float32, or float64 for float64 operands."""
    return "float64" if lhs.dtype == jnp.float64 else "float32"


def _cases(orientation: str, scaling: str, with_bias: bool) -> tuple[Case, ...]:
    b, k, n = (3, 5), (40,), (19,)
    lhs = (*b, *k) if orientation[0] == "n" else (*k, *b)
    rhs = (*k, *n) if orientation[1] == "n" else (*n, *k)
    blocks = (-(-k[0] // BLOCK),)
    lhs_scale = (*b, *blocks) if orientation[0] == "n" else (*blocks, *b)
    rhs_scale = (*blocks, *n) if orientation[1] == "n" else (*n, *blocks)
    scales = {"none": (), "tensor": ((), ()), "mxfp8": (lhs_scale, rhs_scale)}[scaling]
    kind = jnp.float32 if scaling == "tensor" else jnp.uint8
    data = jnp.bfloat16 if scaling == "none" else jnp.float8_e4m3fn
    attrs = {
        "k_ndim": 1,
        "out_dtype": "bfloat16",
        "split_accumulator": False,
        "precision": "highest",
        "keep_contraction": False,
    }
    extra = ((n, jnp.float32),) if with_bias else ()
    return (
        Case(
            "ragged",
            (lhs, rhs, *scales, *(s for s, _ in extra)),
            (data, data, *(kind for _ in scales), *(t for _, t in extra)),
            attrs,
        ),
    )


def _declare(orientation: str, scaling: str, with_bias: bool) -> KernelOp:
    lhs = "B.. {}" if orientation[0] == "n" else "{} B.."
    rhs = "{} N.." if orientation[1] == "n" else "N.. {}"
    operands = [f"lhs: {lhs.format('K..')}", f"rhs: {rhs.format('K..')}"]
    dtypes: dict[str, tuple] = dict.fromkeys(
        ("lhs", "rhs"), _WIDE if scaling == "none" else _FP8
    )
    if scaling == "tensor":
        operands += ["lhs_scale_inv:", "rhs_scale_inv:"]
        dtypes |= dict.fromkeys(("lhs_scale_inv", "rhs_scale_inv"), (jnp.float32,))
    if scaling == "mxfp8":
        operands.append(f"lhs_scale_inv: {lhs.format(f'K../{BLOCK}')}")
        operands.append(f"rhs_scale_inv: {rhs.format(f'K../{BLOCK}')}")
        dtypes |= dict.fromkeys(("lhs_scale_inv", "rhs_scale_inv"), (jnp.uint8,))
    if with_bias:
        operands.append("bias: N..")
        dtypes |= {"bias": _WIDE}
    suffix = {"none": "", "tensor": "_scaled", "mxfp8": "_mxfp8"}[scaling]
    fixed = {"orientation": orientation, "scaling": scaling, "with_bias": with_bias}
    return KernelOp(
        name=f"gemm_{orientation}{suffix}{'_bias' if with_bias else ''}",
        signature=f"{', '.join(operands)} -> out: B.. N..",
        reference=functools.partial(_reference, **fixed),
        attrs={
            "k_ndim": int,
            "out_dtype": str,
            "split_accumulator": bool,
            "precision": str,
            "keep_contraction": bool,
        },
        groups={"K": "k_ndim"},
        dtypes=dtypes,
        reduce=("sum",),
        batch_group="B",
        partition=_pin_contraction,
        localize=functools.partial(_localize, with_bias=with_bias),
        cases=_cases(orientation, scaling, with_bias),
    )


GEMMS = {
    (orientation, scaling, with_bias): _declare(orientation, scaling, with_bias)
    for orientation in ORIENTATIONS
    for scaling in SCALINGS
    for with_bias in (False, True)
}


def gemm_op(orientation: str, scaling: str, bias: bool) -> KernelOp:
    """Returns the op of one variant.

    Args:
        orientation: of lhs and rhs, "n" or "t" each: lhs n ``[B.., K..]``, t
            ``[K.., B..]``; rhs n ``[K.., N..]``, t ``[N.., K..]``.
        scaling: "none", "tensor" or "mxfp8".
        bias: whether a bias is added.

    Returns:
        The op ``gemm_<orientation>[_scaled|_mxfp8][_bias]``.

    Raises:
        ValueError: there is no such variant.

    Example:
        >>> gemm_op("nt", "tensor", True).name
        'gemm_nt_scaled_bias'
    """
    allowed = {"orientation": ORIENTATIONS, "scaling": SCALINGS, "bias": (False, True)}
    given = {"orientation": orientation, "scaling": scaling, "bias": bias}
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
    lhs_scale_inv: Array | None = None,
    rhs_scale_inv: Array | None = None,
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

    ``out = ((lhs . rhs) * lhs_scale_inv) * rhs_scale_inv + bias``; under MXFP8 each
    block of 32 along the contraction has its own pair of scales.

    Args:
        lhs: ``[B.., K..]`` (n) or ``[K.., B..]`` (t); float32, bfloat16 or float16
            without scales, float8_e4m3fn or float8_e5m2 with them.
        rhs: ``[K.., N..]`` (n) or ``[N.., K..]`` (t).
        orientation: of lhs and rhs, "nn", "nt", "tn" or "tt".
        lhs_scale_inv: float32 ``[]``, or uint8 e8m0 bytes laid out like lhs with
            ``ceil(K / 32)`` in place of ``K..``.
        rhs_scale_inv: as lhs_scale_inv, for rhs.
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
    given = {k: v for k, v in (given | {"bias": bias}).items() if v is not None}
    check_arrays("gemm", lhs=lhs, rhs=rhs, **given)
    scaling = _scaling(lhs_scale_inv, rhs_scale_inv)
    _check_pair(lhs, rhs, scaling)
    if out_dtype is None:
        out_dtype = lhs.dtype.name if scaling == "none" else "float32"
    operands = (lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias)
    return gemm_op(orientation, scaling, bias is not None)(
        *(a for a in operands if a is not None),
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
