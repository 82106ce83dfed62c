"""Calls of the fused variants, and what their results must be given h."""

import math

import numpy as np
from _activations import backward, close_to_limits, forward
from _norms import pop_own
from _quantizers import REFERENCE, Implementation

from te_flax.ops import mxfp8
from te_flax.ops._fused import Family, Variant
from te_flax.ops._op import KernelOp
from te_flax.ops.activation import ACT_BWD, ACT_FWD, QUANTIZE_DBIAS
from te_flax.testing import oracle
from te_flax.testing.numerics import close_to, sum_bound
from te_flax.testing.patterns import same_bits

FAMILIES = {family.name: family for family in (ACT_FWD, ACT_BWD, QUANTIZE_DBIAS)}
_NAMES = ("act_fwd", "act_bwd", "quantize_dbias", "norm_fwd", "norm_bwd")
HANDLERS = (*_NAMES, *(f"{name}_values" for name in _NAMES))
CONTRACT = (  # stand for all in tests/ops/test_contract*.py
    "act_bwd_mxfp8_rowcol_h_dbias",
    "act_bwd_rowcol_h_dbias_noop",
    "act_fwd_mxfp8_row_h_noop",
    "act_fwd_rowcol_h",
    "norm_bwd_layernorm_mxfp8_rowcol_h",
    "norm_bwd_rmsnorm_rowcol_h_noop",
    "norm_fwd_layernorm_rowcol_h",
    "norm_fwd_rmsnorm_mxfp8_rowcol_h_noop",
    "quantize_dbias_mxfp8_rowcol_dbias",
)
FORMATS = {"row_format": "e4m3", "col_format": "e5m2"}
VALUES = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
SCALE = np.float32(3.7)
SUM_ROWS = 64
SHAPES = (  # M.., K.., activation
    ((1,), (1024,), "gelu"),
    ((19,), (111,), "silu,linear"),
    ((3, 37), (19,), "gelu_exact,linear"),
    ((1024,), (1,), "clamped_silu,clamped_linear"),
    ((5, 14), (4, 16), "silu,linear"),
    ((0,), (33,), "gelu"),
    ((33,), (0,), "gelu"),
    ((), (40,), "relu"),
)


def draw(family: Family, m, k, dtype, activation="gelu", seed=0):
    """The family's operands, ``m`` and ``k`` shapes, over many decades."""
    rng = np.random.default_rng(seed)
    slices = len(activation.split(","))
    sizes = {"M..": m, "A": (slices,), "K..": k}

    def one(dims):
        shape = [n for word in dims.split() for n in sizes[word]]
        spread = 10.0 ** rng.uniform(-3, 2, shape)
        return (rng.standard_normal(shape) * spread).astype(dtype)

    return [one(dims) for dims in family.operands.values()]


def attributes(family: Family, k, dtype, activation="gelu"):
    """Attributes of a call without the formats."""
    own = {"activation": activation, **VALUES} if "activation" in family.attrs else {}
    return {**own, "k_ndim": len(k), "out_dtype": np.dtype(dtype).name}


def results(
    run: Implementation, family: Family, v: Variant, own, attrs, previous=None, noop=0.0
) -> dict[str, np.ndarray]:
    """The results of one call by name; ``previous`` has those of more results."""
    op = family.ops[v]
    names = [array.name for array in op.dims.outs]
    arrays = [*own] + ([SCALE] if v.scaling == "tensor" else [])
    if v.noop:
        flag = np.array([noop], np.float32)
        arrays = [flag, *arrays, *(previous[name] for name in names)]
    formats = {name: FORMATS[name] for name in op.attrs if name in FORMATS}
    return dict(zip(names, run(op, *arrays, **attrs, **formats), strict=True))


def h_of(found, own):
    """h, which is x itself for the quantizers with dbias."""
    return found.get("h", own[-1])


def of_codes(family: Family) -> list[Variant]:
    """The variants whose copies hold codes; test_mxfp8_values.py has the others."""
    return [v for v in family.variants if not v.values]


def full(family: Family, scaling: str) -> Variant:
    """The variant that returns all there is."""
    last = [v for v in of_codes(family) if v.scaling == scaling and not v.noop]
    return max(last, key=lambda v: (len(v.copies), v.h, v.dbias))


