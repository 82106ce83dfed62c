"""What the CUDA handler of the GEMM ops serves, and how much memory it needs."""

import math
from typing import Any

import jax.numpy as jnp

from te_flax.ops import _extension

_LIBRARY = 32 << 20  # scratch memory of cuBLASLt
_REGION = 256
_FP8_SCALINGS = ("tensor", "block_1d", "block_2d")


def prefers_reference(platform: str, *_avals, **_attrs) -> str | None:
    """Says why ``auto`` leaves products to XLA: on the CPU its dot is all there is.

    On the GPU the algorithms timed here won, without scales too: 1.00x of plain
    flax.nnx over both passes of a layer, where the reference had 0.96x.
    """
    return "exact upcast and XLA's dot" if platform == "cpu" else None


def supports(
    *avals, names: tuple[str, ...], orientation: str, scaling: str, **attrs: Any
) -> str | None:
    """Returns why the handler cannot multiply operands of these types, or None."""
    lhs, rhs = avals[:2]
    wide = {jnp.dtype(jnp.float64)} & {*(a.dtype for a in avals)}
    if wide or attrs["out_dtype"] == "float64":
        return "float64 is left to XLA"
    if scaling.startswith("nvfp4"):
        return "NVFP4 codes are widened exactly and left to XLA's dot"
    if scaling == "none" and lhs.dtype == jnp.float32:
        return "float32 operands are left to XLA"
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2 and scaling in _FP8_SCALINGS:
        return "no GPU multiplies e5m2 by e5m2"
    if scaling == "tensor" and orientation != "nt":
        return "an FP8 product needs the contraction last in both operands"
    version, problem = _extension.cublaslt()
    if not version:
        return f"cuBLASLt does not load ({problem})"
    return _why_not_here(scaling, version, _extension.compute_capability())


def _why_not_here(scaling: str, version: int, capability: int | None) -> str | None:
    """What a library and a GPU (None: unknown, another machine's) lack."""
    if scaling == "tensor" and capability is not None and capability < 89:
        return f"FP8 products need sm_89 or newer, and the GPU is sm_{capability}"
    if scaling in ("block_1d", "block_2d"):
        if capability not in (None, 90):
            return (
                f"products of scaled blocks need sm_90, and the GPU is sm_{capability}"
            )
        if version < 120900:
            have = f"{version // 10000}.{version // 100 % 100}"
            return f"products of scaled blocks need cuBLASLt 12.9, and it is {have}"
    return None


def workspace(
    *avals, names: tuple[str, ...], orientation: str, scaling: str, **attrs: Any
) -> int:
    """Returns the bytes of scratch memory that the handler may use.

    csrc/cuda/gemm_call.cc lays them out: the library's own, then copies of operands and
    scales where the library cannot read them as they are, then float32 sums where it
    cannot write the result. MXFP8 operands become bfloat16.
    """
    given = dict(zip(names, avals, strict=True))
    k_ndim = attrs["k_ndim"]
    m, k = _matrix(given["lhs"].shape, k_ndim, last=orientation[0] == "n")
    n, _ = _matrix(given["rhs"].shape, k_ndim, last=orientation[1] == "t")
    blocks, codes = scaling.startswith("block"), scaling in _FP8_SCALINGS
    whole_k = _up(k, 128 if blocks else 16) if codes else k
    whole_m = _up(m, 16) if blocks else m
    whole_n = _up(n, 16) if codes else n
    parts = [_REGION, _LIBRARY]  # the first one aligns the others
    for rows, whole in ((m, whole_m), (n, whole_n)):
        if scaling == "mxfp8":
            parts.append(max(2 * rows * k, 512 * _ceil(rows, 128) * _ceil(k, 128)))
        elif (rows, k) != (whole, whole_k):
            parts.append(whole * whole_k)
    if blocks:
        across = whole_k // 128
        parts.append(4 * across * whole_m)
        if scaling == "block_1d":
            parts.append(4 * across * whole_n)
        elif across % 4:
            parts.append(4 * _ceil(whole_n, 128) * _up(across, 4))
    padded, out_dtype = (m, n) != (whole_m, whole_n), attrs["out_dtype"]
    in_place = out_dtype == "float32" and not padded  # the sums lie in the result
    ends = (m if orientation[0] == "t" else k, n if orientation[1] == "n" else k, n)
    aligned = codes or all(end % 8 == 0 for end in ends)
    if padded or not (in_place or _writes(given, scaling, out_dtype, aligned)):
        parts.append(4 * whole_m * whole_n)
    return sum(_up(part, _REGION) for part in parts)


def _writes(given: dict[str, Any], scaling: str, out_dtype: str, aligned: bool) -> bool:
    """Whether cuBLASLt writes the dtype of the result, with the bias in its own.

    Where rows of 16-bit operands are not ``aligned`` to 16 bytes, it may add the bias
    to a product that was already rounded.
    """
    codes = scaling in _FP8_SCALINGS
    if scaling == "tensor":
        written = ("float32", "bfloat16", "float16")
    elif scaling == "none":
        written = ("float32", given["lhs"].dtype.name)
    else:
        written = ("float32", "bfloat16")
    if out_dtype not in written:
        return False
    if "bias" not in given:
        return True
    bias = given["bias"].dtype.name
    if out_dtype == "float32":
        return bias == ("bfloat16" if codes else "float32")
    return bias == out_dtype and aligned


def _matrix(shape: tuple[int, ...], k_ndim: int, *, last: bool) -> tuple[int, int]:
    """Returns the sizes of what remains and of the contraction."""
    split = len(shape) - k_ndim if last else k_ndim
    first, second = math.prod(shape[:split]), math.prod(shape[split:])
    return (first, second) if last else (second, first)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _up(a: int, b: int) -> int:
    return _ceil(a, b) * b
