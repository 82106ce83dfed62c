"""Norm, GEMM, activation, GEMM and back in float64, quantized as a recipe says.

Written from the formulas, with numpy alone; derivatives of activations by a complex
step. :mod:`te_flax.testing.ball` derives the bounds.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike
from scipy import special

from te_flax.testing.ball import Ball
from te_flax.testing.formats import Rule
from te_flax.testing.numerics import UNIT

_BEND = 4.0  # above the second derivatives of all activations and of their slopes


def _sigmoid(u):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-u))


def _gelu(x, *_):
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _relu(x, *_):
    return np.where(x.real > 0, x, 0)


def _clamped_silu(x, limit, alpha, _):
    x = np.where(x.real <= limit, x, limit)
    return x * _sigmoid(alpha * x)


def _clamped_linear(x, limit, _, offset):
    x = np.where(x.real > limit, limit, np.where(x.real < -limit, -limit, x))
    return x + offset


FUNCTIONS: dict[str, Callable] = {
    "gelu": _gelu,
    "gelu_exact": lambda x, *_: 0.5 * x * special.erfc(-x / math.sqrt(2)),
    "quick_gelu": lambda x, *_: x * _sigmoid(1.702 * x),
    "silu": lambda x, *_: x * _sigmoid(x),
    "relu": _relu,
    "squared_relu": lambda x, *_: _relu(x) ** 2,
    "linear": lambda x, *_: x,
    "clamped_silu": _clamped_silu,
    "clamped_linear": _clamped_linear,
}


def activate(
    name: str, z: Ball, params: tuple = (7.0, 1.702, 1.0)
) -> tuple[Ball, Ball]:
    """The value and the slope of one activation.

    Args:
        name: one of ``FUNCTIONS``.
        z: its input.
        params: limit, alpha and offset of the clamped ones.

    Returns:
        Two balls.

    Example:
        >>> value, slope = activate("squared_relu", Ball.exact([3.0]))
        >>> value.value.tolist(), slope.value.tolist()
        ([9.0], [6.0])
    """
    f = lambda x: FUNCTIONS[name](x, *params).real
    slope = lambda x: FUNCTIONS[name](x + 1e-30j, *params).imag / 1e-30
    u = 2 * np.abs(z.value) + 0.1 * np.abs(z.value) ** 3  # above every argument
    if name in ("relu", "squared_relu", "linear", "clamped_linear"):
        u = np.zeros_like(u)
    near = np.abs(np.abs(z.value) - params[0]) <= z.radius  # a bend inside the ball
    bend = 1.2 * z.radius * (near & name.startswith("clamped"))
    error = lambda size: 4 * UNIT * (1 + 2 * u) * size
    size = np.abs(z.value) + (np.abs(params[2]) if name == "clamped_linear" else 0)
    value = z.followed(f, _BEND, error(np.abs(f(z.value)) + UNIT * size) + bend)
    if name == "clamped_linear":
        value = value.grown(4 * UNIT * size)
    # The slope is a sum of two terms, s and x s (1 - s) u'; both stay below 2.
    return value, z.followed(slope, _BEND, error(_terms(name, z.value, params)))


def _terms(name: str, z: np.ndarray, params: tuple) -> np.ndarray:
    """Sum of the magnitudes of the terms that make the slope."""
    f = FUNCTIONS[name]
    slope = np.abs(f(z + 1e-30j, *params).imag / 1e-30)
    if name in ("relu", "squared_relu", "linear", "clamped_linear"):
        return slope
    half = np.abs(f(z, *params).real) / np.maximum(np.abs(z), 1e-30)
    return slope + 2 * half


class Norm(NamedTuple):
    """What a norm of a matrix returns, with what its backward pass reads."""

    h: Ball
    normed: Ball
    rstd: np.ndarray
    unit: np.ndarray


def norm_fwd(
    kind: str,
    x: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_gamma: bool = False,
) -> Norm:
    """LayerNorm or RMSNorm of the rows.

    Args:
        kind: "layernorm" or "rmsnorm".
        x: ``[tokens, features]``.
        gamma: ``[features]``.
        beta: ``[features]`` or None.
        epsilon: added to the variance.
        zero_centered_gamma: whether the factor is ``1 + gamma``.

    Returns:
        The result and the parts of the backward pass.

    Example:
        >>> norm_fwd("rmsnorm", np.ones((1, 2)), np.ones(2), epsilon=0).h.value.tolist()
        [[1.0, 1.0]]
    """
    factor = gamma + 1 if zero_centered_gamma else gamma
    centred = x - x.mean(-1, keepdims=True) if kind == "layernorm" else x
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normed = centred * rstd
    unit = (8 + math.log2(x.shape[-1])) * UNIT
    size = np.abs(normed)
    if kind == "layernorm":
        size = np.maximum(size, np.abs(x).max(-1, keepdims=True) * rstd)
    h, added = normed * factor, 0.0
    if beta is not None:
        h, added = h + beta, np.abs(beta)
    radius = unit * (np.abs(factor) * size + added)
    relative = unit * size.max(-1, keepdims=True) if kind == "layernorm" else unit
    parts = Ball(h, radius), Ball(normed, unit * size)
    return Norm(*parts, rstd, np.asarray(relative))


def norm_bwd(
    kind: str, dh: Ball, saved: Norm, factor: np.ndarray
) -> tuple[Ball, Ball, Ball]:
    """The gradients of x, gamma and beta.

    Args:
        kind: "layernorm" or "rmsnorm".
        dh: cotangent of the result.
        saved: what the forward pass returned.
        factor: gamma, or 1 + gamma.

    Returns:
        Three balls.
    """
    g = dh.times(Ball.exact(factor))
    normed, rstd = saved.normed, saved.rstd
    mean = lambda a: a.mean(-1, keepdims=True)
    dx = g.value - normed.value * mean(g.value * normed.value)
    size, off = g.largest, normed.largest
    both = size * off
    spread = g.radius + off * mean(both - np.abs(g.value * normed.value))
    spread = spread + normed.radius * mean(both)
    size = size + off * mean(both)
    if kind == "layernorm":
        dx = dx - mean(g.value)
        spread, size = spread + mean(g.radius), size + mean(g.largest)
    radius = rstd * (spread + 2 * (saved.unit + 16 * UNIT) * size)
    return Ball(dx * rstd, radius), dh.times(normed, 2).total(), dh.total()


class GemmGradients(NamedTuple):
    """The results of one GEMM's backward pass."""

    x: Ball
    kernel: Ball
    bias: Ball


