"""RMSNorm as a test-only op: reductions, replicated dims and a custom_vjp pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from te_flax.ops._op import Case, KernelOp, cotangent_like
from te_flax.testing.numerics import UNIT, sharded_bound, sum_bound
from te_flax.typing import FLOATS


def _f32(a):
    return a.astype(jnp.float32)


def fwd_reference(x, gamma, *, eps):
    rstd = lax.rsqrt(jnp.mean(_f32(x) ** 2, -1) + jnp.float32(eps))
    return (_f32(x) * rstd[..., None] * _f32(gamma)).astype(x.dtype), rstd


def bwd_reference(dy, x, gamma, rstd):
    xh, w = _f32(x) * rstd[..., None], _f32(dy) * _f32(gamma)
    dx = rstd[..., None] * (w - jnp.mean(w * xh, -1, keepdims=True) * xh)
    return dx.astype(x.dtype), jnp.sum(_f32(dy) * xh, tuple(range(x.ndim - 1)))


RMS_FWD = KernelOp(
    name="test_rmsnorm_fwd",
    signature="x: B.. h, gamma: h -> y: B.. h, rstd: B..",
    reference=fwd_reference,
    attrs={"eps": float},
    dtypes={"x": FLOATS, "gamma": FLOATS},
    replicated=("h",),
    batch_group="B",
    cases=(
        Case("3d", ((2, 5, 19), (19,)), (jnp.bfloat16, jnp.float32), {"eps": 1e-6}),
    ),
)
RMS_BWD = KernelOp(
    name="test_rmsnorm_bwd",
    signature="dy: B.. h, x: B.. h, gamma: h, rstd: B.. -> dx: B.. h, dgamma: h",
    reference=bwd_reference,
    replicated=("h",),
    reduce=(None, "sum"),
    batch_group="B",
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rmsnorm(x, gamma, eps=1e-6):
    return RMS_FWD(x, gamma, eps=eps)[0]


def _fwd(x, gamma, eps):
    y, rstd = RMS_FWD(x, gamma, eps=eps)
    return y, (x, gamma, rstd)


def _bwd(eps, res, dy):
    x, gamma, _ = res
    dx, dgamma = RMS_BWD(dy, *res)
    return cotangent_like(dx, x), cotangent_like(dgamma, gamma)


rmsnorm.defvjp(_fwd, _bwd)


def rms(x, gamma):
    """Both gradients of a scalar loss through the op."""
    return jax.grad(lambda x, g: jnp.sum(jnp.square(rmsnorm(x, g))), (0, 1))(x, gamma)


def rms_oracle(x, gamma):
    """The same through autodiff of plain jnp."""

    def loss(x, g):
        return jnp.sum(fwd_reference(x, g, eps=1e-6)[0] ** 2)

    return jax.grad(loss, (0, 1))(x, gamma)


def rms_bounds(x, gamma):
    """Bounds (dx, dgamma) of ``rms`` run twice: sums over h, and over the tokens.

    The relative error of rstd is half that of its mean of h squares, plus a few
    roundings; x * rstd inherits it, and so do both factors of every sum.
    """
    x, gamma = (np.asarray(a, np.float64) for a in (x, gamma))
    h, tokens = x.shape[-1], x[..., 0].size
    rstd = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)
    xh = np.abs(x * rstd)
    dy = 2 * xh * np.abs(gamma)
    w = dy * np.abs(gamma)
    own = (h / 2 + 8) * UNIT  # of rstd, x * rstd, and with a rounding more of dy, w
    mean = np.mean(w * xh, -1, keepdims=True)
    factors = 5 * own / UNIT  # rstd, xh twice, w with its own xh
    dx = rstd * (sum_bound(0, w, factors) + sum_bound(h, mean, factors) * xh)
    terms = np.sum(dy * xh, tuple(range(x.ndim - 1)))
    return sharded_bound(dx), sharded_bound(sum_bound(tokens, terms, 3 * own / UNIT))


def rms_bounds_of(*entries):
    """The bounds of a vmapped call, from the (x, gamma) of its entries."""
    each = [rms_bounds(*e) for e in entries]
    return tuple(np.stack(parts) for parts in zip(*each, strict=True))
