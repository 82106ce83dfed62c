"""ScaledTensor: low-precision codes, their scales, and how they are laid out."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.ops.dequantize import (
    DEQUANTIZE,
    DEQUANTIZE_BLOCK,
    DEQUANTIZE_BLOCK2D,
    DEQUANTIZE_MXFP8_COL,
    DEQUANTIZE_MXFP8_ROW,
)
from te_flax.typing import Array

SCALINGS = ("none", "tensor", "mxfp8", "block_1d", "block_2d")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledTensor:
    """One copy of an array ``[M.., K..]`` in the precision of a GEMM operand.

    ``x ~ codes * scale_inv``, one ``scale_inv`` for the tensor, for each block, or none
    at all (then ``data`` is the array itself).

    Attributes:
        data: codes; ``[M.., K..]``, or ``[K.., M..]`` when ``transposed``.
        scale: float32 ``[]`` under tensor scaling; uint8 e8m0 exponents under MXFP8,
            ``[M.., ceil(K/32)]`` rowwise, ``[ceil(M/32), K..]`` colwise; float32
            ``[M.., ceil(K/128)]`` rowwise, ``[K.., ceil(M/128)]`` colwise under
            "block_1d"; ``[ceil(M/128), ceil(K/128)]`` for both under "block_2d"; else
            None.
        scaling: ``"none"``, ``"tensor"``, ``"mxfp8"``, ``"block_1d"`` or
            ``"block_2d"``.
        rowwise: True for the copy that a GEMM contracts over ``K..``, False for the
            one that it contracts over ``M..``.
        transposed: whether ``data`` holds ``[K.., M..]``.
        k_ndim: number of dims in ``K..``.
        format: ``"e4m3"``, ``"e5m2"`` or None without quantization.

    Example:
        >>> import jax.numpy as jnp
        >>> ScaledTensor(data=jnp.ones((2, 3)), transposed=True).shape
        (3, 2)
    """

    data: Array
    scale: Array | None = None
    scaling: str = dataclasses.field(default="none", metadata={"static": True})
    rowwise: bool = dataclasses.field(default=True, metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    k_ndim: int = dataclasses.field(default=1, metadata={"static": True})
    format: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape ``[M.., K..]``."""
        if not self.transposed:
            return self.data.shape
        return (*self.data.shape[self.k_ndim :], *self.data.shape[: self.k_ndim])

    @property
    def ndim(self) -> int:
        """The number of logical dims."""
        return self.data.ndim

    @property
    def scale_inv(self) -> Array | None:
        """The factor of the codes: float32, or float8_e8m0fnu under MXFP8."""
        if self.scaling == "mxfp8" and self.scale is not None:
            return lax.bitcast_convert_type(self.scale, jnp.float8_e8m0fnu)
        return self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self, dtype=jnp.float32, *, impl: tuple | None = None) -> Array:
        """Returns ``codes * scale_inv`` in the logical layout.

        Args:
            dtype: float32, bfloat16 or float16.
            impl: kernel rules; None reads the context.

        Returns:
            ``[M.., K..]`` of ``dtype``.

        Raises:
            TypeError: ``dtype`` is not one of the three.
            ValueError: ``scaling`` and ``scale`` do not belong together.
        """
        name = jnp.dtype(dtype).name
        if name not in ("float32", "bfloat16", "float16"):
            raise TypeError(
                message(
                    "ScaledTensor.dequantize",
                    "dtype",
                    "be float32, bfloat16 or float16",
                    name,
                    "cast the result instead",
                )
            )
        if self.scaling not in SCALINGS or (
            (self.scale is None) != (self.scaling == "none")
        ):
            raise ValueError(
                message(
                    "ScaledTensor.dequantize",
                    "scaling",
                    f"be 'none' without a scale or one of {', '.join(SCALINGS[1:])} "
                    "with one",
                    f"{self.scaling!r}, scale {jax.typeof(self.scale)}"
                    if self.scale is not None
                    else f"{self.scaling!r} without a scale",
                    "take the tensor from a quantizer",
                )
            )
        if self.scaling == "none":
            return self.data.astype(name)
        if self.scaling == "mxfp8":
            op = DEQUANTIZE_MXFP8_ROW if self.rowwise else DEQUANTIZE_MXFP8_COL
            return op(
                self.data, self.scale, out_dtype=name, k_ndim=self.k_ndim, impl=impl
            )[0]
        x = self._codes_times_scales(name, impl)
        if not self.transposed:
            return x
        m = range(self.k_ndim, x.ndim)
        return jnp.transpose(x, (*m, *range(self.k_ndim)))

    def _codes_times_scales(self, out_dtype: str, impl: tuple | None) -> Array:
        """The values laid out like ``data``."""
        if self.scaling == "tensor":
            return DEQUANTIZE(self.data, self.scale, out_dtype=out_dtype, impl=impl)[0]
        two_d = self.scaling == "block_2d"
        op = DEQUANTIZE_BLOCK2D if two_d else DEQUANTIZE_BLOCK
        return op(
            self.data,
            self.scale.T if two_d and self.transposed else self.scale,
            out_dtype=out_dtype,
            k_ndim=self.data.ndim - self.k_ndim if self.transposed else self.k_ndim,
            impl=impl,
        )[0]
