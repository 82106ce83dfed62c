"""How an array travels to other devices: bit by bit, in no more bytes than it has."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from te_flax.typing import Array

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def sent(a: Array, send: Callable[[Array], Array]) -> Array:
    """Applies ``send``, which moves values and changes none, bit by bit.

    XLA's CPU backend gathers bfloat16 as float32, which loses NaN payloads, and FP8 as
    float16: there the bits travel as integers. XLA's GPU backend gathers every type as
    it is, FP8 as NCCL's int8, and runs a bitcast-convert beside the call of a handler
    as a kernel that copies.

    Args:
        a: values of one, two or four bytes.
        send: a gather, or any other move, of an array of a's shape.
    """

    def as_bits(a: Array) -> Array:
        bits = lax.bitcast_convert_type(a, _BITS[a.dtype.itemsize])
        return lax.bitcast_convert_type(send(bits), a.dtype)

    return lax.platform_dependent(a, cpu=as_bits, default=send)
