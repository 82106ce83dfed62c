"""Fused ops: a function h = f(..), rounded once, and its quantized copies in one pass.

A :class:`Family` declares f; each variant is a KernelOp of its own. All of them mean
one thing: h is computed in float32 and rounded once to ``out_dtype`` (below 2^-126 it
is the zero of its sign), and codes, scales, dbias and amax are those of the quantizers
applied to that h. So leaving a result away changes no bit of the others.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits, quantize
from te_flax.ops._op import Case, KernelOp
from te_flax.ops.mxfp8_values import quantize_values
from te_flax.typing import FLOATS, FP8, Array

SCALINGS = ("none", "tensor", "mxfp8")
_BOTH = ("row", "col")
COPIES = (("row",), ("col",), _BOTH)
# (copies, those of values): of an operand x in inference and in training, and of dy.
X_VALUES = ((("row",), ("row",)), (_BOTH, ("row",)))
DY_VALUES = ((_BOTH, _BOTH),)
_OUT_DTYPES = tuple(np.dtype(t).name for t in FLOATS)


class Variant(NamedTuple):
    """What one op of a family returns besides amax and the family's own results.

    Attributes:
        scaling: "none" (no codes), "tensor" or "mxfp8".
        copies: ("row",), ("col",) or ("row", "col"); () without codes.
        h: whether h itself is returned.
        dbias: whether the sum of h over the tokens is.
        noop: whether a flag keeps the previous results, which are operands then.
        values: the copies that hold the values of their codes in bfloat16; "mxfp8"
            alone has such variants.
    """

    scaling: str = "none"
    copies: tuple[str, ...] = ()
    h: bool = True
    dbias: bool = False
    noop: bool = False
    values: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """What the variant adds to the family's name."""
        words = ["mxfp8" if self.scaling == "mxfp8" else "", "".join(self.copies)]
        words += [f"{''.join(self.values)}values" if self.values else ""]
        words += ["h" if self.h and self.copies else "", "dbias" if self.dbias else ""]
        words += ["noop" if self.noop else ""]
        return "".join(f"_{word}" for word in words if word)


