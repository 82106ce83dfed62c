"""The GEMM ops: one per scaling of the operands, orientation, and bias.

Operands are never flattened outside the shard: a reshape would lose their sharding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from te_flax.ops import dequantize, gemm_cuda
from te_flax.ops._op import Case, KernelOp
from te_flax.ops._plan import MeshAxes, Plan
from te_flax.typing import FLOATS, FP8, Array

ORIENTATIONS = ("nn", "nt", "tn", "tt")
_FP8 = tuple(FP8.values())
_PRECISION = {"default": None, "high": "high", "highest": "highest"}
_WIDE = (*FLOATS, jnp.float64)  # float64 serves layers without a recipe under x64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """How the operands of a product are coded.

    Attributes:
        suffix: of the op's name.
        codes: dtypes that the operands may have.
        scales: dims of the scales of lhs and of rhs. What names only ``K`` stands
            where the operand has its contraction.
        scale: dtype of the scales.
        factors: names of the operands that multiply the sum, one after the other:
            the product of two scales could overflow.
        widen: of lhs and of rhs, ``(codes, scales, k_ndim, last) -> float32``, exact;
            ``last`` says whether the contraction comes last. None: an exact upcast.
        orientations: in which there are such products.
    """

    suffix: str
    codes: tuple
    scales: tuple[str, ...] = ()
    scale: Any = jnp.float32
    factors: tuple[str, ...] = ()
    widen: tuple[Callable[..., Array], Callable[..., Array]] | None = None
    orientations: tuple[str, ...] = ORIENTATIONS


def _mxfp8(data: Array, scale: Array, k_ndim: int, *, last: bool) -> Array:
    n = k_ndim if last else data.ndim - k_ndim
    return dequantize._dequantize_mxfp8(
        data, scale, k_ndim=n, out_dtype="float32", axis=int(last)
    )[0]


def _block(data: Array, scale: Array, k_ndim: int, *, last: bool, rows: int) -> Array:
    del last  # the copies for a contraction over the first dims are transposed
    return dequantize._dequantize_block(
        data, scale, k_ndim=k_ndim, out_dtype="float32", rows=rows
    )[0]


def _nvfp4(data: Array, scale: Array, k_ndim: int, *, last: bool, rows: int) -> Array:
    del last  # the copies for a contraction over the first dims are transposed
    values = dequantize._nvfp4_values(data, scale, k_ndim=k_ndim, rows=rows)
    return values.reshape(*data.shape[:-1], 2 * data.shape[-1])


_BLOCK_1D = functools.partial(_block, rows=1)
_BLOCK_2D = functools.partial(_block, rows=128)
_NVFP4_1D = functools.partial(_nvfp4, rows=1)
_NVFP4_2D = functools.partial(_nvfp4, rows=16)
_SCALE_INVS = ("lhs_scale_inv", "rhs_scale_inv")
# "_1d" and "_2d" tell how rhs is cut; lhs has blocks along the contraction alone.
SCALINGS = {
    "none": Scaling(suffix="", codes=_WIDE),
    "tensor": Scaling(
        suffix="_scaled", codes=_FP8, scales=("", ""), factors=_SCALE_INVS
    ),
    "mxfp8": Scaling(
        suffix="_mxfp8",
        codes=_FP8,
        scales=("K../32", "K../32"),
        scale=jnp.uint8,
        widen=(_mxfp8, _mxfp8),
    ),
    "block_1d": Scaling(
        suffix="_block",
        codes=_FP8,
        scales=("K../128", "K../128"),
        widen=(_BLOCK_1D, _BLOCK_1D),
        orientations=("nt",),
    ),
    "block_2d": Scaling(
        suffix="_block2d",
        codes=_FP8,
        scales=("K../128", "N../128 K../128"),
        widen=(_BLOCK_1D, _BLOCK_2D),
        orientations=("nt",),
    ),
    # K.. counts bytes of two codes; a half without one holds a zero.
    "nvfp4_1d": Scaling(
        suffix="_nvfp4",
        codes=(jnp.uint8,),
        scales=("K../8", "K../8"),
        scale=jnp.float8_e4m3fn,
        factors=("lhs_global_scale", "rhs_global_scale"),
        widen=(_NVFP4_1D, _NVFP4_1D),
        orientations=("nt",),
    ),
    "nvfp4_2d": Scaling(
        suffix="_nvfp4_2d",
        codes=(jnp.uint8,),
        scales=("K../8", "N../16 K../8"),
        scale=jnp.float8_e4m3fn,
        factors=("lhs_global_scale", "rhs_global_scale"),
        widen=(_NVFP4_1D, _NVFP4_2D),
        orientations=("nt",),
    ),
}


def _matrix(x: Array, k_ndim: int, last: bool) -> tuple[Array, int, tuple[int, ...]]:
    """Returns x as a matrix, the axis of its contraction, and the dims that remain.

    XLA's CPU backend lacks the product [k, m] x [k, a, n] in bfloat16.
    """
    split = x.ndim - k_ndim if last else k_ndim
    first, second = x.shape[:split], x.shape[split:]
    x = x.reshape(math.prod(first), math.prod(second))
    return x, int(last), first if last else second


def _reference(
    *arrays: Array,
    names: tuple[str, ...],
    orientation: str,
    scaling: str,
    k_ndim: int,
    out_dtype: str,
    split_accumulator: bool,
    precision: str,
    keep_contraction: bool,
) -> tuple[Array]:
    """Codes upcast exactly, one dot in float32, scales, bias, one cast."""
    del split_accumulator, keep_contraction  # exact anyway; a matter of sharding
    given, variant = dict(zip(names, arrays, strict=True)), SCALINGS[scaling]
    sides = []
    for i, name in enumerate(("lhs", "rhs")):
        data, last = given[name], orientation[i] == "nt"[i]
        if variant.widen:
            scale = given[f"{name}_scale_inv"]
            data = variant.widen[i](data, scale, k_ndim, last=last)
        elif scaling != "none":
            data = data.astype(jnp.float32)
        sides.append(_matrix(data, k_ndim, last))
    (lhs, i, rows), (rhs, j, columns) = sides
    acc = lax.dot_general(
        lhs,
        rhs,
        (((i,), (j,)), ((), ())),
        # "default" leaves it to jax_default_matmul_precision, as flax.nnx does.
        precision=_PRECISION[precision] if scaling == "none" else "highest",
        preferred_element_type=_accumulator(lhs),
    ).reshape(rows + columns)
    for name in variant.factors:
        acc = acc * given[name]
    if "bias" in given:
        acc = acc + given["bias"].astype(acc.dtype)
    return (acc.astype(out_dtype),)


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


def _case(operands: dict[str, str], dtypes: dict[str, tuple]) -> Case:
    """A small ragged call."""
    sizes = {"B..": (3, 5), "K..": (40,), "N..": (19,)}

    def dims(word: str) -> tuple[int, ...]:
        group, _, block = word.partition("/")
        whole = sizes[group]
        return (-(-math.prod(whole) // int(block)),) if block else whole

    shapes = [sum(map(dims, words.split()), ()) for words in operands.values()]
    first = {**dtypes, "bias": (jnp.float32,)}
    if jnp.float32 in dtypes["lhs"]:
        first |= dict.fromkeys(("lhs", "rhs"), (jnp.bfloat16,))
    attrs = {
        "k_ndim": 1,
        "out_dtype": "bfloat16",
        "split_accumulator": False,
        "precision": "highest",
        "keep_contraction": False,
    }
    kinds = tuple(first[name][0] for name in operands)
    return Case("ragged", tuple(shapes), kinds, attrs)


def _declare(orientation: str, scaling: str, with_bias: bool) -> KernelOp:
    variant = SCALINGS[scaling]
    sides = {
        "lhs": "B.. {}" if orientation[0] == "n" else "{} B..",
        "rhs": "{} N.." if orientation[1] == "n" else "N.. {}",
    }
    operands = {name: dims.format("K..") for name, dims in sides.items()}
    dtypes: dict[str, tuple] = dict.fromkeys(sides, variant.codes)
    for (name, dims), scale in zip(sides.items(), variant.scales, strict=False):
        only_k = scale.startswith("K")
        operands[f"{name}_scale_inv"] = dims.format(scale) if only_k else scale
        dtypes[f"{name}_scale_inv"] = (variant.scale,)
    for name in variant.factors:
        operands.setdefault(name, "")
        dtypes[name] = (jnp.float32,)
    if with_bias:
        operands["bias"] = "N.."
        dtypes["bias"] = _WIDE
    signature = ", ".join(f"{name}: {dims}" for name, dims in operands.items())
    fixed: dict[str, Any] = {"orientation": orientation, "scaling": scaling}
    named = {"names": tuple(operands), **fixed}
    return KernelOp(
        name=f"gemm_{orientation}{variant.suffix}{'_bias' if with_bias else ''}",
        signature=f"{signature} -> out: B.. N..",
        reference=functools.partial(_reference, **named),
        handler="gemm",
        handler_attrs={**fixed, "bias": with_bias},
        workspace=functools.partial(gemm_cuda.workspace, **named),
        supports=functools.partial(gemm_cuda.supports, **named),
        prefers_reference=gemm_cuda.prefers_reference,
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
        cases=(_case(operands, dtypes),),
    )


GEMMS = {
    (orientation, scaling, with_bias): _declare(orientation, scaling, with_bias)
    for scaling, variant in SCALINGS.items()
    for orientation in variant.orientations
    for with_bias in (False, True)
}
