"""Every implementation of the quantizers on this machine, and how tests call one."""

import dataclasses
import functools
import importlib

import ml_dtypes
import numpy as np
from _ieee import evaluate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from te_flax.ops import _extension
from te_flax.ops._choice import kernels
from te_flax.ops._op import KernelOp

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
INPUTS = (F32, BF16, F16)
FORMATS = ("e4m3", "e5m2")
CODES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
NATIVE = _extension.has("quantize_tensor", "cpu")

# The properties are exact, so a failure is a defect: no deadline, any example.
examples = settings(max_examples=30, deadline=None)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The reference or the handlers; ieee: subnormals are kept, not flushed."""

    how: str
    simd: str = "auto"
    threads: int = 0
    ieee: bool = False

    def __str__(self) -> str:
        mode = "ieee" if self.ieee else "ftz"
        if self.how == "reference":
            return f"{self.how}-{mode}"
        return f"{self.how}-{self.simd}-{self.threads}-{mode}"

    def __call__(self, op: KernelOp, *arrays, **attrs) -> tuple[np.ndarray, ...]:
        if self.how == "reference" and self.ieee:
            return evaluate(op, *arrays, **attrs)
        if self.how == "native":
            _testing(simd=self.simd, threads=self.threads, ieee=self.ieee)
        try:
            with kernels(f"*={self.how}"):
                return tuple(np.asarray(r) for r in op(*arrays, **attrs))
        finally:
            if self.how == "native":
                _testing()


def _testing(**settings) -> None:
    importlib.import_module("te_flax._C").testing(**settings)


def _levels() -> list[str]:
    def runs(level: str) -> bool:
        try:
            _testing(simd=level)
        except ValueError:  # this CPU lacks it
            return False
        _testing()
        return True

    return [level for level in ("base", "avx2", "avx512") if runs(level)]


LEVELS = _levels() if NATIVE else []
REFERENCE = Implementation("reference")
HANDLERS = [
    Implementation("native", level, threads, ieee)
    for level in LEVELS
    for threads, ieee in ((1, False), (3, True))
]
IMPLEMENTATIONS = [REFERENCE, Implementation("reference", ieee=True), *HANDLERS]


def picks(run: Implementation, index: int, choice: int, choices: int) -> bool:
    """Whether run tries this case: the reference, which compiles each, one in turn."""
    return run is not REFERENCE or index % choices == choice


def once(fn):
    """Computes an expected value once for all implementations."""
    return functools.lru_cache(None)(fn)


def bit_patterns(shape: tuple[int, ...], dtype: np.dtype = F32):
    """Arrays of any bits: subnormals, infinities and NaN payloads included."""
    unsigned = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return hnp.arrays(unsigned, shape).map(lambda bits: bits.view(dtype))


def moderate(shape: tuple[int, ...]):
    """Finite float32 arrays whose values span at most 2^-20 .. 2^20, zeros included."""
    value = st.floats(2.0**-20, 2.0**20, width=32)
    signed = st.one_of(st.just(0.0), value, value.map(lambda v: -v))
    return hnp.arrays(np.float32, shape, elements=signed)
