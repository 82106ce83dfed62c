"""Which implementation can do what, and why not: one table.

A row is a property that a call may have. ``without`` names the implementations that
cannot serve such a call, each with the reason that the user is told.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from te_flax.config import CONFIG
from te_flax.errors import message
from te_flax.functional.attention.options import WHERE, Operands, Options, Sizes
from te_flax.ops._extension import compute_capability

IMPLEMENTATIONS = ("cudnn", "chunked", "reference")  # in the order of preference


def _platform() -> str:
    """Where a program runs unless it is told otherwise."""
    config: Any = jax.config
    device = config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


@dataclasses.dataclass(frozen=True)
class Call:
    """What the table looks at.

    Attributes:
        options: the static part.
        operands: the arrays, of which only types and presence count.
        sizes: the dims.
        fp8: whether the products are in FP8.
        scaled: whether all scales of FP8 are known beforehand.
        uniform: whether both passes of FP8 have one quantizer.
        platform: "cpu", "gpu" or another of jax.
        capability: of the GPUs, such as 90, or None.
        deterministic: whether ``TE_FLAX_DETERMINISTIC=1``.
        training: whether a backward pass follows; at the call nobody knows.
    """

    options: Options
    operands: Operands
    sizes: Sizes
    fp8: bool = False
    scaled: bool = True
    uniform: bool = True
    platform: str = dataclasses.field(default_factory=_platform)
    capability: int | None = dataclasses.field(default_factory=compute_capability)
    deterministic: bool = CONFIG.deterministic == "1"
    training: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """One property of a call.

    Attributes:
        name: of the property, as in the documentation.
        holds: whether a call has it.
        without: implementation -> why it cannot serve such a call.
    """

    name: str
    holds: Callable[[Call], bool]
    without: Mapping[str, str]


def _present(field: str) -> Callable[[Call], bool]:
    return lambda call: getattr(call.operands, field) is not None


def _odd(call: Call) -> bool:
    return call.sizes.queries % 2 == 1 or call.sizes.keys % 2 == 1


def _fp8_shape(call: Call) -> bool:
    s = call.sizes
    dims = (s.qk_dim, s.v_dim) != (128, 128)
    return dims or s.queries % 128 > 0 or s.keys % 128 > 0


def _head_dim(call: Call) -> bool:
    dims = (call.sizes.qk_dim, call.sizes.v_dim)
    return any(d > 256 or d % 8 for d in dims)


def _other_dtype(call: Call) -> bool:
    """Of what is added to the scores."""
    added = (call.operands.bias, call.operands.mask)
    kept = (call.operands.q.dtype, jnp.bool_)
    return any(a is not None and a.dtype not in kept for a in added)


def _packed(call: Call) -> bool:
    lengths = (call.operands.q_seqlen, call.operands.kv_seqlen)
    return any(n is not None and n.ndim == 2 for n in lengths)


def _large(call: Call) -> bool:
    s = call.sizes
    tokens = max(s.queries * s.heads, s.keys * s.kv_heads)
    return _packed(call) and s.batch * tokens * s.qk_dim >= 2**31


def _bottom_right(call: Call) -> bool:
    """Whether it differs from top left."""
    lengths = (call.operands.q_seqlen, call.operands.kv_seqlen)
    square = call.sizes.queries == call.sizes.keys and lengths == (None, None)
    return call.options.bottom_right and not square


def _any_order(call: Call) -> bool:
    """Whether sums must repeat, but XLA was not told so, or cannot in FP8."""
    flags = re.findall(
        r"--xla_gpu_(?:deterministic_ops|exclude_nondeterministic_ops)(?:=(\w+))?",
        os.environ.get("XLA_FLAGS", ""),
    )
    told = any(f in ("", "true", "1") for f in flags)
    return call.deterministic and (call.fp8 or not told)


def _two_dims(call: Call) -> bool:
    dims = (call.sizes.qk_dim, call.sizes.v_dim)
    return dims[0] != dims[1] and dims != (192, 128)


def _fp8_scores(call: Call) -> bool:
    """Whether anything but q . k and a causal mask makes the scores."""
    given = (call.operands.bias, call.operands.mask, call.operands.kv_seqlen)
    given = (*given, call.operands.q_seqlen, call.options.left)
    return any(a is not None for a in given)


_MATRIX = "FP8 attention needs the whole matrix of scores at once; use 'reference'"
_NO_SINK = "XLA's call has no further term in the denominator"
TABLE: tuple[Row, ...] = (
    Row(
        "another platform than an NVIDIA GPU",
        lambda c: c.platform not in ("gpu", "cuda"),
        {"cudnn": "it runs on NVIDIA GPUs only"},
    ),
    Row(
        "a GPU older than sm_90",
        lambda c: c.capability is not None and c.capability < 90,
        {"cudnn": "its limits are those of Hopper; use 'chunked'"},
    ),
    Row(
        "float32 or float64",
        lambda c: jnp.dtype(c.operands.q.dtype).itemsize > 2,
        {"cudnn": "it takes bfloat16 and float16; cast q, k and v"},
    ),
    Row(
        "head_dim above 256 or no multiple of 8",
        _head_dim,
        {"cudnn": "head_dim must be <= 256 and a multiple of 8"},
    ),
    Row(
        "head_dims that differ, but not 192 and 128",
        _two_dims,
        {"cudnn": "v must have the head_dim of q, or 128 where q has 192"},
    ),
    Row(
        "a dim of size 0",
        lambda c: 0 in c.sizes,
        {"cudnn": "it takes no empty arrays"},
    ),
    Row("bias", _present("bias"), {}),
    Row(
        "bias or mask of another dtype than q",
        _other_dtype,
        {"cudnn": "it adds what has the dtype of q; cast it"},
    ),
    Row(
        "bias with odd T or S, training",
        lambda c: c.training and c.operands.bias is not None and _odd(c),
        {"cudnn": "T and S must be even to train with a bias; pad them"},
    ),
    Row("mask", _present("mask"), {}),
    Row(
        "a scale that is not positive",
        lambda c: c.options.scale <= 0,
        {"cudnn": "it looks for the largest score before it scales"},
    ),
    Row("causal mask", lambda c: "causal" in c.options.mask_type, {}),
    Row(
        "causal mask, bottom right",
        _bottom_right,
        {"cudnn": "XLA's call aligns a causal mask with the first query"},
    ),
    Row(
        "window to the right",
        lambda c: c.options.right not in (None, 0) or _lone_left(c.options),
        {"cudnn": "its window is (left, 0) under a causal mask"},
    ),
    Row("window", lambda c: c.options.left is not None, {}),
    Row("alibi_slopes", _present("alibi_slopes"), {"cudnn": "pass them as a bias"}),
    Row("q_seqlen, kv_seqlen", _present("kv_seqlen"), {}),
    Row(
        "segment_ids",
        _present("segment_ids"),
        {
            "cudnn": "it needs segments in one piece, which ids do not promise; pass "
            "q_seqlen and kv_seqlen [B, M]"
        },
    ),
    Row(
        "positions",
        _present("positions"),
        {"cudnn": "it numbers the tokens of a segment itself"},
    ),
    Row("offsets", _present("offsets"), {}),
    Row("packed lengths [B, M]", _packed, {}),
    Row(
        "packed lengths, bias or mask",
        lambda c: _packed(c) and (c.operands.bias, c.operands.mask) != (None, None),
        {"cudnn": "it adds nothing to the scores of packed segments"},
    ),
    Row(
        "packed lengths, head_dim of v another than that of q",
        lambda c: _packed(c) and c.sizes.qk_dim != c.sizes.v_dim,
        {"cudnn": "it measures the segments of q, k, v and o in one head_dim"},
    ),
    Row(
        "packed lengths, 2^31 elements or more",
        _large,
        {"cudnn": "it counts the elements before a segment in int32"},
    ),
    Row(
        "dropout",
        lambda c: c.options.dropout_rate > 0,
        {
            "cudnn": "XLA's call takes one seed for all steps, and in a command buffer "
            "it aborts the process; use 'chunked'"
        },
    ),
    Row(
        "softmax_type off_by_one",
        lambda c: c.options.softmax_type == "off_by_one",
        {"cudnn": _NO_SINK},
    ),
    Row(
        "softmax_type learnable",
        lambda c: c.options.softmax_type == "learnable",
        {"cudnn": _NO_SINK},
    ),
    Row(
        "score_mod",
        lambda c: c.options.score_mod is not None,
        {"cudnn": "XLA's call takes no function of the scores"},
    ),
    Row(
        "page_table",
        _present("page_table"),
        {"cudnn": "XLA's call reads pages in the forward pass only"},
    ),
    Row("return_residual", lambda c: c.options.return_residual, {}),
    Row("fp8", lambda c: c.fp8, {"chunked": _MATRIX}),
    Row(
        "fp8, shapes",
        lambda c: c.fp8 and _fp8_shape(c),
        {"cudnn": "FP8 needs head_dim 128 and T and S that are multiples of 128"},
    ),
    Row(
        "fp8, masks",
        lambda c: c.fp8 and c.options.mask_type not in ("no_mask", "causal"),
        {"cudnn": "FP8 knows no mask but the causal one"},
    ),
    Row(
        "fp8, bias, mask, lengths or window",
        lambda c: c.fp8 and _fp8_scores(c),
        {"cudnn": "FP8 changes no score but by the causal mask"},
    ),
    Row(
        "fp8, another quantizer backwards, training",
        lambda c: c.fp8 and c.training and not c.uniform,
        {"cudnn": "XLA's call has one FP8 format; quantize both passes to e4m3"},
    ),
    Row(
        "fp8, scales to be measured",
        lambda c: c.fp8 and not c.scaled,
        {"cudnn": "FP8 rounds within one pass; pass fp8=(config, AttentionState(..))"},
    ),
    Row(
        "fp8, return_residual",
        lambda c: c.fp8 and c.options.return_residual,
        {"cudnn": "FP8 has no gradient of the log-sum-exp"},
    ),
    Row(
        "fp8, page_table",
        lambda c: c.fp8 and c.operands.page_table is not None,
        {"cudnn": "FP8 reads no pages"},
    ),
    Row(
        "TE_FLAX_DETERMINISTIC=1",
        _any_order,
        {
            "cudnn": "its backward pass adds up dq in any order; set "
            "XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops"
        },
    ),
)


def _lone_left(options: Options) -> bool:
    return options.left is not None and options.right is None


def reasons(call: Call, implementation: str) -> list[str]:
    """Why an implementation cannot serve a call; none if it can."""
    return [
        f"{row.name}: {row.without[implementation]}"
        for row in TABLE
        if implementation in row.without and row.holds(call)
    ]


def choose(call: Call, implementation: str | None) -> str:
    """The implementation that serves a call.

    Args:
        call: the call.
        implementation: asked for by name, or None for the first that can.

    Returns:
        One of IMPLEMENTATIONS.

    Raises:
        ValueError: it does not exist.
        NotImplementedError: it cannot serve the call.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if not reasons(call, name))
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        rule = f"be None or one of {names}"
        got = repr(implementation)
        raise ValueError(message(WHERE, "implementation", rule, got, "use None"))
    if why := reasons(call, implementation):
        able = [name for name in IMPLEMENTATIONS if not reasons(call, name)]
        rule, got = "be able to serve the call", f"{implementation!r}: {why[0]}"
        remedy = f"use None or one of {able}"
        raise NotImplementedError(message(WHERE, "implementation", rule, got, remedy))
    return implementation
