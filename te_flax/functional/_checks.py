"""Checks of the functionals' operands."""

import jax.numpy as jnp

from te_flax.errors import check_float64, message
from te_flax.functional.config import DenseConfig, NormConfig
from te_flax.quantize.quantizer import Identity
from te_flax.typing import FLOATS, Array


def check_gemm(
    where: str,
    x: Array,
    kernel: Array,
    bias: Array | None,
    k_ndim: int,
    config: DenseConfig,
) -> None:
    """Refuses operands of other dtypes and shapes than ``x . kernel + bias`` takes."""
    check_float64(where, x=x, kernel=kernel, bias=bias)
    check_dtypes(where, config, x=x, kernel=kernel, bias=bias)
    if kernel.ndim <= k_ndim or x.ndim < k_ndim:
        raise ValueError(
            message(
                where,
                "kernel",
                f"have {k_ndim} input dims and at least one output dim, x the same "
                f"{k_ndim} last dims",
                f"kernel {kernel.shape}, x {x.shape}",
                "reshape them or pass k_ndim",
            )
        )
    if x.shape[x.ndim - k_ndim :] != kernel.shape[:k_ndim]:
        raise ValueError(
            message(
                where,
                "x",
                f"end in {kernel.shape[:k_ndim]} like kernel {kernel.shape}",
                f"shape {x.shape}",
                "check the contracted features",
            )
        )
    if bias is not None and bias.shape != kernel.shape[k_ndim:]:
        raise ValueError(
            message(
                where,
                "bias",
                f"have shape {kernel.shape[k_ndim:]}",
                f"shape {bias.shape}",
                "one bias for each output feature",
            )
        )


def check_norm(
    where: str, norm: NormConfig, x: Array, scale: Array, bias: Array | None
) -> None:
    """Refuses a norm that is none, and parameters that do not fit it."""
    if norm.kind not in ("layernorm", "rmsnorm"):
        rule, remedy = "be 'layernorm' or 'rmsnorm'", "choose one"
        raise ValueError(message(where, "kind", rule, repr(norm.kind), remedy))
    if not 0 <= norm.epsilon < float("inf"):
        rule, remedy = "be finite and >= 0", "use 1e-6"
        raise ValueError(message(where, "epsilon", rule, norm.epsilon, remedy))
    check_dtypes(where, DenseConfig(), x=x, scale=scale, bias=bias)
    if x.ndim < 1 or x.shape[-1] == 0:
        rule, remedy = "have a last axis of size >= 1", "there is nothing to normalise"
        raise ValueError(message(where, "x", rule, f"shape {x.shape}", remedy))
    if (bias is None) != (norm.kind == "rmsnorm"):
        rule = "be given for a layernorm and None for an rmsnorm"
        remedy = "pass zeros for a LayerNorm without bias"
        got = f"{None if bias is None else bias.shape} for a {norm.kind}"
        raise ValueError(message(where, "norm_bias", rule, got, remedy))
    for name, parameter in (("scale", scale), ("norm_bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            rule, got = f"have shape {x.shape[-1:]}", f"shape {parameter.shape}"
            remedy = "one entry for each feature"
            raise ValueError(message(where, name, rule, got, remedy))


def check_dtypes(where: str, config: DenseConfig, **arrays: Array | None) -> None:
    """Raises TypeError for all but floats; float64 only without quantization."""
    unquantized = isinstance(config.x, Identity) and isinstance(config.kernel, Identity)
    wide = (jnp.float64,) if unquantized else ()
    for name, array in arrays.items():
        if array is not None and array.dtype not in (*FLOATS, *wide):
            raise TypeError(
                message(
                    where,
                    name,
                    "be float32, bfloat16 or float16",
                    array.dtype,
                    "cast it first",
                )
            )
