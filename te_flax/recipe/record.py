"""Statistics of a layer's operands, written by the layer while somebody records."""

from typing import Any

import jax
import jax.numpy as jnp

from te_flax.quantize.statistics import RECORD_SIZE, Statistics, statistics
from te_flax.recipe.base import Recipe
from te_flax.recipe.state import (
    Fp8Record,
    Fp8RecordMailbox,
    Fp8State,
    Fp8Statistics,
    amax_axes,
)
from te_flax.typing import Array


def start_recording(fp8: Fp8Statistics) -> None:
    """Gives a layer's FP8 state variables for the statistics, NaN, and for their mail.

    Those of dy arrive as the mail's cotangent, through ``te.value_and_grad`` or
    ``te.absorb``, under every recipe.
    """
    dims = fp8.dy.shape[:-1]
    shape = (*dims, len(fp8.histories), len(Statistics._fields))
    fp8.record = Fp8Record(jnp.full(shape, jnp.nan, jnp.float32))
    mail = jnp.zeros((*dims, RECORD_SIZE), jnp.float32)
    fp8.record_mailbox = Fp8RecordMailbox(mail)


def stop_recording(fp8: Fp8Statistics) -> None:
    """Takes the variables away again."""
    for name in ("record", "record_mailbox"):
        if name in vars(fp8):
            delattr(fp8, name)


def record_operands(
    fp8: Fp8State,
    recipe: Recipe,
    *,
    x: Array | None = None,
    kernel: Array | None = None,
    k_ndim: int = 1,
    scales: Any = None,
) -> None:
    """Writes the statistics of a layer's x and kernel, if they are being recorded.

    A layer calls this under a recipe, with the operands of its GEMM as it quantizes
    them. While nobody records it does nothing and leaves nothing in the jaxpr; while
    somebody does, the operands are quantized once more, for the statistics.

    Args:
        fp8: the layer's FP8 state.
        recipe: that the layer follows in this call.
        x: ``[*batch, *in]``, or None if the layer never holds it (a fused norm).
        kernel: ``[*in, *out]``, or None.
        k_ndim: number of dims in ``in``.
        scales: ``Scales`` of the call, with x and kernel; None where every operand
            measures itself.

    Example:
        >>> from te_flax.recipe.current import Float8CurrentScaling
        >>> fp8 = Fp8State(amax_history_len=2)
        >>> start_recording(fp8)
        >>> record_operands(fp8, Float8CurrentScaling(), x=jnp.array([[2.0, 0.0]]))
        >>> float(fp8.record[0, 0])
        2.0
    """
    if fp8.record is None:
        return
    x, kernel, scales = jax.lax.stop_gradient((x, kernel, scales))
    axes = amax_axes(fp8)
    quantizers = recipe.quantizers()
    rows = [Statistics(), Statistics()]
    if x is not None:
        scale = None if scales is None else scales.x
        how = {"rowwise": True, "colwise": False, "scale": scale, "amax_axes": axes}
        rows[0] = statistics(x, quantizers.x(x, k_ndim=k_ndim, **how).rowwise, axes)
    if kernel is not None:
        scale = None if scales is None else scales.kernel
        rows[1] = kernel_statistics(recipe, kernel, k_ndim, scale, axes)
    values = jnp.stack([numbers.row() for numbers in rows])
    fp8.record[...] = fp8.record[...].at[: len(rows)].set(values)


def record_forward(fp8: Fp8Statistics, numbers: Array) -> None:
    """Writes what the forward pass of an attention has measured.

    Args:
        fp8: its FP8 state, while it is being recorded.
        numbers: float32 ``[5, 5]``, statistics of q, k, v, the probabilities and o.
    """
    record: Any = fp8.record
    held, numbers = jax.lax.stop_gradient((record[...], numbers))
    record[...] = held.at[..., 0, :].set(numbers)


def record_cotangent(record: Array, numbers: Statistics) -> Array:
    """A record with the statistics of dy, where such arrived.

    Args:
        record: float32 ``[..., histories, 5]``.
        numbers: of dy, float32 ``[...]`` each; NaN if nothing arrived.

    Returns:
        The record, the rows of the last history replaced.
    """
    old, new = record[..., -1, :], numbers.row()
    new = jnp.where(jnp.isnan(new[..., :1]), old, new)
    return record.at[..., -1, :].set(new)


def kernel_statistics(
    recipe: Recipe,
    kernel: Array,
    k_ndim: int,
    scale: Any = None,
    axes: tuple[str, ...] = (),
) -> Statistics:
    """The statistics of a kernel, quantized as the forward product reads it.

    Args:
        recipe: how it is quantized.
        kernel: ``[*in, *out]``.
        k_ndim: number of dims in ``in``.
        scale: the kernel's where it is known; None measures the kernel.
        axes: manual mesh axes over which it is sharded.

    Returns:
        Its statistics.
    """
    tensor = (
        recipe.quantizers()
        .kernel(
            kernel,
            k_ndim=kernel.ndim - k_ndim,
            rowwise=False,
            colwise=True,
            scale=scale,
            amax_axes=axes,
        )
        .colwise
    )
    return statistics(kernel, tensor, axes)
