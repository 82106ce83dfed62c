"""GEMM over arrays and ScaledTensors: dims in, orientation and scales out."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_flax.errors import check_float64, message
from te_flax.ops import gemm as ops_gemm
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import FLOATS, Array

Dims = Sequence[int]
_TWO_D = {"block_2d": "block_1d", "nvfp4_2d": "nvfp4_1d"}  # of rhs -> of lhs


def gemm(
    lhs: Array | ScaledTensor,
    rhs: Array | ScaledTensor,
    *,
    contracting_dims: tuple[Dims, Dims],
    batch_dims: tuple[Dims, Dims] = ((), ()),
    bias: Array | None = None,
    out_dtype=None,
    split_accumulator: bool = False,
    precision: str = "default",
    out_sharding: PartitionSpec | None = None,
    impl: tuple | None = None,
) -> Array:
    """Multiplies two operands over their contracting dims, accumulating in float32.

    ``out = ((lhs . rhs) * scale_inv_lhs) * scale_inv_rhs + bias``; block scales enter
    the sum block by block.

    Args:
        lhs: array or ScaledTensor; its contracting dims must be its first or its
            last ones (the ones along which a ScaledTensor's copy was made).
        rhs: as ``lhs``.
        contracting_dims: dims of ``lhs`` and of ``rhs`` to sum over, pairwise equal.
        batch_dims: data dims of ``lhs`` and ``rhs``. They are no batched GEMM: their
            mesh axes are never gathered, and a sharded contraction over them is
            summed here. Either side may name them; all contracting dims or none.
        bias: ``[rhs dims that remain]``, added in float32.
        out_dtype: dtype of the result; None takes ``lhs``'s, float32 for codes.
        split_accumulator: whether FP8 partial sums move to float32 registers often
            (exact) or seldom (fast). The CPU is always exact.
        precision: of the product of unquantized operands: ``"default"``, ``"high"``
            or ``"highest"``.
        out_sharding: wanted of the result.
        impl: kernel rules; None reads the context.

    Returns:
        ``[lhs dims that remain, rhs dims that remain]`` of ``out_dtype``.

    Raises:
        ValueError: dims that do not exist, are no prefix or suffix, or differ in
            number or size; operands of two scalings.
        TypeError: both operands are e5m2; ``out_dtype`` is no float32, bfloat16 or
            float16; float64 while ``jax_enable_x64`` is off.

    Example:
        >>> import jax.numpy as jnp
        >>> x, kernel = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> gemm(x, kernel, contracting_dims=((1,), (0,))).shape
        (2, 4)
    """
    check_float64("gemm", lhs=lhs, rhs=rhs, bias=bias)
    lhs, rhs = _tensor(lhs), _tensor(rhs)
    summed = _pair("contracting_dims", lhs, rhs, contracting_dims)
    if len(summed[0]) != len(summed[1]):
        raise ValueError(
            message(
                "gemm",
                "contracting_dims",
                "name as many dims of lhs as of rhs",
                contracting_dims,
                "pair each dim of lhs with one of rhs",
            )
        )
    sides = [
        _trailing(name, tensor, dims)
        for name, tensor, dims in zip(("lhs", "rhs"), (lhs, rhs), summed, strict=True)
    ]
    scaling = _scaling(lhs, rhs)
    if out_dtype is None:
        out_dtype = lhs.data.dtype if scaling == "none" else jnp.float32
    if scaling == "mxfp6":  # no product takes the codes; bfloat16 holds their values
        lhs, rhs, scaling = lhs.values(impl=impl), rhs.values(impl=impl), "none"
    packed = scaling.startswith("nvfp4")
    if packed:
        _check_packed(lhs, rhs, summed)
    # lhs "n" holds the contraction last, rhs "n" holds it first.
    orientation = ("n" if sides[0] else "t") + ("t" if sides[1] else "n")
    keep = _keeps_contraction(summed, _pair("batch_dims", lhs, rhs, batch_dims))
    return ops_gemm.gemm(
        lhs.data,
        rhs.data,
        orientation=orientation,
        scaling=scaling,
        lhs_scale_inv=lhs.scale_like_data,
        rhs_scale_inv=rhs.scale_like_data,
        lhs_global_scale=lhs.global_scale,
        rhs_global_scale=rhs.global_scale,
        bias=bias,
        k_ndim=1 if packed else len(summed[0]),
        keep_contraction=keep,
        out_dtype=_out_dtype(out_dtype),
        split_accumulator=split_accumulator,
        precision=precision,
        out_sharding=out_sharding,
        impl=impl,
    )


def _scaling(lhs: ScaledTensor, rhs: ScaledTensor) -> str:
    """What the pair of operands asks of the op; 2-D blocks may stand on the right."""
    left, right = lhs.scaling, rhs.scaling
    if left != right and _TWO_D.get(right) != left:
        rule = f"be scaled like lhs ({left})"
        remedy = "quantize both operands with the same recipe"
        raise ValueError(message("gemm", "rhs", rule, right, remedy))
    if left in _TWO_D:
        rule = f"have blocks along its contraction alone ({_TWO_D[left]})"
        remedy = "put the operand with 2-D blocks on the right"
        raise ValueError(message("gemm", "lhs", rule, left, remedy))
    return right


def _check_packed(lhs: ScaledTensor, rhs: ScaledTensor, summed) -> None:
    """What the bytes of packed operands do not show."""
    sizes = [
        tuple(tensor.shape[d] for d in dims)
        for tensor, dims in zip((lhs, rhs), summed, strict=True)
    ]
    if sizes[0] != sizes[1]:
        rule, remedy = f"have contracted sizes {sizes[0]} like lhs", "check the shapes"
        raise ValueError(message("gemm", "rhs", rule, sizes[1], remedy))
    if lhs.hadamard != rhs.hadamard:
        rule = f"have hadamard={lhs.hadamard} like lhs"
        remedy = "transform both operands, or none"
        raise ValueError(message("gemm", "rhs", rule, rhs.hadamard, remedy))


def _pair(
    name: str, lhs: ScaledTensor, rhs: ScaledTensor, pair: tuple[Dims, Dims]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts both sides' dims from the front, after checking them."""
    if len(pair) != 2:
        rule, remedy = "hold the dims of lhs and those of rhs", "pass ((1,), (0,))"
        raise ValueError(message("gemm", name, rule, pair, remedy))
    found = []
    for side, tensor, dims in zip(("lhs", "rhs"), (lhs, rhs), pair, strict=True):
        n = tensor.ndim
        counted = tuple(d + n if d < 0 else d for d in dims)
        if any(not 0 <= d < n for d in counted) or len(set(counted)) != len(counted):
            rule = f"be different dims of {side}, which has {n}"
            remedy = "count them from 0, or from -1 at the end"
            raise ValueError(
                message("gemm", f"{name} of {side}", rule, tuple(dims), remedy)
            )
        found.append(counted)
    return found[0], found[1]


def _keeps_contraction(summed, batch) -> bool:
    """Whether the contracted dims hold data; they must do so all together."""
    named = [
        k in batch[0] or j in batch[1]
        for k, j in zip(summed[0], summed[1], strict=True)
    ]
    if any(named) and not all(named):
        rule = "name all of the contracting dims, or none of them"
        remedy = "contract the data dims in a product of their own"
        raise ValueError(message("gemm", "batch_dims", rule, batch, remedy))
    return any(named)


def _out_dtype(dtype) -> str:
    """The name of a dtype that a product may have."""
    allowed = [jnp.dtype(t).name for t in FLOATS]
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        allowed.append("float64")
    name = jnp.dtype(dtype).name
    if name not in allowed:
        rule, remedy = f"be {' or '.join(allowed)}", "cast or quantize the result"
        raise TypeError(message("gemm", "out_dtype", rule, name, remedy))
    return name


def _tensor(x: Array | ScaledTensor) -> ScaledTensor:
    return x if isinstance(x, ScaledTensor) else ScaledTensor(data=jnp.asarray(x))


def _trailing(name: str, tensor: ScaledTensor, dims: tuple[int, ...]) -> bool:
    """Whether ``tensor.data`` holds the logical ``dims`` last (True) or first."""
    n = len(dims)
    last = dims == tuple(range(tensor.ndim - n, tensor.ndim))
    first = dims == tuple(range(n))
    if tensor.scaling != "none":
        last, first = last and tensor.rowwise, first and not tensor.rowwise
        n_copy = tensor.k_ndim if tensor.rowwise else tensor.ndim - tensor.k_ndim
        last, first = last and n == n_copy, first and n == n_copy
    if not (last or first):
        raise ValueError(
            message(
                "gemm",
                f"contracting_dims of {name}",
                "be its first or its last dims, those its copy was made for",
                dims,
                "transpose the array, or quantize it in the other orientation",
            )
        )
    return last != tensor.transposed
