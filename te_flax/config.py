"""Every TE_FLAX_* environment variable that the Python files read, once, at import.

The compiled module reads ``TE_FLAX_SIMD`` itself when it is loaded: ``auto`` or the
instruction set that the CPU handlers must use: ``base``, ``avx2`` or ``avx512``.
"""

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The process-wide settings.

    Attributes:
        kernels: ``TE_FLAX_KERNELS``, the outermost rules of :func:`te_flax.kernels`:
            a comma list of ``op-glob=auto|native|reference|jit``.
        autotune: ``TE_FLAX_AUTOTUNE``, "0" to take the first algorithm that cuBLASLt
            proposes for a product on a GPU, anything else to time the candidates once
            per shape.
        cache: ``TE_FLAX_CACHE``, the folder of what this library keeps for the user;
            empty for ``te_flax`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
        deterministic: ``TE_FLAX_DETERMINISTIC``, "1" for attention whose gradients
            are the same bits in every run.
        jit: ``TE_FLAX_JIT``, "1" to prefer kernels generated at run time where
            :func:`te_flax.kernels` says ``auto`` and a backend has one.
        jit_warn: ``TE_FLAX_JIT_WARN``, "1" to log once per op and reason why none was
            used.
        jit_cache: ``TE_FLAX_JIT_CACHE``, "0" to keep no generated kernels on disk.
        jit_arch: ``TE_FLAX_JIT_ARCH``, such as "sm_90a", to generate for another GPU
            than the local one; empty for that.
    """

    kernels: str = ""
    autotune: str = "1"
    cache: str = ""
    deterministic: str = ""
    jit: str = ""
    jit_warn: str = ""
    jit_cache: str = ""
    jit_arch: str = ""

    def cache_folder(self) -> Path | None:
        """Returns the folder, which may not exist; None without a home directory."""
        if self.cache:
            return Path(self.cache)
        try:
            base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:
            return None
        return Path(base, "te_flax")


CONFIG = Config(
    kernels=os.environ.get("TE_FLAX_KERNELS", ""),
    autotune=os.environ.get("TE_FLAX_AUTOTUNE", "1"),
    cache=os.environ.get("TE_FLAX_CACHE", ""),
    deterministic=os.environ.get("TE_FLAX_DETERMINISTIC", ""),
    jit=os.environ.get("TE_FLAX_JIT", ""),
    jit_warn=os.environ.get("TE_FLAX_JIT_WARN", ""),
    jit_cache=os.environ.get("TE_FLAX_JIT_CACHE", ""),
    jit_arch=os.environ.get("TE_FLAX_JIT_ARCH", ""),
)
