"""Error bounds of float32 sums and products, and the comparison that applies them.

Every bound holds for sums taken in any order: of n terms, at most n - 1 additions meet
each term, and each rounds by at most ``UNIT`` of what it holds. So it also covers the
shards' partial sums, and two ways to compute one result differ by at most twice the
bound.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

UNIT = 2.0**-24  # the largest relative error of one float32 rounding


def sum_bound(count: int, size: ArrayLike, rounded: float = 0) -> np.ndarray:
    """Bounds the error of a float32 sum.

    Args:
        count: number of terms.
        size: sum of the magnitudes of the terms, in float64.
        rounded: float32 roundings in each term and after the sum.

    Returns:
        ``(count + rounded) 2^-24 size``, like size.

    Example:
        >>> float(sum_bound(2**20, 16.0))
        1.0
    """
    return (count + rounded) * UNIT * np.asarray(size, np.float64)


def product_bound(
    count: int, size: ArrayLike, rounded: float = 0, *, mode: str | None = None
) -> np.ndarray:
    """Bounds a matrix product's sum.

    - "float32": ``K 2^-24 size``, as of any sum.
    - "wide": 16-bit operands on a tensor core, which truncates: ``K 2^-23 size``.
    - "fast": FP8 operands on Hopper's tensor core. An instruction aligns 32 products
      and the sum so far to the largest of them, truncates each to 13 bits below its
      exponent, adds exactly, and truncates the new sum to 13 bits below its own. None
      of these ``n(K) = K + 2 ceil(K / 32)`` numbers exceeds size, so each loses at most
      ``2^-13 size``: ``n(K) 2^-13 size``. A sum of one large and many tiny products
      comes near it.
    - "split": 128 products at a time go that way, then to a float32 sum. Their sizes
      add up to size: ``(n(min(K, 128)) 2^-13 + K 2^-24) size``.

    Args:
        count: number of products K in an element.
        size: sum of their magnitudes, in float64.
        rounded: float32 roundings after the sum: scales, bias.
        mode: one of these; None: :func:`product_mode`.

    Returns:
        The bound of every element.

    Example:
        >>> float(product_bound(2**20, 16.0, mode="float32"))
        1.0
        >>> float(product_bound(32, 2.0**13, mode="fast"))
        34.0
    """
    mode = mode or product_mode()
    additions = {"float32": count, "wide": 2 * count, "fast": 0, "split": count}[mode]
    lost = _truncations(count, mode) * 2.0**-13 * np.asarray(size, np.float64)
    return lost + sum_bound(additions, size, rounded)


def product_noise(count: int, mode: str) -> float:
    """Bounds the error of a product of random signs, as a share of the Frobenius norm.

    A truncation to steps of u loses between 0 and u of a magnitude, evenly spread: its
    mean square is ``u^2 / 3``. u is at most 2^-13 of the largest number of the
    instruction; the square of a product is at most the sum of the squares of all, which
    is the mean square of the sum so far, so the mean square of u is at most
    ``2 2^-26`` of the result's. The losses of the K products have their random signs
    and add up to sqrt(K) of one; those of the sums, two of each instruction, may all
    have the same: ``2^-13 sqrt(2 / 3) (sqrt(K) + 2 ceil(K / 32))``. "split": of K up to
    128, as the parts are independent. Measured: 1/10 to 1/20 of it.

    Args:
        count: number of products K in an element.
        mode: "fast" or "split".

    Returns:
        The share, without roundings to float32 and narrower dtypes.

    Example:
        >>> 5e-4 < product_noise(17, "fast") < 6.2e-4
        True
    """
    k = min(count, 128) if mode == "split" else count
    return 2.0**-13 * math.sqrt(2 / 3) * (math.sqrt(k) + 2 * -(-k // 32))


def product_mode(*, fp8: bool = True) -> str:
    """Returns how this platform sums products of FP8 codes, or of floats.

    Example:
        >>> product_mode() if jax.default_backend() == "cpu" else "float32"
        'float32'
    """
    if jax.default_backend() != "gpu":
        return "float32"
    return "fast" if fp8 else "wide"


def _truncations(count: int, mode: str) -> int:
    """Numbers that Hopper's tensor core truncates in a partial sum of FP8 products."""
    if mode not in ("fast", "split"):
        return 0
    k = min(count, 128) if mode == "split" else count
    return k + 2 * -(-k // 32)


def output_rounding(exact: ArrayLike, error: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """Bounds the last rounding, from float32 to the dtype of the result.

    Args:
        exact: the result in float64.
        error: bound of the float32 value that is rounded.
        dtype: of the result.

    Returns:
        Half an ulp of the dtype; 0 for float32, whose roundings the sum counts.

    Example:
        >>> float(output_rounding(1.0, 0.0, np.float16)) < 2**-10
        True
    """
    if np.dtype(dtype) == np.float32:
        return np.zeros_like(exact, np.float64)
    info = ml_dtypes.finfo(dtype)
    size = np.asarray(np.abs(exact), np.float64) + np.asarray(error, np.float64)
    return float(info.eps) / 2 * (size + float(info.tiny))


def gemm_bound(
    size: ArrayLike,
    k: int,
    exact: ArrayLike,
    dtype: DTypeLike,
    terms: int = 0,
    *,
    mode: str | None = None,
) -> np.ndarray:
    """Bounds a GEMM: :func:`product_bound`, then the output's rounding.

    Args:
        size: ``sum |a| |b|`` of every element, with the bias, in float64.
        k: number of products in an element.
        exact: the result in float64.
        dtype: of the result.
        terms: float32 roundings after the sum: scales, bias.
        mode: how the products are summed; None: as this platform does.

    Returns:
        The bound of every element.

    Example:
        >>> float(gemm_bound(1.0, 2**24, 1.0, np.float32, mode="float32"))
        1.0
    """
    error = product_bound(k, size, terms, mode=mode)
    return error + output_rounding(exact, error, dtype)


def activation_bound(
    size: ArrayLike,
    argument: ArrayLike,
    exact: ArrayLike,
    dtype: DTypeLike,
    *,
    count: int,
    factor: ArrayLike = 0.0,
) -> np.ndarray:
    """Bounds an activation or its derivative: ``count 2^-24 size (1 + 2 |u|)``.

    In units of 2^-24, x sigmoid(u) sees 2 of the exponential, 1 each of 1 + e, the
    quotient and the product, weighted so that 4 hold where u is near 0, and 5 |u| of
    the rounded argument u: count 4. The second term of the derivative has up to 6 more,
    but is at most 3 |u| of the first, and dy adds 1: count 8 with the magnitudes of
    both terms. Each factor behind, as of a gated slice, adds 1 and what it erred by.

    Args:
        size: the magnitudes of the terms of the result, in float64.
        argument: of the exponential.
        exact: the result in float64.
        dtype: of the result.
        count: float32 roundings.
        factor: what a value below 2^-126, which counts as 0, is multiplied by.

    Returns:
        The bound, with half an ulp of the dtype for the last rounding.

    Example:
        >>> float(activation_bound(2.0**24, 0.0, 0.0, np.float32, count=4)) < 4.001
        True
    """
    u = np.abs(np.asarray(argument, np.float64))
    flushed = 2.0**-126 * (1 + np.asarray(factor, np.float64))
    error = count * UNIT * np.asarray(size, np.float64) * (1 + 2 * u) + flushed
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(np.asarray(exact, np.float64)) + error
    return error + float(info.eps) / 2 * (magnitude + float(info.tiny))


def norm_bound(
    size: ArrayLike,
    k: int,
    exact: ArrayLike,
    dtype: DTypeLike,
    *,
    count: float = 8,
    factor: ArrayLike = 0.0,
) -> np.ndarray:
    """Bounds a norm or its derivative: ``(count + log2(K)) 2^-24 size``.

    Roundings, in units of 2^-24; at most ceil(log2(K)) <= log2(K) + 1 of them meet a
    term of a sum over a row, which runs over a binary tree.

    - RMSNorm, size |h|: the square 1, the sum log2(K) + 1, the quotient and epsilon 1
      each; rstd has half of these 4 + log2(K), and the root and the quotient 1 each;
      1 + gamma and the products with rstd and gamma 1 each: 7 + log2(K) / 2, count 8.
    - LayerNorm, size |gamma| max|x| / std, count 8: the mean, whose second sum mends
      the first, errs by 1 |mean|, by 2 where XLA contracts a product and a sum; that
      shifts the row. x - mean adds 1 to x and 2 to its square, so an element of
      magnitude |x - mean| <= max|x| errs by 9 + log2(K) / 2 of that: with the shift
      at most count + log2(K) from K = 64 on. Larger elements (up to 2 max|x|) and
      shorter rows stay within it unless all roundings conspire.
    - dx, size rstd (|g| + mean|g| + |xhat| mean|g xhat|), count 13: g = dy gamma has 2,
      xhat 2, so the mean of g xhat has 2 + 2 + 1 + log2(K) + 1 + 1; its product with
      xhat adds 3, the two differences and the product with rstd 1 each.

    Args:
        size: in float64; of a LayerNorm plus |h| / count for the sum with beta.
        k: elements in a row.
        exact: the result in float64.
        dtype: of the result.
        count: roundings besides those of one sum.
        factor: what a value below 2^-126, which counts as 0, is multiplied by.

    Returns:
        The bound of every element, with half an ulp of the dtype for the last rounding.

    Example:
        >>> float(norm_bound(2.0**24, 16, 0.0, np.float32)) < 12.001
        True
    """
    steps = count + np.log2(max(k, 1))
    flushed = 2.0**-126 * (1 + np.asarray(factor, np.float64))
    error = steps * UNIT * np.asarray(size, np.float64) + flushed
    info = ml_dtypes.finfo(dtype)
    magnitude = np.abs(np.asarray(exact, np.float64)) + error
    return error + float(info.eps) / 2 * (magnitude + float(info.tiny))


def sharded_bound(bound: ArrayLike) -> np.ndarray:
    """Bounds a sharded result against that of one device: each may err by ``bound``."""
    return 2 * np.asarray(bound)


def chain_bound(counts: Sequence[int], size: ArrayLike) -> np.ndarray:
    """Bounds two runs of a chain of sums, to first order and in the largest entry.

    Args:
        counts: number of terms in each sum that a value passes through.
        size: the result. Each step is taken as well conditioned: it passes a relative
            error on, measured in the largest entry, without amplifying it.

    Returns:
        One bound for all entries.

    Example:
        >>> float(chain_bound([2**22, 2**22], [-1.0, 0.5]))
        1.0
    """
    return sharded_bound(sum_bound(sum(counts), np.max(np.abs(np.asarray(size)))))


def random_sum_bound(count: int, size: ArrayLike) -> float:
    """Bounds two float32 sums of the same terms, whose signs are random, in any orders.

    Each sum errs by at most ``count 2^-24 sum |t|`` (:func:`sum_bound`). With random
    signs the sum is about ``sqrt(count)`` times the root mean square of its terms, and
    ``sum |t|`` at most ``count`` times that: ``sqrt(count)`` of the sum, whose root
    mean square over all entries the largest one exceeds.

    Args:
        count: number of terms in each entry.
        size: the result.

    Returns:
        One bound for all entries.

    Example:
        >>> random_sum_bound(2**16, [-1.0, 0.5])
        2.0
    """
    return float(chain_bound([count], size)) * math.sqrt(count)


def rounding_share(units: Sequence[float]) -> float:
    """Bounds the error of sums of rounded operands, as a share of the Frobenius norm.

    A rounding to low precision errs by ``d |v|``, where d is spread evenly over half a
    step on both sides: its root mean square is at most ``unit / sqrt(3)``, at the lower
    end of a binade. To first order a product has the sum of the errors of all roundings
    that it passed through, which are independent, and a sum of products of random signs
    keeps the share: the squares of errors and of products add up alike. So n roundings
    leave ``sqrt((u_1^2 + .. + u_n^2) / 3)``. Over whole binades one rounding has 0.74
    of its part; that is the margin for slopes and norms, which pass relative errors on
    about as they are. Two results that were rounded apart have the roundings of both.

    Args:
        units: ``unit`` of every rounding in the chain: 2^-4 for e4m3, 2^-3 for e5m2.

    Returns:
        The share.

    Example:
        >>> rounding_share([2.0**-4] * 3)
        0.0625
    """
    return math.sqrt(sum(unit**2 for unit in units) / 3)


def close_to(got: Any, exact: ArrayLike, bound: ArrayLike) -> None:
    """Asserts ``|got - exact| <= bound`` for every element of equal shapes.

    Example:
        >>> close_to(np.float32(1), np.float64(1.25), 0.25)
    """
    found, exact = np.asarray(got).astype(np.float64), np.asarray(exact)
    assert found.shape == exact.shape
    worst = np.max(np.abs(found - exact.astype(np.float64)) - bound, initial=-1.0)
    assert worst <= 0, f"beyond the bound by {worst}"


def trees_close(got: Any, want: Any, bounds: Any = None) -> None:
    """Asserts that two trees agree: within bounds, or to the bit.

    Args:
        got: a tree of arrays.
        want: its expected value, same shapes and dtypes.
        bounds: a tree of the same structure with the bound of every leaf; None asks for
            equal bits, codes and scales always are.

    Example:
        >>> trees_close([np.ones(2)], [np.ones(2)])
    """
    found, expected = jax.tree.leaves(got), jax.tree.leaves(want)
    limits = [0] * len(expected) if bounds is None else jax.tree.leaves(bounds)
    for a, b, limit in zip(found, expected, limits, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if bounds is None or a.dtype.itemsize == 1:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        else:
            close_to(a, np.asarray(b), limit)