def gemm_fwd(rule: Rule, x: Ball, kernel: np.ndarray, bias: ArrayLike = 0.0) -> Ball:
    """``y = x . kernel + bias`` of the quantized operands."""
    rowwise, fp8 = rule("x", x), rule.quantizers is not None
    copy = rule("kernel", Ball.exact(kernel.T)).transposed
    return rowwise.dot(copy, bias, fp8=fp8)


def gemm_bwd(rule: Rule, dy: Ball, x: Ball, kernel: np.ndarray) -> GemmGradients:
    """``dx = dy . kernel^T``, ``dkernel = x^T . dy``, and the sum of dy."""
    fp8 = rule.quantizers is not None
    copy = rule("kernel", Ball.exact(kernel)).transposed
    dx = rule("dy", dy).dot(copy, fp8=fp8)
    colwise = rule("dy", dy.transposed, tokens=True).transposed
    dkernel = rule("x", x.transposed, tokens=True).dot(colwise, fp8=fp8)
    return GemmGradients(dx, dkernel, dy.total())


def layernorm_dense(
    x: np.ndarray,
    params: Mapping[str, np.ndarray],
    dy: np.ndarray,
    *,
    rule: Rule,
    kind: str,
    zero_centered_gamma: bool = False,
    dtype: DTypeLike = np.float32,
) -> dict[str, Ball]:
    """Both passes of ``y = norm(x) . kernel + bias``.

    Args:
        x: ``[tokens, in]``.
        params: scale, norm_bias, kernel ``[in, out]`` and bias in float64.
        dy: ``[tokens, out]``.
        rule: how the GEMM is quantized.
        kind: "layernorm" or "rmsnorm".
        zero_centered_gamma: whether the factor is ``1 + scale``.
        dtype: of x and of everything between the passes.

    Returns:
        h, y, dx and the gradient of every parameter.
    """
    scale = params["scale"]
    norm = norm_fwd(
        kind, x, scale, params.get("norm_bias"), zero_centered_gamma=zero_centered_gamma
    )
    h = norm.h.rounded(dtype)
    y = gemm_fwd(rule, h, params["kernel"], params.get("bias", 0.0)).rounded(dtype)
    grads = gemm_bwd(rule, Ball.exact(dy), h, params["kernel"])
    factor = scale + 1 if zero_centered_gamma else scale
    dx, dscale, dbeta = norm_bwd(kind, grads.x.rounded(dtype), norm, factor)
    found = {"h": h, "y": y, "dx": dx.rounded(dtype), "scale": dscale}
    found |= {"norm_bias": dbeta, "kernel": grads.kernel, "bias": grads.bias}
    return {k: v for k, v in found.items() if k in ("h", "y", "dx") or k in params}


