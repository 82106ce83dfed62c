"""Block-scaled FP8 quantization: a float32 scale for 128 or for 128 x 128 elements."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits
from te_flax.ops._op import KernelOp
from te_flax.ops.quantize import declare
from te_flax.typing import FLOATS, FP8_MAX, Array

BLOCK = 128
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_ROUND_UP = 0x1FFFFF  # from 1.75 on, the significand of both maxima, the exponent grows


def check_epsilon(where: str, argument: str, epsilon: float) -> None:
    """Raises ValueError unless epsilon is a finite float32 >= 0."""
    if not 0 <= epsilon <= _FLOAT32_MAX:
        rule, remedy = "be a finite float32 >= 0", "use 0.0 for none"
        raise ValueError(message(where, argument, rule, epsilon, remedy))


def _block_scale(
    a: Array, format: str, power_of_2: bool, epsilon: float
) -> tuple[Array, Array]:
    """Scales and their inverses; a is the float32 pattern of a block's finite amax."""
    floor = np.float32(epsilon)
    floor = floor if floor >= 2.0**-126 else np.float32(0)
    a = jnp.maximum(a, int(floor.view(np.int32)))
    usable = a > 0
    if power_of_2:
        # floor(log2(max / a)) from the exponents: max is 1.75 * 2^n in both formats,
        # and no division can round a quotient below 1 up to it.
        _, exponent = math.frexp(FP8_MAX[format])
        e = exponent - 1 + 127 + 127 - ((a + _ROUND_UP) >> 23)
        e = jnp.where(usable, jnp.clip(e, 1, 253), 127)
        return _bits.as_float(e << 23), _bits.as_float((254 - e) << 23)
    amax = _bits.as_float(jnp.where(usable, a, _bits.as_bits(jnp.float32(1))))
    scale = jnp.float32(FP8_MAX[format]) / amax
    scale = jnp.clip(scale, jnp.float32(2.0**-126), jnp.float32(2.0**126))
    scale = jnp.where(usable, scale, 1)
    return scale, 1 / scale


