"""Which copies of block-scaled operands the products of this machine read."""

import contextlib
from collections.abc import Iterator

import jax

from te_flax.errors import message

HOWS = ("codes", "values")
_forced = jax.make_user_context(None)  # part of every jit cache key


def products(scaling: str) -> str:
    """What a product wants of operands under one scaling.

    Tensor cores multiply MXFP8 codes from sm_100 on. On older GPUs the product reads
    the values of the codes in bfloat16, which holds them exactly; the quantizer then
    writes them in the pass that makes the codes.

    Args:
        scaling: as of :class:`te_flax.quantize.tensor.ScaledTensor`.

    Returns:
        "codes", or "values" where plain products of bfloat16 values are faster.

    Example:
        >>> products("tensor")
        'codes'
    """
    if scaling != "mxfp8":
        return "codes"
    return _forced.value or ("values" if _before_blackwell() else "codes")


@contextlib.contextmanager
def mxfp8_products(how: str) -> Iterator[None]:
    """Decides inside a ``with`` block what MXFP8 products read, on any platform.

    Args:
        how: "codes" or "values".

    Yields:
        Nothing.

    Raises:
        ValueError: ``how`` is neither.

    Example:
        >>> with mxfp8_products("values"):
        ...     products("mxfp8")
        'values'
    """
    if how not in HOWS:
        rule = f"be {' or '.join(HOWS)}"
        remedy = "values suit GPUs before sm_100"
        raise ValueError(message("mxfp8_products", "how", rule, repr(how), remedy))
    with _forced(how):
        yield


def _before_blackwell() -> bool:
    """Whether the default devices are NVIDIA GPUs without MXFP8 products."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return capability is not None and float(capability) < 10
