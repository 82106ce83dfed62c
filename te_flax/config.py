"""Every TE_FLAX_* environment variable that the Python files read, once, at import.

The compiled module reads ``TE_FLAX_SIMD`` itself when it is loaded: ``auto`` or the
instruction set that the CPU handlers must use: ``base``, ``avx2`` or ``avx512``.
"""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The process-wide settings.

    Attributes:
        kernels: ``TE_FLAX_KERNELS``, the outermost rules of :func:`te_flax.kernels`:
            a comma list of ``op-glob=auto|native|reference|jit``.
    """

    kernels: str = ""


CONFIG = Config(kernels=os.environ.get("TE_FLAX_KERNELS", ""))
