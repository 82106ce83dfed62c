"""The largest magnitude of a tensor, and the scale that a magnitude asks for."""

import jax.numpy as jnp
import numpy as np

from te_flax.errors import message
from te_flax.ops import _bits
from te_flax.ops._op import Case, KernelOp
from te_flax.typing import FLOATS, FP8_MAX, Array

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _amax(x: Array) -> tuple[Array]:
    return (_bits.amax(_bits.widen(x)),)


def _check_scale_attrs(format: str, margin: int, epsilon: float) -> None:
    where = "amax_to_scale"
    _bits.check_format(where, "format", format)
    if not 0 <= margin <= 126:
        rule, remedy = "be in 0..126", "use 0 for no margin"
        raise ValueError(message(where, "margin", rule, margin, remedy))
    if not 0 <= epsilon <= _FLOAT32_MAX:
        rule, remedy = "be a finite float32 >= 0", "use 0.0 for none"
        raise ValueError(message(where, "epsilon", rule, epsilon, remedy))


def _amax_to_scale(
    amax: Array, *, format: str, margin: int, power_of_2: bool, epsilon: float
) -> tuple[Array, Array]:
    _check_scale_attrs(format, margin, epsilon)
    bits = _bits.flush(_bits.as_bits(amax))
    finite = _bits.magnitude(bits) < _bits.INF
    floor = np.float32(epsilon)  # as a handler gets it; then flushed like any input
    floor = floor if floor >= 2.0**-126 else np.float32(0)
    a = jnp.maximum(_bits.as_float(jnp.where(finite, bits, 0)), floor)
    usable = finite & (a > 0)
    scale = _bits.divide(jnp.float32(FP8_MAX[format]), jnp.where(usable, a, 1))
    scale = scale * jnp.float32(2.0**-margin)
    # The product may be subnormal; flushed or not, the clamp lifts it to 2^-126.
    scale = jnp.clip(scale, jnp.float32(2.0**-126), jnp.float32(2.0**126))
    if power_of_2:
        scale = _bits.as_float(_bits.as_bits(scale) & _bits.INF)
    scale = jnp.where(usable, scale, 1)
    return scale, _bits.divide(jnp.float32(1), scale)


AMAX = KernelOp(
    name="amax",
    signature="x: D.. -> amax: 2",
    reference=_amax,
    dtypes={"x": FLOATS},
    reduce=("max",),
    batch_group="D",
    handler="amax",
    cases=tuple(Case(np.dtype(t).name, ((250, 328),), (t,), {}) for t in FLOATS),
)

AMAX_TO_SCALE = KernelOp(
    name="amax_to_scale",
    signature="amax: B.. -> scale: B.., scale_inv: B..",
    reference=_amax_to_scale,
    attrs={"format": str, "margin": int, "power_of_2": bool, "epsilon": float},
    dtypes={"amax": (jnp.float32,)},
    batch_group="B",
    handler="amax_to_scale",
    cases=tuple(
        Case(
            f"{format}_{'power_of_2' if power_of_2 else 'exact'}",
            ((64,),),
            (jnp.float32,),
            {
                "format": format,
                "margin": 0,
                "power_of_2": power_of_2,
                "epsilon": 0.0,
            },
        )
        for format in FP8_MAX
        for power_of_2 in (False, True)
    ),
)