def layernorm_mlp(
    x: np.ndarray,
    params: Mapping[str, np.ndarray],
    dy: np.ndarray,
    *,
    rules: tuple[Rule, Rule],
    kind: str,
    activations: tuple[str, ...],
    activation_params: tuple = (7.0, 1.702, 1.0),
    zero_centered_gamma: bool = False,
    dtype: DTypeLike = np.float32,
) -> dict[str, Ball]:
    """Both passes of ``y = act(norm(x) . wi + bi) . wo + bo``.

    Args:
        x: ``[tokens, in]``.
        params: scale, norm_bias, wi ``[in, n_act * mid]``, wi_bias, wo ``[mid, out]``
            and wo_bias in float64.
        dy: ``[tokens, out]``.
        rules: how the two GEMMs are quantized.
        kind: "layernorm" or "rmsnorm".
        activations: a name for each slice.
        activation_params: limit, alpha and offset of the clamped ones.
        zero_centered_gamma: whether the factor is ``1 + scale``.
        dtype: of x and of everything between the passes.

    Returns:
        z, the activation's result, y, dx and the gradient of every parameter.
    """
    scale, (wi, wo) = params["scale"], rules
    norm = norm_fwd(
        kind, x, scale, params.get("norm_bias"), zero_centered_gamma=zero_centered_gamma
    )
    h = norm.h.rounded(dtype)
    z = gemm_fwd(wi, h, params["wi"], params.get("wi_bias", 0.0)).rounded(dtype)
    count = len(activations)
    parts = [
        activate(name, Ball(value, radius), activation_params)
        for name, value, radius in zip(
            activations,
            np.split(z.value, count, -1),
            np.split(z.radius, count, -1),
            strict=True,
        )
    ]
    mid = parts[0][0] if count == 1 else parts[0][0].times(parts[1][0])
    mid = mid.rounded(dtype)
    y = gemm_fwd(wo, mid, params["wo"], params.get("wo_bias", 0.0)).rounded(dtype)
    outer = gemm_bwd(wo, Ball.exact(dy), mid, params["wo"])
    dmid = outer.x.rounded(dtype)
    dz = [dmid.times(slope) for _, slope in parts]
    if count == 2:
        dz = [dz[0].times(parts[1][0]), dz[1].times(parts[0][0])]
    stacked = Ball(*(np.concatenate(a, -1) for a in zip(*map(_both, dz), strict=True)))
    inner = gemm_bwd(wi, stacked.rounded(dtype), h, params["wi"])
    factor = scale + 1 if zero_centered_gamma else scale
    dx, dscale, dbeta = norm_bwd(kind, inner.x.rounded(dtype), norm, factor)
    found = {"z": z, "mid": mid, "y": y, "dx": dx.rounded(dtype), "scale": dscale}
    found |= {"norm_bias": dbeta, "wi": inner.kernel, "wi_bias": inner.bias}
    found |= {"wo": outer.kernel, "wo_bias": outer.bias}
    always = ("z", "mid", "y", "dx")
    return {k: v for k, v in found.items() if k in always or k in params}


def _both(ball: Ball) -> tuple[np.ndarray, np.ndarray]:
    return ball.value, ball.radius
