"""Refuses calls of attention that cannot mean anything."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from te_flax.errors import message
from te_flax.functional.attention.options import (
    LAYOUTS,
    MASK_TYPES,
    SOFTMAX_TYPES,
    WHERE,
    Operands,
    Options,
    Sizes,
    sizes_of,
)
from te_flax.typing import FLOATS


def refuse(argument: str, rule: str, got: object, remedy: str) -> ValueError:
    """The error of a wrong value, to be raised."""
    return ValueError(message(WHERE, argument, rule, got, remedy))


def choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses all but the choices."""
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise refuse(argument, f"be one of {names}", repr(value), "choose one")


def window_of(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of an int, a pair or None; -1 and None are unlimited."""
    single = window is None or isinstance(window, int | np.integer)
    pair = (window, window) if single else window
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        rule = "be None, an integer or (left, right)"
        raise refuse("window", rule, repr(window), "write (left, right)")
    for entry in pair:
        whole = isinstance(entry, int | np.integer) and not isinstance(entry, bool)
        if entry is not None and (not whole or entry < -1):
            rule, remedy = "have integers >= -1", "use -1 or None for no limit"
            raise refuse("window", rule, repr(window), remedy)
    left, right = (None if e in (None, -1) else int(e) for e in pair)
    return left, right


def scale_of(scale: Any, dim: int) -> float:
    """The factor of q . k as a Python float."""
    if scale is None:
        return 1 / math.sqrt(dim) if dim else 1.0
    if not _is_real(scale) or not math.isfinite(scale):
        rule, remedy = "be a finite Python number", "multiply q by a traced scale"
        raise refuse("scale", rule, repr(scale)[:60], remedy)
    return float(scale)


def rate_of(rate: Any) -> float:
    """The share of the probabilities that is dropped as a Python float."""
    if not _is_real(rate) or not 0 <= rate < 1:
        rule = "be a Python number >= 0 and < 1"
        raise refuse("dropout_rate", rule, repr(rate)[:60], "use 0.0")
    return float(rate)


def _is_real(number: Any) -> bool:
    kinds = int | float | np.integer | np.floating
    return isinstance(number, kinds) and not isinstance(number, bool)


def check_static(options: Options, operands: Operands) -> None:
    """Refuses options that do not exist or do not go together."""
    choice("layout", options.layout, LAYOUTS)
    choice("mask_type", options.mask_type, MASK_TYPES)
    choice("softmax_type", options.softmax_type, SOFTMAX_TYPES)
    given = _lengths(operands) or operands.segment_ids is not None
    if options.mask_type.startswith("padding") and not given:
        rule = "come with q_seqlen, kv_seqlen or segment_ids"
        raise refuse("mask_type", rule, repr(options.mask_type), "say what is padding")
    if _lengths(operands) and operands.segment_ids is not None:
        rule, remedy = "be None where q_seqlen or kv_seqlen is given", "choose one"
        raise refuse("segment_ids", rule, "both", remedy)
    learnable = options.softmax_type == "learnable"
    if learnable != (operands.sink is not None):
        rule = "be given if and only if softmax_type='learnable'"
        got = f"{type(operands.sink).__name__} for {options.softmax_type!r}"
        raise refuse("sink", rule, got, "pass an array [N] of one score a head")
    if options.dropout_rate:
        _check_key(operands.dropout_key)
    most = options.max_segments
    if most is not None and (not isinstance(most, int) or most < 1):
        raise refuse("max_segments", "be None or an integer >= 1", most, "use None")
    _check_score_mod(options, operands)


def _lengths(operands: Operands) -> bool:
    return operands.q_seqlen is not None or operands.kv_seqlen is not None


def _check_key(key: Any) -> None:
    remedy = "pass jax.random.key(seed)"
    if key is None:
        rule = "be given where dropout_rate > 0"
        raise refuse("dropout_key", rule, None, remedy)
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    words = dtype == jnp.uint32 and len(shape or ()) == 1
    if not words and not (typed and shape == ()):
        got = repr(key)[:60] if dtype is None else f"{dtype} {shape}"
        raise TypeError(message(WHERE, "dropout_key", "be one random key", got, remedy))


def _check_score_mod(options: Options, operands: Operands) -> None:
    mod, args = options.score_mod, operands.score_mod_args
    if mod is not None and not callable(mod):
        raise TypeError(
            message(WHERE, "score_mod", "be callable", repr(mod), "or leave it out")
        )
    if not isinstance(args, tuple):
        rule, remedy = "be a tuple", "write (array,) for a single one"
        raise TypeError(message(WHERE, "score_mod_args", rule, type(args), remedy))
    if args and mod is None:
        rule, remedy = "be empty without score_mod", "pass the function too"
        raise refuse("score_mod_args", rule, f"{len(args)} arguments", remedy)


def check_arrays(options: Options, operands: Operands) -> Sizes:
    """Refuses arrays of other dtypes and shapes than attention takes."""
    for name, a in zip("qkv", operands[:3], strict=True):
        if a.dtype not in (*FLOATS, jnp.float64):
            rule = "be float32, bfloat16 or float16"
            raise TypeError(message(WHERE, name, rule, a.dtype, "cast it first"))
        if a.dtype != operands.q.dtype:
            rule = f"have the dtype of q, {operands.q.dtype}"
            raise TypeError(message(WHERE, name, rule, a.dtype, "cast it first"))
        if a.ndim != 4:
            rule, got = f"have the 4 dims {options.layout}H", f"shape {a.shape}"
            raise refuse(name, rule, got, "reshape it, or jax.vmap over further dims")
    _check_pages(options, operands)
    sizes = sizes_of(options.layout, operands)
    _check_sizes(options, operands, sizes)
    _check_matrix("bias", operands.bias, sizes, boolean=False)
    _check_matrix("mask", operands.mask, sizes, boolean=True)
    for name in ("alibi_slopes", "sink"):
        _check_shape(name, getattr(operands, name), (sizes.heads,), "one entry a head")
    check_tokens(options, operands, sizes)
    return sizes


def _check_sizes(options: Options, operands: Operands, sizes: Sizes) -> None:
    at = options.layout.index
    paged = operands.page_table is not None
    dims = [d for d in "BTN" if not (paged and d == "B")]
    for d in dims:
        k, v = operands.k.shape[at(d)], operands.v.shape[at(d)]
        if k != v:
            got = f"k {operands.k.shape}, v {operands.v.shape}"
            raise refuse("v", f"have as many {d} as k", got, "check the layout")
    shapes = f"q {operands.q.shape}, k {operands.k.shape}, layout {options.layout}"
    if not paged and operands.k.shape[at("B")] != sizes.batch:
        raise refuse("k", "have the batch of q", shapes, "check the layout")
    if operands.k.shape[3] != sizes.qk_dim:
        raise refuse("k", "have the head_dim of q", shapes, "only that of v may differ")
    if not sizes.kv_heads or sizes.heads % sizes.kv_heads:
        rule = "have a number of heads that divides that of q"
        raise refuse("k", rule, shapes, "check the layout and num_kv_heads")


def _check_matrix(name: str, a: Any, sizes: Sizes, *, boolean: bool) -> None:
    if a is None:
        return
    floats = jnp.issubdtype(a.dtype, jnp.floating)
    if not floats and not (boolean and a.dtype == jnp.bool_):
        rule = "be boolean or floating" if boolean else "be floating"
        remedy = "True means that a query sees a key" if boolean else "cast it first"
        raise TypeError(message(WHERE, name, rule, a.dtype, remedy))
    full = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    tail = full[4 - a.ndim :] if a.ndim <= 4 else None
    if tail is None or any(n not in (1, m) for n, m in zip(a.shape, tail, strict=True)):
        rule, remedy = f"broadcast to [B, N, T, S] = {full}", "use 1 for a shared dim"
        raise refuse(name, rule, f"shape {a.shape}", remedy)


def _check_shape(name: str, a: Any, shape: tuple, remedy: str) -> None:
    if a is not None and a.shape != shape:
        raise refuse(name, f"have shape {shape}", f"shape {a.shape}", remedy)


def check_tokens(options: Options, operands: Operands, sizes: Sizes) -> None:
    """Refuses lengths, segments, positions and offsets that do not fit."""
    counts = (sizes.queries, sizes.keys)
    for name in ("segment_ids", "positions"):
        pair = getattr(operands, name)
        for a, n in zip(pair or (), counts, strict=False):
            _check_integers(name, a)
            remedy = "pass a pair where queries and keys differ"
            _check_shape(name, a, (sizes.batch, n), remedy)
    most = options.max_segments
    for a in operands.segment_ids or ():
        high = np.iinfo(np.int32).max if most is None else most
        _check_range("segment_ids", a, 0, high, "0 is padding; raise max_segments")
    _check_lengths(operands, sizes, counts)


def _check_lengths(operands: Operands, sizes: Sizes, counts: tuple[int, int]) -> None:
    lengths: Any = (operands.q_seqlen, operands.kv_seqlen)
    for name, a, n in zip(("q_seqlen", "kv_seqlen"), lengths, counts, strict=True):
        if a is None:
            continue
        _check_integers(name, a)
        if a.ndim not in (1, 2) or a.shape[0] != sizes.batch:
            rule = f"have shape [B] or [B, M] with B = {sizes.batch}"
            raise refuse(name, rule, f"shape {a.shape}", "one length an example")
        low, remedy = 1 - a.ndim, "-1 fills up lengths of the form [B, M]"
        _check_range(name, a, low, n, remedy)
    packed = [a is not None and a.ndim == 2 for a in lengths]
    if any(packed) and (not all(packed) or lengths[0].shape != lengths[1].shape):
        got = [None if a is None else a.shape for a in lengths]
        rule = "be [B, M] for queries and keys alike"
        raise refuse("q_seqlen, kv_seqlen", rule, got, "packed examples need both")
    if operands.offsets is None:
        return
    if not all(packed):
        rule, remedy = "come with q_seqlen and kv_seqlen [B, M]", "pass the lengths"
        raise refuse("offsets", rule, "none", remedy)
    for a, n in zip(operands.offsets, counts, strict=True):
        _check_integers("offsets", a)
        shape = (sizes.batch, lengths[0].shape[1] + 1)
        _check_shape("offsets", a, shape, "one start a segment and the end")
        _check_range("offsets", a, -1, n, "-1 fills up")


def _check_integers(name: str, a: Any) -> None:
    if not jnp.issubdtype(a.dtype, jnp.integer):
        raise TypeError(message(WHERE, name, "be int32", a.dtype, "cast it first"))


def _check_range(name: str, a: Any, low: int, high: int, remedy: str) -> None:
    """Looks at the numbers where they are known: not under jit."""
    if isinstance(a, Tracer):
        return
    values = np.asarray(a)
    bad = values[(values < low) | (values > high)]
    if bad.size:
        raise refuse(name, f"lie in [{low}, {high}]", bad[0], remedy)


def _check_pages(options: Options, operands: Operands) -> None:
    if operands.page_table is None:
        return
    if operands.kv_seqlen is None:
        rule, remedy = "come with kv_seqlen", "say how many keys the pages hold"
        raise refuse("page_table", rule, "none", remedy)
    shapes = [table.shape for table in operands.page_table]
    at = options.layout.index("B")
    examples = operands.q.shape[at]
    for table, pages in zip(operands.page_table, operands[1:3], strict=True):
        _check_integers("page_table", table)
        if table.ndim != 2 or shapes[0] != shapes[1] or len(table) != examples:
            rule, remedy = "be [B, pages] of keys and values alike", "pad it with -1"
            raise refuse("page_table", rule, shapes, remedy)
        remedy = "-1 is no page"
        _check_range("page_table", table, -1, pages.shape[at] - 1, remedy)
