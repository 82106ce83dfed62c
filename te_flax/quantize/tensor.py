"""ScaledTensor: low-precision codes, their scales, and how they are laid out."""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from te_flax.errors import message
from te_flax.ops import fp6
from te_flax.ops._bits import pad_to
from te_flax.ops.dequantize import (
    DEQUANTIZE,
    DEQUANTIZE_BLOCK,
    DEQUANTIZE_BLOCK2D,
    DEQUANTIZE_MXFP6_COL,
    DEQUANTIZE_MXFP6_ROW,
    DEQUANTIZE_MXFP8_COL,
    DEQUANTIZE_MXFP8_ROW,
    DEQUANTIZE_NVFP4,
    DEQUANTIZE_NVFP4_2D,
)
from te_flax.ops.hadamard import rotate_back
from te_flax.typing import Array

SCALINGS = (
    "none",
    "tensor",
    "mxfp8",
    "mxfp6",
    "block_1d",
    "block_2d",
    "nvfp4_1d",
    "nvfp4_2d",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledTensor:
    """One copy of an array ``[M.., K..]`` in the precision of a GEMM operand.

    ``x ~ codes * scale_inv``, one ``scale_inv`` for the tensor, for each block, or none
    at all (then ``data`` is the array itself).

    Attributes:
        data: codes; ``[M.., K..]``, or ``[K.., M..]`` when ``transposed``. Under NVFP4
            two to a byte, ``[M.., ceil(K/2)]`` or ``[K.., ceil(M/2)]``; under MXFP6
            four in three bytes, ``[M.., 3 ceil(K/4)]``.
        scale: float32 ``[]`` under tensor scaling; uint8 e8m0 exponents under MXFP8
            and MXFP6, ``[M.., ceil(K/32)]`` rowwise, ``[ceil(M/32), K..]`` colwise;
            float32 ``[M.., ceil(K/128)]`` rowwise, ``[K.., ceil(M/128)]`` colwise under
            "block_1d"; ``[ceil(M/128), ceil(K/128)]`` for both under "block_2d";
            float8_e4m3fn likewise with 16 in place of 128 under NVFP4; else None.
        global_scale: float32 ``[]``, what the products of codes and block scales are
            multiplied by under NVFP4; else None.
        scaling: ``"none"``, ``"tensor"``, ``"mxfp8"``, ``"mxfp6"``, ``"block_1d"``,
            ``"block_2d"``, ``"nvfp4_1d"`` or ``"nvfp4_2d"``.
        rowwise: True for the copy that a GEMM contracts over ``K..``, False for the
            one that it contracts over ``M..``.
        transposed: whether ``data`` holds ``[K.., M..]``.
        k_ndim: number of dims in ``K..``.
        format: ``"e4m3"``, ``"e5m2"``, ``"e2m3"``, ``"e3m2"``, ``"e2m1"`` or None
            without quantization. With a format and scaling ``"none"``, ``data`` are the
            values of such codes.
        hadamard: whether each 16 elements along ``M..`` hold their Hadamard transform
            (M then rounded up to whole blocks).
        logical_shape: ``[M.., K..]`` where the data do not show it: NVFP4, MXFP6.

    Example:
        >>> import jax.numpy as jnp
        >>> ScaledTensor(data=jnp.ones((2, 3)), transposed=True).shape
        (3, 2)
    """

    data: Array
    scale: Array | None = None
    global_scale: Array | None = None
    scaling: str = dataclasses.field(default="none", metadata={"static": True})
    rowwise: bool = dataclasses.field(default=True, metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    k_ndim: int = dataclasses.field(default=1, metadata={"static": True})
    format: str | None = dataclasses.field(default=None, metadata={"static": True})
    hadamard: bool = dataclasses.field(default=False, metadata={"static": True})
    logical_shape: tuple[int, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape ``[M.., K..]``."""
        if self.logical_shape is not None:
            return self.logical_shape
        if not self.transposed:
            return self.data.shape
        return (*self.data.shape[self.k_ndim :], *self.data.shape[: self.k_ndim])

    @property
    def ndim(self) -> int:
        """The number of logical dims."""
        return len(self.shape)

    @property
    def scale_inv(self) -> Array | None:
        """The factor of the codes: float32, float8_e8m0fnu (MX) or e4m3 (NVFP4)."""
        if self.scaling.startswith("mx") and self.scale is not None:
            return lax.bitcast_convert_type(self.scale, jnp.float8_e8m0fnu)
        return self.scale

    @property
    def scale_like_data(self) -> Array | None:
        """``scale`` with its dims in the order of ``data``; 2-D blocks share one."""
        turned = self.transposed and self.scaling.endswith("_2d")
        return self.scale.T if turned and self.scale is not None else self.scale

    @property
    def holds_values(self) -> bool:
        """Whether ``data`` are the values of codes, to be multiplied as they are."""
        return self.scaling == "none" and self.format is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales."""
        arrays = (self.data, self.scale, self.global_scale)
        return sum(a.nbytes for a in arrays if a is not None)

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
        if self.scaling == "mxfp6":
            return self._of_groups(name, impl)
        if self.scaling.startswith("nvfp4"):
            x = self._unpacked(name, impl)
        else:
            x = self._codes_times_scales(name, impl)
        if not self.transposed:
            return x
        m = range(self.k_ndim, x.ndim)
        return jnp.transpose(x, (*m, *range(self.k_ndim)))

    def values(
        self, dtype=jnp.bfloat16, *, impl: tuple | None = None
    ) -> "ScaledTensor":
        """Returns the copy with the values of its codes in place of them.

        Args:
            dtype: float32, bfloat16 or float16.
            impl: kernel rules; None reads the context.

        Returns:
            Scaling ``"none"`` and the same format: ready for a plain product.
        """
        return dataclasses.replace(
            self,
            data=self.dequantize(dtype, impl=impl),
            scale=None,
            scaling="none",
            logical_shape=None,
        )

    def _of_groups(self, out_dtype: str, impl: tuple | None) -> Array:
        """The values of MXFP6 codes in the logical layout."""
        m_dims = self.shape[: self.ndim - self.k_ndim]
        data, scale = fp6.split(self.data), cast(Array, self.scale)
        op, k = DEQUANTIZE_MXFP6_ROW, math.prod(self.shape[len(m_dims) :])
        if not self.rowwise:  # a scale for every code of the last group too
            op = DEQUANTIZE_MXFP6_COL
            scale = pad_to(scale.reshape(scale.shape[0], k), 1, 4)
            scale = scale.reshape(*scale.shape[:1], scale.shape[1] // 4, 4)
        options = {"format": self.format, "out_dtype": out_dtype, "k_ndim": 1}
        x = op(data, scale, impl=impl, **options)[0]
        return x.reshape(*m_dims, 4 * data.shape[-2])[..., :k].reshape(self.shape)

    def _codes_times_scales(self, out_dtype: str, impl: tuple | None) -> Array:
        """The values laid out like ``data``."""
        if self.scaling == "tensor":
            return DEQUANTIZE(self.data, self.scale, out_dtype=out_dtype, impl=impl)[0]
        two_d = self.scaling == "block_2d"
        op = DEQUANTIZE_BLOCK2D if two_d else DEQUANTIZE_BLOCK
        return op(
            self.data,
            self.scale_like_data,
            out_dtype=out_dtype,
            k_ndim=self.data.ndim - self.k_ndim if self.transposed else self.k_ndim,
            impl=impl,
        )[0]

    def _unpacked(self, out_dtype: str, impl: tuple | None) -> Array:
        """The values of NVFP4 codes in the order of ``data``, with the logical dims."""
        two_d = self.scaling == "nvfp4_2d"
        pairs = (DEQUANTIZE_NVFP4_2D if two_d else DEQUANTIZE_NVFP4)(
            self.data,
            self.scale_like_data,
            self.global_scale,
            out_dtype="float32" if self.hadamard else out_dtype,
            k_ndim=1,
            impl=impl,
        )[0]
        at = self.ndim - self.k_ndim
        m_dims, k_dims = self.shape[:at], self.shape[at:]
        kept, packed = (k_dims, m_dims) if self.transposed else (m_dims, k_dims)
        x = pairs.reshape(*kept, 2 * self.data.shape[-1])
        if self.hadamard:
            blocks = x.reshape(*kept, x.shape[-1] // 16, 16)
            x = rotate_back(blocks).astype(out_dtype)
        return x[..., : math.prod(packed)].reshape(*kept, *packed)