def _quantize_blocks(
    bits: Array, block: tuple[int, int], format: str, power_of_2: bool, epsilon: float
) -> tuple[Array, Array]:
    """Codes and scale_inv of a flushed matrix cut into blocks of one shape."""
    padded = _bits.pad_to(_bits.pad_to(bits, 0, block[0]), 1, block[1])
    rows, cols = (n // b for n, b in zip(padded.shape, block, strict=True))
    blocks = padded.reshape(rows, block[0], cols, block[1])
    a = _bits.magnitude(blocks)
    a = jnp.where(a < _bits.INF, a, 0)
    a = jnp.max(a, axis=(1, 3), keepdims=True, initial=0)
    scale, scale_inv = _block_scale(a, format, power_of_2, epsilon)
    scaled = _bits.as_bits(_bits.as_float(blocks) * scale)
    codes = _bits.encode(scaled, format).reshape(padded.shape)
    return codes[: bits.shape[0], : bits.shape[1]], scale_inv.reshape(rows, cols)


def _matrix(x: Array, k_ndim: int) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """The flushed bits of x as [M, K], and the dims of M and of K."""
    m_dims, k_dims = x.shape[: x.ndim - k_ndim], x.shape[x.ndim - k_ndim :]
    bits = _bits.flush(_bits.widen(x))
    return bits.reshape(math.prod(m_dims), math.prod(k_dims)), m_dims, k_dims


def _quantize_1d(
    x: Array,
    *,
    k_ndim: int,
    power_of_2: bool,
    epsilon: float,
    row_format: str | None = None,
    col_format: str | None = None,
) -> tuple[Array, ...]:
    """1 x 128 blocks along K, and along M for the transposed copy."""
    check_epsilon("quantize_block", "epsilon", epsilon)
    bits, m_dims, k_dims = _matrix(x, k_ndim)
    results = []
    if row_format is not None:
        codes, scale_inv = _quantize_blocks(
            bits, (1, BLOCK), row_format, power_of_2, epsilon
        )
        results.append(codes.reshape(x.shape))
        results.append(scale_inv.reshape(*m_dims, scale_inv.shape[1]))
    if col_format is not None:
        codes, scale_inv = _quantize_blocks(
            bits, (BLOCK, 1), col_format, power_of_2, epsilon
        )
        results.append(codes.T.reshape(*k_dims, *m_dims))
        results.append(scale_inv.T.reshape(*k_dims, scale_inv.shape[0]))
    return (*results, _bits.amax(bits))


def _quantize_2d(
    x: Array,
    *,
    k_ndim: int,
    format: str,
    power_of_2: bool,
    epsilon: float,
    copies: tuple[str, ...],
) -> tuple[Array, ...]:
    """128 x 128 blocks: both copies hold the same codes and share their scales."""
    check_epsilon("quantize_block2d", "epsilon", epsilon)
    bits, m_dims, k_dims = _matrix(x, k_ndim)
    codes, scale_inv = _quantize_blocks(
        bits, (BLOCK, BLOCK), format, power_of_2, epsilon
    )
    both = {
        "row": codes.reshape(x.shape),
        "col": codes.T.reshape(*k_dims, *m_dims),
    }
    return (*(both[copy] for copy in copies), scale_inv, _bits.amax(bits))


_DIMS_1D = {
    "row": {"row": "M.. K..", "row_scale": f"M.. K../{BLOCK}"},
    "col": {"col": "K.. M..", "col_scale": f"K.. M../{BLOCK}"},
}
_DIMS_2D = {"row": "M.. K..", "col": "K.. M.."}


def _block_op(*copies: str, two_dimensional: bool = False, noop: bool) -> KernelOp:
    if two_dimensional:
        results = {copy: _DIMS_2D[copy] for copy in copies}
        results |= {"scale_inv": f"M../{BLOCK} K../{BLOCK}"}
        reference = functools.partial(_quantize_2d, copies=copies)
    else:
        results = {n: dims for copy in copies for n, dims in _DIMS_1D[copy].items()}
        reference = _quantize_1d
    family = "quantize_block2d" if two_dimensional else "quantize_block"
    return declare(
        f"{family}_{''.join(copies)}{'_noop' if noop else ''}",
        reference,
        {"x": "M.. K.."},
        results | {"amax": "2"},
        noop=noop,
        formats=("format",) if two_dimensional else None,
        attrs={"power_of_2": True, "epsilon": 0.0},
        scale_dtype=jnp.float32,
        dtypes={"x": FLOATS},
        handler="quantize_block",
        handler_attrs={"two_dimensional": two_dimensional},
    )


QUANTIZE_BLOCK_ROW = _block_op("row", noop=False)
QUANTIZE_BLOCK_COL = _block_op("col", noop=False)
QUANTIZE_BLOCK_ROWCOL = _block_op("row", "col", noop=False)
QUANTIZE_BLOCK_ROW_NOOP = _block_op("row", noop=True)
QUANTIZE_BLOCK_COL_NOOP = _block_op("col", noop=True)
QUANTIZE_BLOCK_ROWCOL_NOOP = _block_op("row", "col", noop=True)
QUANTIZE_BLOCK2D_ROW = _block_op("row", two_dimensional=True, noop=False)
QUANTIZE_BLOCK2D_COL = _block_op("col", two_dimensional=True, noop=False)
QUANTIZE_BLOCK2D_ROWCOL = _block_op("row", "col", two_dimensional=True, noop=False)
QUANTIZE_BLOCK2D_ROW_NOOP = _block_op("row", two_dimensional=True, noop=True)
QUANTIZE_BLOCK2D_COL_NOOP = _block_op("col", two_dimensional=True, noop=True)
QUANTIZE_BLOCK2D_ROWCOL_NOOP = _block_op("row", "col", two_dimensional=True, noop=True)
