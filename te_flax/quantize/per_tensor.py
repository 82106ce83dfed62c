"""Tensor scaling: one scale for the whole array, from this step or earlier ones."""

import dataclasses

import jax.numpy as jnp

from te_flax.errors import message
from te_flax.ops._bits import check_format
from te_flax.ops.amax import AMAX, AMAX_TO_SCALE
from te_flax.ops.quantize import QUANTIZE_COL, QUANTIZE_ROW, QUANTIZE_ROWCOL
from te_flax.quantize.mailbox import reduce_amax
from te_flax.quantize.quantizer import Quantized, Scale, check_orientations
from te_flax.quantize.tensor import ScaledTensor
from te_flax.typing import Array

# (rowwise, colwise) -> the op
_OPS = {
    (True, False): QUANTIZE_ROW,
    (False, True): QUANTIZE_COL,
    (True, True): QUANTIZE_ROWCOL,
}
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorQuantizer:
    """``q = cast(clip(x * scale))`` with ``scale = (fp8_max / amax) * 2^-margin``.

    The colwise copy is transposed, ``[K.., M..]``: Hopper's FP8 GEMM reads both
    operands along the contraction.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        margin: powers of two kept free above the amax, 0 to 126.
        power_of_2: whether the scale is rounded down to a power of two.
        epsilon: smallest amax that counts, >= 0.

    Raises:
        ValueError: a field is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> q = TensorQuantizer()(
        ...     jnp.ones((4, 8)), k_ndim=1, rowwise=True, colwise=True
        ... )
        >>> q.rowwise.data.shape, q.colwise.data.shape
        ((4, 8), (8, 4))

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
    (arXiv:2209.05433), section 2 for the scale, section 3 for the formats.
    """

    format: str = "e4m3"
    margin: int = 0
    power_of_2: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        """Checks every field."""
        check_format("TensorQuantizer", "format", self.format)
        if not 0 <= self.margin <= 126:
            rule, remedy = "be >= 0 and <= 126", "use 0 for no margin"
            raise ValueError(
                message("TensorQuantizer", "margin", rule, self.margin, remedy)
            )
        if not 0 <= self.epsilon <= FLOAT32_MAX:
            rule, remedy = f"be >= 0 and <= {FLOAT32_MAX}", "use 0.0 for no floor"
            raise ValueError(
                message("TensorQuantizer", "epsilon", rule, self.epsilon, remedy)
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
        """Quantizes ``x``; without ``scale`` it is read once more, for its amax."""
        check_orientations("TensorQuantizer", rowwise, colwise)
        measured = None
        if scale is None:
            scale, measured = self.measure(x, amax_axes, impl=impl)
        copies = ["row"] * rowwise + ["col"] * colwise
        *codes, found = _OPS[rowwise, colwise](
            x,
            scale.scale,
            k_ndim=k_ndim,
            impl=impl,
            **{f"{name}_format": self.format for name in copies},
        )
        made = dict(zip(copies, codes, strict=True))
        if measured is None:
            measured = reduce_amax(found, amax_axes)
        return Quantized(
            self.tensor(made.get("row"), scale.scale_inv, True, k_ndim),
            self.tensor(made.get("col"), scale.scale_inv, False, k_ndim),
            measured,
        )

    def measure(
        self, x: Array, amax_axes: tuple[str, ...] = (), *, impl: tuple | None = None
    ) -> tuple[Scale, Array]:
        """The scale that x itself asks for, and its amax, float32 ``[2]``."""
        amax = reduce_amax(AMAX(x, impl=impl)[0], amax_axes)
        return self.scale(amax[0], impl=impl), amax

    def scale(self, amax: Array, *, impl: tuple | None = None) -> Scale:
        """The scale that an amax, float32 ``[]``, asks for."""
        scale, scale_inv = AMAX_TO_SCALE(
            amax,
            format=self.format,
            margin=self.margin,
            power_of_2=self.power_of_2,
            epsilon=self.epsilon,
            impl=impl,
        )
        return Scale(scale, scale_inv)

    def tensor(
        self, data: Array | None, scale_inv: Array, rowwise: bool, k_ndim: int
    ) -> ScaledTensor | None:
        """Wraps the codes of one copy, the colwise one transposed; None stays None."""
        if data is None:
            return None
        return ScaledTensor(
            data=data,
            scale=scale_inv,
            scaling="tensor",
            rowwise=rowwise,
            transposed=not rowwise,
            k_ndim=k_ndim,
            format=self.format,
        )
