"""Quantizing kernels once for all microbatches of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import nnx

from te_flax.errors import message
from te_flax.layers import _fp8
from te_flax.layers.dense_general import DenseGeneral
from te_flax.layers.layer_norm_mlp import LayerNormMLP
from te_flax.recipe.context import resolve
from te_flax.recipe.delayed import DelayedScaling


@contextlib.contextmanager
def cache_quantized(model: Any) -> Iterator[None]:
    """Quantizes the kernels of a model once; every call inside reads the copies.

    For steps that call the model several times with the same parameters (microbatches,
    evaluation). Under the recipe in context and the layers' own; a layer without one is
    left alone. Results are bit-equal to quantizing in every call with the same scales;
    under delayed scaling those are the ones known at the entry, where amax(kernel) is
    pushed, once. Gradients reach the kernels as ever. Enter it where the parameters are
    final: inside a jitted step, outside of ``te.value_and_grad``. An optimizer's update
    inside has no effect on the copies.

    Args:
        model: a module that holds te_flax layers.

    Yields:
        Nothing.

    Raises:
        ValueError: the model holds no te_flax GEMM layer.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.DenseGeneral(32, 8, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((4, 32))
        >>> with te.autocast(te.MXFP8BlockScaling()):
        ...     once = layer(x)
        ...     with te.cache_quantized(layer):
        ...         twice = layer(x), layer(x)
        >>> bool((twice[1] == once).all())
        True
    """
    layers = _layers(model)
    if not layers:
        rule, remedy = "hold a te_flax GEMM layer", "pass the module that holds them"
        got = type(model).__name__
        raise ValueError(message("cache_quantized", "model", rule, got, remedy))
    try:
        for layer, middle in layers:
            _fill(layer, middle)
        yield
    finally:
        for layer, _ in layers:
            _fp8.set_cache(layer.fp8, None)


def _layers(model: Any) -> list[tuple[DenseGeneral, bool]]:
    """Each GEMM layer once, and whether a block reads its kernel as [in, 1, mid]."""
    found: dict[int, tuple[DenseGeneral, bool]] = {}
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LayerNormMLP):
            fused = module.activation is not None
            found[id(module.wi)] = (module.wi, fused and len(module.activations) == 1)
        elif isinstance(module, DenseGeneral):
            found.setdefault(id(module), (module, False))
    return list(found.values())


def _fill(layer: DenseGeneral, middle: bool) -> None:
    recipe = resolve(layer.recipe)
    if recipe is None:
        return
    kernel, k_ndim = layer.matrix(layer.kernel[...]), len(layer.in_features)
    stacked = kernel.ndim - k_ndim - len(layer.out_features)
    if middle:
        kernel = kernel[..., None, :]
    copies = _fp8.quantize_kernel(recipe, layer.fp8, kernel, k_ndim, stacked)
    if isinstance(recipe, DelayedScaling):
        layer.fp8.push(None, copies.amax)
    _fp8.set_cache(layer.fp8, copies)
