"""XLA's custom calls of cuDNN's fused attention: their names and configuration.

XLA reads the configuration as the JSON form of its CudnnfMHABackendConfig and, on the
GPU, builds a cuDNN graph from it and from the shapes and layouts of the operands.
"""

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from te_flax.typing import Array, Shape

_TYPES = {"bfloat16": "BF16", "float16": "F16"}
# The products of the graph: their operands and the dim that is summed over. P are the
# probabilities, BNTS; the other dims are those of q, k, v and of their gradients.
_FORWARD = {"bmm1": ("BTNH", "BSNH", "H"), "bmm2": ("BNTS", "BSNH", "S")}
_BACKWARD = {
    "bmm1_grad_gemm1": ("BNTS", "BTNH", "T"),
    "bmm1_grad_gemm2": ("BNTS", "BSNH", "S"),
    "bmm2_grad_gemm1": ("BNTS", "BTNH", "T"),
    "bmm2_grad_gemm2": ("BTNH", "BSNH", "H"),
}


def target(*, backward: bool, bias: bool = False, fp8: bool = False) -> str:
    """The name of a custom call.

    Example:
        >>> target(backward=True, bias=True)
        '__cudnn$fmhaScaleBiasSoftmaxBackward'
    """
    kind = "ScaleBiasSoftmax" if bias else "Softmax"
    return f"__cudnn$fmha{kind}{'Backward' * backward}{'F8' * fp8}"


def config(
    scores: Shape,
    dtype: str,
    *,
    backward: bool,
    scale: float,
    mask_type: str,
    window: int = 0,
    segments: int = 1,
) -> str:
    """The configuration of a custom call, as JSON.

    Args:
        scores: B, N, T, S.
        dtype: of the probabilities, "bfloat16" or "float16".
        backward: which pass.
        scale: factor of q . k.
        mask_type: NO_MASK, PADDING, CAUSAL or PADDING_CAUSAL.
        window: how many keys, its own included, a query sees; 0 is all.
        segments: largest number of packed segments an example has.

    Returns:
        The text.
    """
    products = _BACKWARD if backward else _FORWARD
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": _TYPES[dtype],
            "dimensions": [str(n) for n in scores],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": mask_type,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": segments,
        "is_paged_attention": False,
        **{
            f"{name}_dot_dimension_numbers": _numbers(*product)
            for name, product in products.items()
        },
    }
    return json.dumps(
        {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}
    )


def _numbers(lhs: str, rhs: str, summed: str) -> dict[str, list[str]]:
    found = {}
    for side, dims in (("lhs", lhs), ("rhs", rhs)):
        found[f"{side}_contracting_dimensions"] = [str(dims.index(summed))]
        found[f"{side}_batch_dimensions"] = [str(dims.index(d)) for d in "BN"]
    return found


def call(
    name: str,
    operands: Sequence[tuple[Array, str | None]],
    results: Sequence[tuple[jax.ShapeDtypeStruct, str | None]],
    text: str,
) -> list[Array]:
    """Calls cuDNN.

    Args:
        name: as :func:`target` returns it.
        operands: with each the order of its dims in memory where it is
            ``[B, T, N, H]``, and None where it is another array.
        results: types, likewise.
        text: as :func:`config` returns it.

    Returns:
        The results.
    """
    # XLA wants what it writes as [B, N, T, H]. The order in memory makes a
    # transposition of the operands and results one of the types only.
    types = [_heads_first(t) if memory else t for t, memory in results]
    made = jax.ffi.ffi_call(
        name,
        # XLA gives the last result as many bytes as cuDNN works in.
        [*types, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        vmap_method="sequential",
        input_layouts=[_order("BTNH", memory) for _, memory in operands],
        output_layouts=[*(_order("BNTH", memory) for _, memory in results), None],
        custom_call_api_version=1,
        legacy_backend_config=text,
    )(*(a for a, _ in operands))
    pairs = zip(made, results, strict=False)
    return [jnp.swapaxes(a, 1, 2) if memory else a for a, (_, memory) in pairs]


def _order(dims: str, memory: str | None) -> tuple[int, ...] | None:
    """Major to minor."""
    return None if memory is None else tuple(dims.index(d) for d in memory)


def _heads_first(t: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    b, tokens, n, h = t.shape
    return jax.ShapeDtypeStruct((b, n, tokens, h), t.dtype)
