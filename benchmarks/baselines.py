"""What a user writes in plain jnp for the fused ops: the yardstick of the CPU kernels.

None of it is exact in te_flax's sense (docs/numerics.md): NaN keeps its sign, the MXFP8
scale goes through log2. It is the usual code, and XLA may do with it what it likes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from te_flax.typing import Array

FP8_MAX = 448.0
BLOCK = 32


def quantize_row(x: Array, scale: Array) -> tuple[Array, ...]:
    """Clip, cast and take the maximum."""
    x = x.astype(jnp.float32)
    codes = jnp.clip(x * scale, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return codes, jnp.max(jnp.abs(x))


def quantize_rowcol(x: Array, scale: Array) -> tuple[Array, ...]:
    """Clip, cast, transpose and take the maximum."""
    codes, amax = quantize_row(x, scale)
    return codes, codes.T, amax


def _mxfp8(blocks: Array, axis: int) -> tuple[Array, Array]:
    amax = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True)
    exponent = jnp.ceil(jnp.log2(jnp.where(amax == 0, 1, amax / FP8_MAX)))
    exponent = jnp.clip(exponent, -127, 127)
    scaled = jnp.clip(blocks / jnp.exp2(exponent), -FP8_MAX, FP8_MAX)
    scales = (exponent + 127).astype(jnp.uint8)
    return scaled.astype(jnp.float8_e4m3fn), jnp.squeeze(scales, axis)


def _pad(x: Array, axis: int) -> Array:
    pads = [(0, 0), (0, 0)]
    pads[axis] = (0, -x.shape[axis] % BLOCK)
    return jnp.pad(x, pads)


def mxfp8_row(x: Array) -> tuple[Array, ...]:
    """Blocks of 32 along the rows: codes and e8m0 bytes, and the maximum."""
    m, k = x.shape
    x = x.astype(jnp.float32)
    padded = _pad(x, 1) if k % BLOCK else x
    codes, scales = _mxfp8(padded.reshape(m, -1, BLOCK), 2)
    return codes.reshape(padded.shape)[:, :k], scales, jnp.max(jnp.abs(x))


def mxfp8_rowcol(x: Array) -> tuple[Array, ...]:
    """Blocks of 32 along the rows and along the columns."""
    m, k = x.shape
    codes, scales, amax = mxfp8_row(x)
    x = x.astype(jnp.float32)
    padded = _pad(x, 0) if m % BLOCK else x
    col, col_scales = _mxfp8(padded.reshape(-1, BLOCK, k), 1)
    return codes, scales, col.reshape(padded.shape)[:m], col_scales, amax


def layernorm(x: Array, gamma: Array, beta: Array) -> Array:
    """LayerNorm in float32, rounded to the dtype of x."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.var(wide, axis=-1, keepdims=True)
    normed = (wide - mean) * jax.lax.rsqrt(variance + 1e-6)
    return (normed * gamma + beta).astype(x.dtype)


def gelu(x: Array) -> Array:
    """The tanh form in float32, rounded to the dtype of x."""
    return jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype)


def dgelu(dy: Array, x: Array) -> Array:
    """The cotangent of gelu."""
    return jax.vjp(gelu, x)[1](dy)[0]


def _then(quantize: Callable, function: Callable, dbias: bool = False) -> Callable:
    """Quantizes what a function returns, with its sum over the tokens if asked."""

    def fn(*arrays: Array, scale: tuple[Array, ...] = ()) -> tuple[Array, ...]:
        h = function(*arrays)
        sums = (jnp.sum(h.astype(jnp.float32), axis=0),) if dbias else ()
        return (*quantize(h, *scale), *sums)

    return fn


LAYERS = {
    f"{name}_{scaling}": jax.jit(_then(quantize, function, dbias))
    for scaling, quantize in {"tensor": quantize_rowcol, "mxfp8": mxfp8_rowcol}.items()
    for name, function, dbias in (
        ("layernorm", layernorm, False),
        ("gelu", gelu, False),
        ("dgelu_dbias", dgelu, True),
    )
}
BASELINES = {
    name: jax.jit(fn)
    for name, fn in {
        "quantize_row": quantize_row,
        "quantize_rowcol": quantize_rowcol,
        "quantize_mxfp8_row": mxfp8_row,
        "quantize_mxfp8_rowcol": mxfp8_rowcol,
    }.items()
}
