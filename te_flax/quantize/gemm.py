"""GEMM over arrays and ScaledTensors: dims in, orientation and scales out."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_flax.errors import message
from te_flax.ops import gemm as ops_gemm
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

Dims = Sequence[int]


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
            summed here.
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
        ValueError: dims that are no prefix or suffix, or differ in size; operands
            of two scalings.
        TypeError: both operands are e5m2.

    Example:
        >>> import jax.numpy as jnp
        >>> x, kernel = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> gemm(x, kernel, contracting_dims=((1,), (0,))).shape
        (2, 4)
    """
    lhs, rhs = _tensor(lhs), _tensor(rhs)
    sides = []
    for name, tensor, dims in zip(
        ("lhs", "rhs"), (lhs, rhs), contracting_dims, strict=True
    ):
        sides.append(_trailing(name, tensor, tuple(d % tensor.ndim for d in dims)))
    if lhs.scaling != rhs.scaling:
        raise ValueError(
            message(
                "gemm",
                "rhs",
                f"be scaled like lhs ({lhs.scaling})",
                rhs.scaling,
                "quantize both operands with the same recipe",
            )
        )
    # lhs "n" holds the contraction last, rhs "n" holds it first.
    orientation = ("n" if sides[0] else "t") + ("t" if sides[1] else "n")
    k_ndim = len(contracting_dims[0])
    lhs_batch = {d % lhs.ndim for d in batch_dims[0]}
    summed = {d % lhs.ndim for d in contracting_dims[0]}
    if out_dtype is None:
        out_dtype = lhs.data.dtype if lhs.scaling == "none" else jnp.float32
    return ops_gemm.gemm(
        lhs.data,
        rhs.data,
        orientation=orientation,
        lhs_scale_inv=lhs.scale,
        rhs_scale_inv=rhs.scale,
        bias=bias,
        k_ndim=k_ndim,
        keep_contraction=bool(lhs_batch) and lhs_batch >= summed,
        out_dtype=jnp.dtype(out_dtype).name,
        split_accumulator=split_accumulator,
        precision=precision,
        out_sharding=out_sharding,
        impl=impl,
    )


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
