"""Every TE_FLAX_* environment variable that the library reads, once, at import."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The process-wide settings.

    Attributes:
        kernels: ``TE_FLAX_KERNELS``, the outermost rules of :func:`te_flax.kernels`:
            a comma list of ``op-glob=auto|native|reference|jit``.
        simd: ``TE_FLAX_SIMD``, ``auto`` or the instruction set that the CPU handlers
            must use: ``base``, ``avx2`` or ``avx512``. Read by the compiled module.
    """

    kernels: str = ""
    simd: str = "auto"


CONFIG = Config(
    kernels=os.environ.get("TE_FLAX_KERNELS", ""),
    simd=os.environ.get("TE_FLAX_SIMD", "auto"),
)