def expected(
    scaling: str, h: np.ndarray, k_ndim: int, formats=FORMATS, scale=SCALE
) -> dict[str, np.ndarray]:
    """Codes, scales, amax and dbias that the quantizers make of h.

    By the numpy oracle, or where that takes long by the references, which equal it.
    """
    options = {"k_ndim": k_ndim, **formats}
    if scaling == "tensor":
        names = ("row", "col", "amax")
        codes = oracle.quantize(h, scale, **options)
    else:
        names = ("row", "row_scale", "col", "col_scale", "amax")
        if h.size > 1 << 15:
            codes = REFERENCE(mxfp8.QUANTIZE_MXFP8_ROWCOL, h, **options)
        else:
            codes = oracle.quantize_mxfp8(h, **options)
    found = {n: np.asarray(c) for n, c in zip(names, codes, strict=True)}
    return found | {"dbias": token_sum(h, k_ndim)}


def with_values(v: Variant, codes: dict, m: int) -> dict[str, np.ndarray]:
    """What v returns, its copies holding values, given that of codes; h has m rows."""
    found = dict(codes)
    for copy in v.values:
        how = {"k_ndim": 1, "axis": 1 if copy == "row" else 0, "out_dtype": "bfloat16"}
        rows = m if copy == "row" else -(-m // 32)
        flat = codes[copy].reshape(m, -1), codes[f"{copy}_scale"].reshape(rows, -1)
        (made,) = oracle.dequantize_mxfp8(*flat, **how)
        found[copy] = made.reshape(codes[copy].shape)
    return found


def token_sum(h: np.ndarray, k_ndim: int) -> np.ndarray:
    """The sum over the tokens in the order of the handlers, NaN positive."""
    k_dims = h.shape[h.ndim - k_ndim :]
    count = math.prod(h.shape[: h.ndim - k_ndim])
    rows = h.astype(np.float32).reshape(count, math.prod(k_dims))

    def one_by_one(values):
        total = np.zeros(values.shape[1:], np.float32)
        for value in values:
            total = total + value
        return total

    with np.errstate(all="ignore"):
        blocks = [
            one_by_one(rows[i : i + SUM_ROWS]) for i in range(0, len(rows), SUM_ROWS)
        ]
        shape = (len(blocks), rows.shape[1])
        total = one_by_one(np.array(blocks, np.float32).reshape(shape))
    return np.where(np.isnan(total), np.float32(np.nan), total).reshape(k_dims)


def same_results(got: dict, want: dict) -> None:
    """All of got, to the bit; want may hold more."""
    for name, value in got.items():
        same_bits(value, want[name])


def check(op: KernelOp, attrs, arrays, got) -> None:
    """One call of a variant that returns h, or of a quantizer with dbias.

    h is within its bound, the rest what the quantizers make of it; dbias within that of
    a sum in any order, as a mesh may take it.
    """
    found = dict(zip((a.name for a in op.dims.outs), map(np.asarray, got), strict=True))
    given = dict(
        zip((a.name for a in op.dims.ins), map(np.asarray, arrays), strict=True)
    )
    h, k_ndim = found.get("h", given["x"]), attrs["k_ndim"]
    if op.handler == "act_fwd":
        close_to_limits(h, *forward(given["x"], attrs))
    elif op.handler == "act_bwd":
        close_to_limits(h, *backward(given["dy"], given["x"], attrs))
    elif op.handler in ("norm_fwd", "norm_bwd"):
        pop_own(op, attrs, given, found)
    formats = {f: attrs.get(f, FORMATS[f]) for f in FORMATS}
    h, whole = h.astype(attrs["out_dtype"]), k_ndim + (op.handler == "act_bwd")
    scaling = op.handler_attrs["scaling"]
    want = expected(scaling, h, whole, formats, given.get("scale", SCALE))
    dbias = found.pop("dbias", None)
    same_results({n: a for n, a in found.items() if n != "h"}, want)
    if dbias is not None:
        tokens = tuple(range(h.ndim - whole))
        wide = h.astype(np.float64)
        count = math.prod(h.shape[: len(tokens)])
        close_to(dbias, wide.sum(tokens), sum_bound(count, np.abs(wide).sum(tokens)))
