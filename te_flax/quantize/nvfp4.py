"""NVFP4: e2m1 codes with an e4m3 scale for each 16 and one float32 scale for all."""

import dataclasses

import jax
import jax.numpy as jnp

from te_flax.errors import message
from te_flax.ops import nvfp4 as ops
from te_flax.ops.amax import AMAX
from te_flax.ops.hadamard import HADAMARD
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

_TWO_D = {
    (True, False): ops.QUANTIZE_NVFP4_2D_ROW,
    (False, True): ops.QUANTIZE_NVFP4_2D_COL,
    (True, True): ops.QUANTIZE_NVFP4_2D_ROWCOL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Quantizer:
    """``q = e2m1(x * scale / s)`` with ``s = e4m3(amax of the block * scale / 6)``.

    ``scale = 6 * 448 / amax`` of the tensor, and ``x ~ q * s / scale``. The blocks are
    1 x 16 along the contraction, or 16 x 16, whose two copies share codes and scales.
    Codes are packed two to a byte; the colwise copy is transposed. A block with a NaN
    has a NaN scale; one with an infinity the largest scale, under which infinities are
    the tensor's largest finite magnitude.

    Args:
        two_dimensional: whether blocks are 16 x 16, for kernels.
        hadamard: whether each 16 tokens of the colwise copy are replaced by their
            Hadamard transform. A product over the tokens of two such copies is that of
            the arrays themselves. A block with a NaN or an infinity becomes NaN.
        stochastic: whether codes are rounded up or down at random, so that their
            expectation is x (within 6 * s / scale); without a key, to nearest.

    Raises:
        ValueError: a field is no bool, or 16 x 16 blocks are to be transformed or
            rounded at random.

    Example:
        >>> x = jnp.ones((4, 40))
        >>> q = NVFP4Quantizer()(x, k_ndim=1, rowwise=True, colwise=False).rowwise
        >>> q.data.shape, q.scale.shape, q.shape
        ((4, 20), (4, 3), (4, 40))

    Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4"
    (arXiv:2509.25149), sections 2 and 4.
    """

    two_dimensional: bool = False
    hadamard: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                self._refuse(field.name, "be True or False", value, "pass a bool")
            elif value and self.two_dimensional and field.name != "two_dimensional":
                rule = "be False with two_dimensional"
                self._refuse(field.name, rule, value, "use 1 x 16 blocks")

    def _refuse(self, field: str, rule: str, got: object, remedy: str) -> None:
        raise ValueError(message("NVFP4Quantizer", field, rule, repr(got), remedy))

    def __call__(
        self,
        x: Array,
        *,
        k_ndim: int,
        rowwise: bool,
        colwise: bool,
        scale: Scale | None = None,
        amax_axes: tuple[str, ...] = (),
        key: Array | None = None,
        impl: tuple | None = None,
    ) -> Quantized:
        """Quantizes ``x``; see :class:`te_flax.quantize.quantizer.Quantizer`.

        The draws depend on ``key`` and the shape of ``x`` alone, not on its sharding.
        Inside ``jax.shard_map`` that shape is the shard's: fold the axis index into the
        key, or all shards draw the same. ``scale`` is ignored: the two copies may need
        different ones.
        """
        check_orientations("NVFP4Quantizer", rowwise, colwise)
        measured = reduce_amax(AMAX(x, impl=impl)[0], amax_axes)
        levels = ops.NVFP4_SCALE(measured[0], impl=impl)
        row = col = None
        common = {"k_ndim": k_ndim, "format": "e2m1", "logical_shape": x.shape}
        if self.two_dimensional:
            *codes, block_scale, _ = _TWO_D[rowwise, colwise](
                x, levels[0], k_ndim=k_ndim, impl=impl
            )
            common |= {"scale": block_scale, "global_scale": levels[1]}
            common |= {"scaling": "nvfp4_2d"}
            if rowwise:
                row = ScaledTensor(data=codes[0], **common)
            if colwise:
                col = ScaledTensor(
                    data=codes[-1], rowwise=False, transposed=True, **common
                )
            return Quantized(row, col, measured)
        keys = _keys(key if self.stochastic else None)
        common |= {"scaling": "nvfp4_1d"}
        if rowwise:
            row = self._copy(x, levels, k_ndim, keys[0], impl, common)
        if colwise:
            common |= {"rowwise": False, "transposed": True, "hadamard": self.hadamard}
            order = (*range(x.ndim - k_ndim, x.ndim), *range(x.ndim - k_ndim))
            last = x.ndim - k_ndim
            y = jnp.transpose(x, order)
            if self.hadamard:  # has an amax of its own
                y, last = HADAMARD(x, k_ndim=k_ndim, impl=impl)[0], 2
                own = reduce_amax(AMAX(y, impl=impl)[0], amax_axes)
                levels = ops.NVFP4_SCALE(own[0], impl=impl)
            col = self._copy(y, levels, last, keys[1], impl, common)
        return Quantized(row, col, measured)

    def _copy(self, x, scale, k_ndim: int, key, impl, common: dict) -> ScaledTensor:
        """The codes of an array that is laid out as its copy will be."""
        if key is None:
            op, random = ops.QUANTIZE_NVFP4_ROW, ()
        else:
            op = ops.QUANTIZE_NVFP4_ROW_STOCHASTIC
            random = (jax.random.bits(key, x.shape, jnp.uint32),)
        data, block_scale, _ = op(x, scale[0], *random, k_ndim=k_ndim, impl=impl)
        return ScaledTensor(
            data=data, scale=block_scale, global_scale=scale[1], **common
        )


def _keys(key: Array | None) -> tuple[Array | None, Array | None]:
    """A key for each copy: rounded with the same draws, their errors would agree."""
    if key is None:
        return None, None
    row, col = jax.random.split(key)
    return row, col
