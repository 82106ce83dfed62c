"""Block scaling: a float32 scale for each 128, or each 128 x 128, elements."""

import dataclasses

from te_flax.errors import message
from te_flax.ops import block as ops
from te_flax.ops._bits import check_format
from te_flax.ops.block import check_epsilon
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

_OPS = {
    (False, True, False): ops.QUANTIZE_BLOCK_ROW,
    (False, False, True): ops.QUANTIZE_BLOCK_COL,
    (False, True, True): ops.QUANTIZE_BLOCK_ROWCOL,
    (True, True, False): ops.QUANTIZE_BLOCK2D_ROW,
    (True, False, True): ops.QUANTIZE_BLOCK2D_COL,
    (True, True, True): ops.QUANTIZE_BLOCK2D_ROWCOL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockQuantizer:
    """``q = cast(clip(x * scale))`` with ``scale = fp8_max / max(amax, epsilon)``.

    One scale for each 1 x 128 block along the contraction, or for each 128 x 128
    block, whose two copies then share codes and scales. The colwise copy is
    transposed, ``[K.., M..]``. A block's amax counts finite elements only; NaN becomes
    the NaN code and an infinity the format's largest value, as in tensor scaling.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        two_dimensional: whether blocks are 128 x 128, for kernels.
        power_of_2: whether scales are rounded down to a power of two.
        epsilon: smallest amax that counts, a finite float32 >= 0.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> q = BlockQuantizer()(
        ...     jnp.ones((4, 256)), k_ndim=1, rowwise=True, colwise=True
        ... )
        >>> q.rowwise.scale.shape, q.colwise.data.shape, q.colwise.scale.shape
        ((4, 2), (256, 4), (256, 1))

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437),
    section 3.3.2.
    """

    format: str = "e4m3"
    two_dimensional: bool = False
    power_of_2: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        """Checks every field."""
        check_format("BlockQuantizer", "format", self.format)
        check_epsilon("BlockQuantizer", "epsilon", self.epsilon)
        for name in ("two_dimensional", "power_of_2"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                rule, remedy = "be True or False", "pass a Python bool"
                raise ValueError(
                    message("BlockQuantizer", name, rule, repr(value), remedy)
                )

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
        """Quantizes ``x``; see :class:`te_flax.quantize.quantizer.Quantizer`."""
        check_orientations("BlockQuantizer", rowwise, colwise)
        asked = {"row": rowwise, "col": colwise}
        copies = [name for name in asked if asked[name]]
        formats = ["format"]
        if not self.two_dimensional:
            formats = [f"{name}_format" for name in copies]
        *arrays, measured = _OPS[self.two_dimensional, rowwise, colwise](
            x,
            k_ndim=k_ndim,
            power_of_2=self.power_of_2,
            epsilon=float(self.epsilon),
            impl=impl,
            **dict.fromkeys(formats, self.format),
        )
        if self.two_dimensional:  # one array of scales for both
            *codes, shared = arrays
            scales = [shared] * len(codes)
        else:
            codes, scales = arrays[::2], arrays[1::2]
        made = {
            name: ScaledTensor(
                data=data,
                scale=block_scale,
                scaling="block_2d" if self.two_dimensional else "block_1d",
                rowwise=name == "row",
                transposed=name == "col",
                k_ndim=k_ndim,
                format=self.format,
            )
            for name, data, block_scale in zip(copies, codes, scales, strict=True)
        }
        measured = reduce_amax(measured, amax_axes)
        return Quantized(made.get("row"), made.get("col"), measured)
