"""Tensor-scaled FP8 quantization: one scale for the whole tensor, known beforehand."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits
from te_flax.ops._op import Case, KernelOp
from te_flax.typing import FLOATS, FP8, Array

_SCALES = ("row_scale", "col_scale", "scale_inv")


def _quantize(
    x: Array,
    scale: Array,
    *,
    k_ndim: int,
    row_format: str | None = None,
    col_format: str | None = None,
) -> tuple[Array, ...]:
    bits = _bits.flush(_bits.widen(x))
    factor = _bits.as_float(_bits.flush(_bits.as_bits(scale)))
    scaled = _bits.as_bits(_bits.as_float(bits) * factor)
    results = []
    if row_format is not None:
        results.append(_bits.encode(scaled, row_format))
    if col_format is not None:
        m_ndim = x.ndim - k_ndim
        order = (*range(m_ndim, x.ndim), *range(m_ndim))
        results.append(jnp.transpose(_bits.encode(scaled, col_format), order))
    return (*results, _bits.amax(bits))


def _keep(
    where: str, names: tuple[str, ...], noop: Array, previous: tuple, new: tuple
) -> tuple[Array, ...]:
    """The previous results where noop[0] != 0 (NaN is, a subnormal is not)."""
    for name, p, n in zip(names, previous, new, strict=True):
        if p.dtype != n.dtype:
            rule, remedy = f"be {n.dtype.name}", "pass what this op returned before"
            raise TypeError(message(where, f"prev_{name}", rule, p.dtype, remedy))
    skip = _bits.magnitude(_bits.as_bits(noop[0])) >= _bits.MIN_NORMAL
    return tuple(jnp.where(skip, p, n) for p, n in zip(previous, new, strict=True))


def with_previous(
    operands: Mapping[str, str],
    dtypes: Mapping[str, tuple],
    results: Mapping[str, str],
    of: Mapping[str, tuple],
) -> tuple[dict[str, str], dict[str, tuple]]:
    """Adds what a noop variant reads: its flag and the previous results.

    Args:
        operands: name -> dims.
        dtypes: operand -> allowed dtypes.
        results: name -> dims.
        of: result -> allowed dtypes.

    Returns:
        Dims and dtypes of all operands.
    """
    previous = {f"prev_{n}": dims for n, dims in results.items()}
    types = {"noop": (jnp.float32,), **dtypes}
    types |= {f"prev_{n}": of[n] for n in results}
    return {"noop": "1"} | dict(operands) | previous, types


def signature(operands: Mapping[str, str], results: Mapping[str, str]) -> str:
    """Spells named dims as the signature of a KernelOp."""
    sides = (
        ", ".join(f"{n}: {d}" for n, d in side.items()) for side in (operands, results)
    )
    return " -> ".join(sides)


def declare(
    name: str,
    quantize: Callable[..., tuple[Array, ...]],
    operands: Mapping[str, str],
    results: Mapping[str, str],
    *,
    noop: bool,
    dtypes: Mapping[str, tuple],
    handler: str | None,
    handler_attrs: Mapping[str, Any],
    formats: tuple[str, ...] | None = None,
    attrs: Mapping[str, Any] | None = None,
    codes: tuple = tuple(FP8.values()),
    scale_dtype: Any = jnp.uint8,
    batch: Callable | None = None,
) -> KernelOp:
    """Declares one variant of a quantizer.

    Args:
        name: of the family; the copies, and "noop", are appended.
        quantize: the reference, ``(*arrays, k_ndim, row_format=, col_format=)``, or
            with ``formats`` and ``attrs`` in place of the last two.
        operands: name -> dims, without those of the noop variant.
        results: name -> dims, those of this variant; "row" and "col" are codes.
        noop: whether operands ``noop`` and the previous results, aliased, are added.
        dtypes: operand -> allowed dtypes.
        handler: FFI target; None where only the reference runs.
        handler_attrs: attributes that tell the handler the variant.
        formats: attributes that name an FP8 format; None has one per copy.
        attrs: further attributes, each with the value of the example calls.
        codes: dtypes that the codes may have.
        scale_dtype: of the block scales.
        batch: vmap override.

    Returns:
        The op.
    """
    if formats is None:
        formats = tuple(f"{copy}_format" for copy in ("row", "col") if copy in results)
    examples = dict(attrs or {})
    taken = operands
    if noop:
        of = dict.fromkeys(("row", "col"), codes)
        of |= dict.fromkeys(_SCALES, (scale_dtype,)) | {"amax": (jnp.float32,)}
        taken, dtypes = with_previous(operands, dtypes, results, of)

    def reference(*arrays: Array, **attrs: Any) -> tuple[Array, ...]:
        for attr in formats:
            _bits.check_format(name, attr, attrs[attr])
        if not noop:
            return quantize(*arrays, **attrs)
        first = 1 + len(operands)
        new = quantize(*arrays[1:first], **attrs)
        return _keep(name, tuple(results), arrays[0], arrays[first:], new)

    return KernelOp(
        name=name,
        signature=signature(taken, results),
        reference=reference,
        attrs={
            **dict.fromkeys(formats, str),
            "k_ndim": int,
            **{name: type(value) for name, value in examples.items()},
        },
        groups={"K": "k_ndim"},
        dtypes=dtypes,
        reduce=(*(None,) * (len(results) - 1), "max"),
        batch_group="M",
        batch=batch,
        handler=handler,
        handler_attrs={
            "row": "row" in results,
            "col": "col" in results,
            "noop": noop,
            **handler_attrs,
        },
        aliases={f"prev_{n}": n for n in results} if noop else {},
        cases=tuple(_cases(taken, formats, examples, dtypes)),
    )


def _cases(
    operands: Mapping[str, str],
    formats: Iterable[str],
    examples: Mapping[str, Any],
    dtypes: Mapping[str, tuple],
) -> Iterator[Case]:
    """One small ragged case per dtype of x, the first allowed one of all else."""
    sizes = {"M..": 250, "K..": 328}

    def size(word: str) -> int:
        name, _, block = word.partition("/")
        return -(-sizes[name] // int(block or 1)) if name in sizes else int(word)

    shapes = tuple(tuple(map(size, dims.split())) for dims in operands.values())
    for dtype in FLOATS:
        types = tuple(dtype if n == "x" else dtypes[n][0] for n in operands)
        attrs = {**dict.fromkeys(formats, "e4m3"), "k_ndim": 1, **examples}
        yield Case(np.dtype(dtype).name, shapes, types, attrs)


def _shared_scale(
    call: Callable, arrays: Sequence[Array], batched: tuple[bool, ...], attrs: dict
) -> tuple | None:
    """One scale for the whole batch is one statistic: the amax is over the batch."""
    at = {"row_format": 0, "col_format": attrs["k_ndim"]}
    dims = [at[name] for name in at if name in attrs]
    if batched == (True, False):
        return call(*arrays), [*dims, None]
    if batched == (False, True, False, *[True] * len(dims), False):  # noop
        copies = zip(arrays[3:], dims, strict=False)
        moved = [jnp.moveaxis(previous, 0, d) for previous, d in copies]
        return call(*arrays[:3], *moved, arrays[-1]), [*dims, None]
    return None


def _tensor_op(*copies: str, noop: bool = False) -> KernelOp:
    dims = {"row": "M.. K..", "col": "K.. M.."}
    return declare(
        f"quantize_{''.join(copies)}{'_noop' if noop else ''}",
        _quantize,
        {"x": "M.. K..", "scale": ""},
        {copy: dims[copy] for copy in copies} | {"amax": "2"},
        noop=noop,
        dtypes={"x": FLOATS, "scale": (jnp.float32,)},
        handler="quantize_tensor",
        handler_attrs={},
        batch=_shared_scale,
    )


QUANTIZE_ROW = _tensor_op("row")
QUANTIZE_COL = _tensor_op("col")
QUANTIZE_ROWCOL = _tensor_op("row", "col")
QUANTIZE_ROW_NOOP = _tensor_op("row", noop=True)
QUANTIZE_COL_NOOP = _tensor_op("col", noop=True)
QUANTIZE_ROWCOL_NOOP = _tensor_op("row", "col", noop=True)
