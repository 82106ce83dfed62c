"""Float formats as integers: the same bits whether or not subnormals are flushed.

XLA's CPU threads run with FTZ and DAZ on, GPUs and numpy do not, so nothing here
depends on a float32 subnormal. Casts go through the integers because XLA may drop a
pair of float conversions, and because its float maximum loses NaN in long rows.
"""

import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.typing import FP8, Array

INF = 0x7F800000
MIN_NORMAL = 0x00800000
CODE_NAN = 0x7F
ABS = 0x7FFFFFFF
SIGN = -0x80000000
QUIET_NAN = 0x7FC00000

# dtype -> (mantissa bits, exponent bias, smallest code that is not finite)
_SMALL = {
    jnp.dtype(jnp.float16): (10, 15, 0x7C00),
    jnp.dtype(jnp.float8_e4m3fn): (3, 7, 0x7F),
    jnp.dtype(jnp.float8_e5m2): (2, 15, 0x7C),
}
_UINT = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def check_format(where: str, argument: str, format: str) -> None:
    """Raises ValueError unless format names an FP8 format."""
    if format not in FP8:
        rule = f"be {' or '.join(FP8)}"
        remedy = "e5m2 has the wider range, e4m3 the finer steps"
        raise ValueError(message(where, argument, rule, repr(format), remedy))


def as_float(bits: Array) -> Array:
    """The float32 values of int32 bit patterns."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def as_bits(values: Array) -> Array:
    """The int32 bit patterns of float32 values."""
    return lax.bitcast_convert_type(values, jnp.int32)


def magnitude(bits: Array) -> Array:
    """The bit patterns of the absolute values; they order as the values, NaN last."""
    return bits & ABS


def flush(bits: Array) -> Array:
    """Float32 patterns with every |x| < 2^-126 replaced by the zero of its sign."""
    return jnp.where(magnitude(bits) < MIN_NORMAL, bits & SIGN, bits)


def widen(x: Array) -> Array:
    """The int32 patterns of the float32 values of x (any 8-, 16- or 32-bit float).

    Exact, except that every NaN of an 8-bit format becomes a NaN of the same sign.
    """
    dtype = x.dtype
    codes = lax.bitcast_convert_type(x, _UINT[dtype.itemsize]).astype(jnp.int32)
    if dtype == jnp.float32:
        return as_bits(x)
    if dtype == jnp.bfloat16:
        return codes << 16
    mantissa, bias, not_finite = _SMALL[dtype]
    top = 1 << (8 * dtype.itemsize - 1)
    a = codes & (top - 1)
    has_infinity = dtype != jnp.float8_e4m3fn
    special = (a << (23 - mantissa)) | INF if has_infinity else jnp.int32(QUIET_NAN)
    value = jnp.where(a >= not_finite, special, expand(a, mantissa, bias))
    return value | jnp.where(codes >= top, jnp.int32(SIGN), 0)


def expand(a: Array, mantissa: int, bias: int) -> Array:
    """The float32 patterns of int32 codes without sign, all of them finite."""
    normal = (a << (23 - mantissa)) + ((127 - bias) << 23)
    tiny = as_bits(a.astype(jnp.float32) * jnp.float32(2.0 ** (1 - bias - mantissa)))
    return jnp.where(a < (1 << mantissa), tiny, normal)


def round_to(a: Array, mantissa: int, bias: int) -> Array:
    """Nonnegative float32 patterns to a format of fewer bits, to nearest even."""
    shift = 23 - mantissa
    up = (1 << (shift - 1)) - 1 + ((a >> shift) & 1)
    normal = ((a + up) >> shift) - ((127 - bias) << mantissa)
    # Adding 2^(24 - bias - mantissa), whose ulp is the format's smallest step,
    # rounds in the float adder; a subnormal a rounds to 0 either way.
    magic = jnp.float32(2.0 ** (24 - bias - mantissa))
    tiny = as_bits(as_float(a) + magic) - as_bits(magic)
    return jnp.where(a < ((128 - bias) << 23), tiny, normal)


def encode(bits: Array, format: str) -> Array:
    """Float32 patterns to FP8 codes: nearest even, saturating, every NaN to 0x7F."""
    dtype = jnp.dtype(FP8[format])
    mantissa, bias, not_finite = _SMALL[dtype]
    largest = ((not_finite - 1) << (23 - mantissa)) + ((127 - bias) << 23)
    a = magnitude(bits)
    codes = round_to(jnp.minimum(a, largest), mantissa, bias)
    codes = codes | ((bits >> 24) & 0x80)
    codes = jnp.where(a > INF, CODE_NAN, codes)
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), dtype)


def narrow(bits: Array, out_dtype: str) -> Array:
    """Float32 patterns rounded once to float32, bfloat16 or float16, NaN to +NaN."""
    a = magnitude(bits)
    if out_dtype == "float32":
        return as_float(jnp.where(a > INF, QUIET_NAN, bits))
    sign = (bits >> 16) & 0x8000
    if out_dtype == "bfloat16":
        codes, nan = (a + 0x7FFF + ((a >> 16) & 1)) >> 16, 0x7FC0
    else:
        mantissa, bias, not_finite = _SMALL[jnp.dtype(jnp.float16)]
        codes, nan = jnp.minimum(round_to(a, mantissa, bias), not_finite), 0x7E00
    codes = jnp.where(a > INF, nan, codes | sign)
    return lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.dtype(out_dtype))


def divide(a: Array, b: Array) -> Array:
    """``a / b`` rounded once, of positive normal float32; quotients from 2^-126 on.

    XLA's own division on a GPU is wrong in the last bit.
    """
    a, b = as_bits(a).astype(jnp.uint32), as_bits(b).astype(jnp.uint32)
    exponent = (a >> 23).astype(jnp.int32) - (b >> 23).astype(jnp.int32)
    rest, divisor = ((x & 0x7FFFFF) | 0x800000 for x in (a, b))
    small = rest < divisor
    rest = jnp.where(small, rest << 1, rest)
    exponent = exponent - small.astype(jnp.int32)
    quotient = jnp.zeros_like(rest)
    for _ in range(25):  # 24 bits and the one below them
        fits = rest >= divisor
        quotient = (quotient << 1) | fits.astype(jnp.uint32)
        rest = jnp.where(fits, rest - divisor, rest) << 1
    odd, half = (quotient >> 1) & 1, quotient & 1
    up = half & (odd | (rest != 0).astype(jnp.uint32))
    bits = ((exponent + 126) << 23) + ((quotient >> 1) + up).astype(jnp.int32)
    return as_float(jnp.where(exponent > 127, INF, bits))


def pad_to(x: Array, axis: int, multiple: int) -> Array:
    """Appends zeros along axis up to a multiple; x itself where none are missing."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    zeros = [(0, missing if i == axis % x.ndim else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), zeros)


def amax(bits: Array) -> Array:
    """f32[2]: the largest finite |x|, and 1.0 if any element is NaN or Inf else 0.0."""
    # XLA vectorizes integer maxima of short rows and the float maximum of what is
    # left, not one integer maximum over everything (three times slower).
    a = magnitude(pad_to(bits.reshape(-1), 0, 32).reshape(-1, 32))
    finite = jnp.max(jnp.where((a < INF) & (a >= MIN_NORMAL), a, 0), axis=1)
    bad = (jnp.max(a, axis=1) >= INF).astype(jnp.float32)
    return jnp.stack([jnp.max(as_float(finite), initial=0), jnp.max(bad, initial=0)])
