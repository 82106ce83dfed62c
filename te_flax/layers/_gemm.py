"""How a layer's GEMM runs at the call: promotion, recipe, state, low-rank addition."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax.sharding import NamedSharding, PartitionSpec

from te_flax.functional.config import IDENTITY, QUANTIZED_NAME, GemmState
from te_flax.functional.dense import dense, layernorm_dense
from te_flax.functional.lora import Lora, low_rank
from te_flax.layers import _arguments, _fp8
from te_flax.ops._choice import current as current_kernels
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import resolve
from te_flax.recipe.record import record_operands
from te_flax.sharding import Placement, placement
from te_flax.typing import Array, Axes, wider


def lora(layer: Any) -> Lora | None:
    """The low-rank factors of a DenseGeneral, or None."""
    if layer.lora_a is None:
        return None
    return Lora(layer.lora_a[...], layer.lora_b[...])


def common(
    layer: Any,
    recipe: Recipe | None,
    dtype: Any,
    out_dtype: str,
    out_sharding: PartitionSpec | NamedSharding | None = None,
    placed: tuple[Placement, Placement] = (Placement(), Placement()),
):
    """The static configuration of one GEMM of a layer.

    Args:
        layer: a DenseGeneral.
        recipe: that it follows.
        dtype: of a kernel that it does not quantize.
        out_dtype: of y.
        out_sharding: wanted of y.
        placed: where the layer has placed x, and where it wants the quantized input.
    """
    if isinstance(out_sharding, NamedSharding):
        out_sharding = out_sharding.spec
    config = _fp8.gemm_config(
        recipe,
        layer.fp8,
        out_dtype=out_dtype,
        precision=layer.precision,
        out_sharding=out_sharding,
        input=placed[0],
        operand=placed[1],
        checkpoint_name=layer.quantization_checkpoint_name or QUANTIZED_NAME,
        impl=current_kernels(),
    )
    if recipe is None and _casts(layer):
        # The cast is the GEMM's, so that its gradient is not rounded to this dtype.
        kernel = dataclasses.replace(IDENTITY, dtype=jnp.dtype(dtype).name)
        config = dataclasses.replace(config, kernel=kernel)
    return config


def kernel_of(layer: Any, recipe: Recipe | None, stored: Array, promoted: Array):
    """The kernel as its GEMM takes it: that quantizes or casts what is stored.

    Without a recipe a user's own promotion counts, which may do more than cast.
    """
    return stored if recipe or _casts(layer) else promoted


def _casts(layer: Any) -> bool:
    return layer.promote_dtype is dtypes.promote_dtype


def record(
    layer: Any, recipe: Recipe | None, state: GemmState, x: Array | None
) -> None:
    """Hands the operands to ``te.record``, if that is entered."""
    if recipe is None:
        return
    record_operands(
        layer.fp8,
        recipe,
        x=x,
        kernel=layer.matrix(layer.kernel[...]),
        k_ndim=len(layer.axis),
        scales=state.scales,
    )


def apply(
    layer: Any,
    x: Array,
    *,
    norm: Any = None,
    axes: tuple[Axes | None, Axes | None] = (None, None),
    return_h: bool = False,
    out_sharding: PartitionSpec | NamedSharding | None = None,
) -> tuple[Array, Array | None]:
    """Runs ``norm(x) . kernel + bias`` of a DenseGeneral.

    Args:
        layer: holds kernel, bias, fp8, low-rank factors and options.
        x: input with its contracted axes last.
        norm: a LayerNorm or RMSNorm in front, or None.
        axes: logical axes of x, which it has, and of norm(x).
        return_h: whether norm(x) is returned.
        out_sharding: wanted of y.

    Returns:
        y, and norm(x) or None.
    """
    recipe = resolve(layer.recipe)
    kernel = layer.matrix(layer.kernel[...])
    bias = None if layer.bias is None else layer.bias[...]
    px, pkernel, pbias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
    out_dtype = jnp.dtype(layer.preferred_element_type or px.dtype).name
    placed = placement(axes[0], x.ndim), placement(axes[1], x.ndim)
    config = common(layer, recipe, pkernel.dtype, out_dtype, out_sharding, placed)
    state = _fp8.gemm_state(recipe, layer.fp8)
    taken = kernel_of(layer, recipe, kernel, pkernel)
    low = lora(layer)
    keep = return_h or low is not None or layer.fp8.record is not None
    if norm is None:
        # A cast that only widens is exact: quantize the narrow array.
        narrow = recipe and wider(x.dtype, px.dtype) == px.dtype
        y, measured = dense(
            x if narrow else px,
            taken,
            pbias,
            k_ndim=len(layer.axis),
            config=config,
            state=state,
        )
        h = px
    else:
        scale, norm_bias = norm.parameters()
        y, h, measured = layernorm_dense(
            _arguments.unpromoted(x, px),
            scale,
            norm_bias,
            taken,
            pbias,
            norm=norm.config(px.dtype.name),
            config=config,
            state=state,
            return_layernorm_output=keep,
        )
    record(layer, recipe, state, x if norm is None else h)
    _fp8.push(recipe, layer.fp8, measured)
    if low is not None and h is not None:
        y = y + low_rank(h, low, layer.lora_scale).astype(y.dtype)
    return y, h if return_h else None
