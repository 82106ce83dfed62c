"""Where the GPU tests run, and how they call a handler and compare with the oracle."""

import functools
import os

import jax
import ml_dtypes
import numpy as np
import pytest

from te_flax.ops._choice import kernels
from te_flax.ops._op import KernelOp
from te_flax.testing.patterns import patterns, same_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
INPUTS = (F32, BF16, F16)
FORMATS = ("e4m3", "e5m2")
CODES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
FLAGS = (0.0, -0.0, 1e-40, 1.0, -3.0, np.nan)  # of the noop variants


def _gpus() -> list:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _gpus(), reason="needs an NVIDIA GPU"),
]
# TWO_DEVICES=cpu shows without GPUs that these tests themselves are sound.
_cpus = jax.devices("cpu") if os.environ.get("TWO_DEVICES") == "cpu" else []
PAIR = (_cpus or _gpus())[:2]
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(PAIR) < 2, reason="needs two NVIDIA GPUs"),
]
each_dtype = pytest.mark.parametrize("dtype", INPUTS, ids=str)


@functools.lru_cache(None)
def _compiled(op: KernelOp, attrs: tuple):
    return jax.jit(functools.partial(op, **dict(attrs)))


def native(op: KernelOp, *arrays, **attrs) -> tuple[np.ndarray, ...]:
    """The CUDA handler of op, jitted; an error where it is not built."""
    arrays = jax.device_put(arrays, jax.devices("cuda")[0])
    with kernels("*=native"):
        results = _compiled(op, tuple(sorted(attrs.items())))(*arrays)
    return tuple(np.asarray(r) for r in results)


def agree(got: tuple, expected: tuple) -> None:
    """Asserts that all results have the same bits."""
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


def of_slice(call, x: np.ndarray, start: int):
    """What a call gives of x inside a longer buffer, from ``start`` elements on.

    XLA may pass such a slice as an address inside its operand.
    """
    buffer = np.concatenate([np.ones(start, x.dtype), x.ravel(), np.ones(9, x.dtype)])

    def sliced(buffer):
        part = jax.lax.dynamic_slice(buffer, (start,), (x.size,))
        return call(part.reshape(x.shape))

    return jax.jit(sliced)(buffer)


def formats_of(op: KernelOp, **formats: str) -> dict[str, str]:
    """The formats that this variant takes."""
    return {k: v for k, v in formats.items() if k in op.attrs}


def shuffled(dtype: np.dtype) -> np.ndarray:
    """Every pattern, or every edge, in an order that mixes magnitudes."""
    return np.random.default_rng(7).permutation(patterns(dtype))


def is_finite(x: np.ndarray) -> np.ndarray:
    """np.isfinite, which warns of signalling NaNs in bfloat16."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(x)


def finite(dtype: np.dtype) -> np.ndarray:
    """The finite ones: blocks without NaN and Inf have other scales than 254, 255."""
    x = shuffled(dtype)
    return x[is_finite(x)]
