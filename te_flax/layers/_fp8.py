"""From a recipe and a layer's FP8 state to the arguments of a functional, and back."""

from typing import Any

import jax

from te_flax.functional.attention.fp8 import AttentionConfig, AttentionState
from te_flax.functional.config import DenseConfig, GemmState, Quantized, Scale, Scales
from te_flax.recipe.attention import Fp8AttentionState, attention_quantizers
from te_flax.recipe.base import Recipe
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.record import record_forward
from te_flax.recipe.state import Fp8KernelCache, Fp8State, Fp8Statistics, amax_axes
from te_flax.typing import Array


def gemm_config(recipe: Recipe | None, fp8: Fp8State, **common: Any) -> DenseConfig:
    """The static configuration of a GEMM under a recipe, read at the call."""
    if recipe is None:
        return DenseConfig(**common)
    delayed = isinstance(recipe, DelayedScaling)
    return DenseConfig(
        **recipe.operands()._asdict(),
        split_accumulator=recipe.split_accumulator,
        amax_axes=amax_axes(fp8),
        report_dy=delayed and not fp8.use_running_average,
        **common,
    )


def gemm_state(recipe: Recipe | None, fp8: Fp8State) -> GemmState:
    """The arrays that a recipe asks for.

    Scales and mailbox under delayed scaling, a key where dy is rounded stochastically,
    the kernel's copies where ``te.cache_quantized`` made them, a mailbox for the
    statistics of dy while ``te.record`` is entered.
    """
    if recipe is None:
        return GemmState()
    state = GemmState(kernel=cached_kernel(fp8), record=_record_mailbox(fp8))
    if getattr(recipe.quantizers().dy, "stochastic", False):
        state = state._replace(key=fp8.rounding_key())
    if not isinstance(recipe, DelayedScaling):
        return state
    # Without somebody who fills its history dy must measure itself.
    x, kernel, dy = fp8.scales(recipe)
    scales = Scales(x, kernel, dy if fp8.tracked else None)
    return state._replace(scales=scales, mailbox=fp8.mailbox[...])


def push(
    recipe: Recipe | None, fp8: Fp8State, amaxes: tuple[Array | None, Array | None]
) -> None:
    """Pushes the amaxes of a forward call; only delayed scaling keeps them."""
    x, kernel = amaxes
    if not isinstance(recipe, DelayedScaling):
        return
    fp8.push(x, kernel if fp8.kernel_cache is None else None)


def attention_fp8(
    recipe: Recipe | None, fp8: Fp8AttentionState
) -> tuple[AttentionConfig, AttentionState] | None:
    """The ``fp8=`` of ``te.dot_product_attention`` under a recipe; None for none."""
    if not isinstance(recipe, DelayedScaling) or not fp8.scaled_by(recipe):
        return None
    quantizers = attention_quantizers(recipe)
    config = AttentionConfig(
        forward=quantizers.x,
        backward=quantizers.dy,
        amax_axes=amax_axes(fp8),
        report=not fp8.use_running_average,
    )
    forward, backward = fp8.scales(recipe)
    # Without somebody who fills their history the gradients must measure themselves.
    known = backward if fp8.tracked else None
    return config, AttentionState(
        forward, known, fp8.mailbox[...], _record_mailbox(fp8)
    )


def keep(fp8: Fp8AttentionState, amaxes: Array, numbers: Array | None = None) -> None:
    """Takes in what FP8 attention has measured in its forward pass."""
    fp8.push(amaxes)
    if numbers is not None:
        record_forward(fp8, numbers)


def _record_mailbox(fp8: Fp8Statistics) -> Array | None:
    mail = fp8.record_mailbox
    return None if mail is None else mail[...]


def quantize_kernel(
    recipe: Recipe, fp8: Fp8State, kernel: Array, k_ndim: int, stacked: int = 0
) -> Quantized:
    """Both copies of a kernel, as the GEMMs of both passes read them.

    Args:
        recipe: that the layer follows.
        fp8: its FP8 state.
        kernel: ``[*stacked, *in, *out]``.
        k_ndim: number of dims in ``in``.
        stacked: number of leading dims that hold different layers.
    """
    n_ndim = kernel.ndim - stacked - k_ndim
    delayed = isinstance(recipe, DelayedScaling)
    scale = fp8.scales(recipe)[1] if delayed else None

    def quantize(kernel: Array, scale: Scale | None) -> Quantized:
        return recipe.operands().kernel(
            kernel,
            k_ndim=n_ndim,
            rowwise=True,
            colwise=True,
            scale=scale,
            amax_axes=amax_axes(fp8),
        )

    for _ in range(stacked):
        quantize = jax.vmap(quantize)
    return quantize(kernel, scale)


def cached_kernel(fp8: Fp8State) -> Quantized | None:
    """The copies that ``te.cache_quantized`` made of the kernel."""
    cache = fp8.kernel_cache
    return None if cache is None else jax.lax.stop_gradient(cache.get_value())


def set_cache(fp8: Fp8State, copies: Quantized | None) -> None:
    """Gives the FP8 state copies of its kernel, or takes them away."""
    if copies is not None:
        fp8.kernel_cache = Fp8KernelCache(copies)
    elif "kernel_cache" in vars(fp8):
        del fp8.kernel_cache