class Fused(NamedTuple):
    """The results of a variant, None for what it does not return.

    Attributes:
        h: ``[M.., K..]`` of ``out_dtype``.
        row: codes like h, or their values.
        row_scale: e8m0 bytes, ``[M.., ceil(K/32)]``.
        col: codes, ``[K.., M..]`` under tensor scaling, else like h.
        col_scale: e8m0 bytes, ``[ceil(M/32), K..]``.
        dbias: float32 ``[K..]``, the sum of h over the tokens.
        amax: float32 ``[2]`` of h.
        extras: the family's own results.
    """

    h: Array | None
    row: Array | None
    row_scale: Array | None
    col: Array | None
    col_scale: Array | None
    dbias: Array | None
    amax: Array
    extras: tuple[Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A function and every way to fuse quantization into it.

    Attributes:
        name: of the plain op; variants append to it.
        compute: ``(*arrays, **attrs) -> (h float32 [M.., K..], *extras)``.
        operands: name -> dims.
        dim: a dim of h between ``M..`` and ``K..``, or None.
        extras: name -> dims of the family's own results, float32.
        summed: extras that are sums over the tokens.
        attrs: name -> type, besides k_ndim, out_dtype and the formats.
        dtypes: operand -> allowed dtypes.
        replicated: dims that the kernel must see whole.
        handler: FFI target.
        handler_attrs: fixed attributes for it.
        workspace: ``(variant, *operand avals, **attrs) -> bytes`` of scratch memory
            that the CUDA handler takes besides that for dbias; None for none.
        unit_dims: see KernelOp.
        supports: ``(*avals, **attrs) -> None`` or why the handler cannot serve them.
        variants: the variants that exist.
        examples: case name -> (sizes of single dims, attributes) of small calls.
    """

    name: str
    compute: Callable[..., tuple]
    operands: Mapping[str, str]
    dim: str | None = None
    extras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    summed: tuple[str, ...] = ()
    attrs: Mapping[str, type] = dataclasses.field(default_factory=dict)
    dtypes: Mapping[str, tuple]
    replicated: tuple[str, ...] = ()
    handler: str
    handler_attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workspace: Callable[..., int] | None = None
    unit_dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    supports: Callable[..., str | None] | None = None
    variants: tuple[Variant, ...]
    examples: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]]
    ops: dict[Variant, KernelOp] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Declares every variant."""
        ops = {variant: _declare(self, variant) for variant in self.variants}
        object.__setattr__(self, "ops", ops)

    def __call__(
        self,
        variant: Variant,
        *arrays: Array,
        scale: Array | None = None,
        previous: tuple[Array, ...] = (),
        format: str | None = None,
        impl: tuple | None = None,
        **attrs: Any,
    ) -> Fused:
        """Runs one variant.

        Args:
            variant: one of ``variants``.
            *arrays: the operands; with noop its flag first.
            scale: float32 ``[]`` under tensor scaling.
            previous: with noop, what this variant returned before, in its order.
            format: of the codes.
            impl: kernel rules; None reads the context.
            **attrs: the family's attributes, k_ndim and out_dtype.

        Returns:
            The results by name.
        """
        if variant not in self.ops:
            rule = "be one of its variants"
            raise ValueError(
                message(self.name, "variant", rule, variant, "unfuse the quantization")
            )
        op = self.ops[variant]
        formats = {f"{copy}_format": format for copy in variant.copies}
        scales = () if scale is None else (scale,)
        found = op(*arrays, *scales, *previous, impl=impl, **formats, **attrs)
        named = dict(zip((a.name for a in op.dims.outs), found, strict=True))
        extras = tuple(named.pop(name) for name in self.extras)
        optional = (named.get(name) for name in Fused._fields[:-2])
        return Fused(*optional, amax=named["amax"], extras=extras)


def variants(
    *,
    dbias: tuple[bool, ...] = (False,),
    h: tuple[bool, ...] = (False, True),
    values: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (),
) -> tuple[Variant, ...]:
    """Returns the full product of layouts, h, dbias and noop, and those of values.

    Args:
        dbias: whether variants with, without or both exist.
        h: likewise for the variants that return codes.
        values: the copies, and those of them that hold values, of further variants.

    Returns:
        The variants.

    Example:
        >>> len(variants())
        26
    """
    found = []
    for with_dbias, noop in itertools.product(dbias, (False, True)):
        if True in h:
            found.append(Variant(dbias=with_dbias, noop=noop))
        found += [
            Variant(scaling, copies, with_h, with_dbias, noop)
            for scaling in ("tensor", "mxfp8")
            for copies in COPIES
            for with_h in h
        ]
    found += [
        Variant("mxfp8", copies, with_h, with_dbias, values=of_values)
        for copies, of_values in values
        for with_h, with_dbias in itertools.product(h, dbias)
    ]
    return tuple(found)


def _results(family: Family, v: Variant) -> dict[str, str]:
    """Name -> dims of what a variant returns, in order."""
    k = f"{family.dim} K.." if family.dim else "K.."
    found = {"h": f"M.. {k}"} if v.h else {}
    if "row" in v.copies:
        found["row"] = f"M.. {k}"
        if v.scaling == "mxfp8":
            found["row_scale"] = f"M.. {family.dim + '+' if family.dim else ''}K../32"
    if "col" in v.copies:
        found["col"] = f"M.. {k}" if v.scaling == "mxfp8" else f"{k} M.."
        if v.scaling == "mxfp8":
            found["col_scale"] = f"M../32 {k}"
    if v.dbias:
        found["dbias"] = k
    return found | {"amax": "2"} | dict(family.extras)


def _quantized(h: Array, v: Variant, scale: tuple, k_ndim: int, formats: Mapping):
    """Codes and scales of h by the quantizers' references, and its amax."""
    if v.scaling == "tensor":
        return quantize._quantize(h, *scale, k_ndim=k_ndim, **formats)
    if v.scaling == "mxfp8":
        return quantize_values(h, k_ndim=k_ndim, values=v.values, **formats)
    return (_bits.amax(_bits.widen(h)),)


def _reference(family: Family, v: Variant) -> Callable[..., tuple]:
    name, count = f"{family.name}{v.suffix}", len(family.operands)
    results = tuple(_results(family, v))

    def reference(*arrays: Array, k_ndim: int, out_dtype: str, **attrs: Any) -> tuple:
        formats = {a: attrs.pop(a) for a in list(attrs) if a.endswith("_format")}
        for attr, format in formats.items():
            _bits.check_format(name, attr, format)
        if out_dtype not in _OUT_DTYPES:
            rule = f"be {' or '.join(_OUT_DTYPES)}"
            raise ValueError(
                message(name, "out_dtype", rule, repr(out_dtype), "cast the result")
            )
        first = int(v.noop)
        own, rest = arrays[first : first + count], arrays[first + count :]
        wide, *extras = family.compute(*own, k_ndim=k_ndim, **attrs)
        h = _bits.narrow(_bits.flush(_bits.as_bits(wide)), out_dtype)
        scale = rest[: int(v.scaling == "tensor")]
        whole = k_ndim + bool(family.dim)
        *codes, amax = _quantized(h, v, scale, whole, formats)
        new = [h] * v.h + codes
        if v.dbias:
            tokens = tuple(range(h.ndim - whole))
            new.append(jnp.sum(h.astype(jnp.float32), tokens))
        new += [amax, *extras]
        if not v.noop:
            return tuple(new)
        return quantize._keep(name, results, arrays[0], rest[len(scale) :], tuple(new))

    return reference


# Rows of h in one partial sum of the CUDA kernels: kSumRows of column_sum.cuh.
_SUM_ROWS = 128


def _workspace(family: Family, v: Variant) -> Callable[..., int] | None:
    """Scratch memory of the CUDA handler: partial sums for dbias, then the family's."""
    if not v.dbias and family.workspace is None:
        return None

    def size(*avals: Any, k_ndim: int, **attrs: Any) -> int:
        own = avals[int(v.noop) : int(v.noop) + len(family.operands)]
        shape = own[-1].shape
        split = len(shape) - k_ndim - bool(family.dim)
        rows, width = math.prod(shape[:split]), math.prod(shape[split:])
        found = 4 * -(-rows // _SUM_ROWS) * width if v.dbias else 0
        if family.workspace is not None:
            found += family.workspace(v, *own, k_ndim=k_ndim, **attrs)
        return found

    return size


def _declare(family: Family, v: Variant) -> KernelOp:
    results = _results(family, v)
    operands, dtypes = dict(family.operands), dict(family.dtypes)
    if v.scaling == "tensor":
        operands["scale"], dtypes["scale"] = "", (jnp.float32,)
    if v.noop:
        of = dict.fromkeys(results, (jnp.float32,))
        of |= {"h": FLOATS} | dict.fromkeys(("row", "col"), tuple(FP8.values()))
        of |= dict.fromkeys(("row_scale", "col_scale"), (jnp.uint8,))
        operands, dtypes = quantize.with_previous(operands, dtypes, results, of)
    formats = [f"{copy}_format" for copy in v.copies]
    reduced = dict.fromkeys((*family.summed, "dbias"), "sum") | {"amax": "max"}
    return KernelOp(
        name=f"{family.name}{v.suffix}",
        signature=quantize.signature(operands, results),
        reference=_reference(family, v),
        attrs={
            **dict.fromkeys(formats, str),
            **family.attrs,
            "k_ndim": int,
            "out_dtype": str,
        },
        groups={"K": "k_ndim"},
        dtypes=dtypes,
        reduce=tuple(reduced.get(name) for name in results),
        replicated=family.replicated,
        batch_group="M",
        handler=f"{family.handler}_values" if v.values else family.handler,
        handler_attrs={
            **family.handler_attrs,
            "scaling": v.scaling,
            "row": "row" in v.copies,
            "col": "col" in v.copies,
            "h": v.h,
            "dbias": v.dbias,
            "noop": v.noop,
        },
        workspace=_workspace(family, v),
        aliases={f"prev_{name}": name for name in results} if v.noop else {},
        unit_dims=family.unit_dims,
        supports=family.supports,
        cases=tuple(_cases(family, v, operands, formats)),
    )


def _cases(family: Family, v: Variant, operands, formats) -> Iterator[Case]:
    """Small ragged calls; the signature sizes all operands."""
    sizes = {"M": 250, "K": 328}
    for (name, (fixed, attrs)), dtype in itertools.product(
        family.examples.items(), FLOATS
    ):
        sizes |= fixed

        def size(word: str, sizes=sizes) -> int:
            names, _, block = word.replace("..", "").partition("/")
            if names.isdigit():
                return int(names)
            whole = np.prod([sizes[n] for n in names.split("+")])
            return -(-int(whole) // int(block or 1))

        shapes = tuple(tuple(map(size, dims.split())) for dims in operands.values())
        own = {n: dtype for n in family.operands if family.dtypes[n] == FLOATS}
        own |= {"prev_h": dtype, "prev_row": FP8["e4m3"], "prev_col": FP8["e4m3"]}
        own |= dict.fromkeys(("prev_row_scale", "prev_col_scale"), jnp.uint8)
        yield Case(
            f"{name}_{np.dtype(dtype).name}",
            shapes,
            tuple(own.get(n, jnp.float32) for n in operands),
            {
                **dict.fromkeys(formats, "e4m3"),
                **attrs,
                "k_ndim": 1,
                "out_dtype": np.dtype(dtype).name,
            },
        )
