"""Backends for tests: one that makes nothing, and one whose kernels are Python."""

import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from te_flax.backends import disk, registry
from te_flax.backends.protocol import KernelBackend
from te_flax.ops import _jit

X = jnp.arange(8.0, dtype=jnp.float32)
TARGET = "te_flax.jit.amax."


class Fake(KernelBackend):
    """Counts what is asked of it; its kernels exist in the text of a program only."""

    platform = "cpu"

    def __init__(self, name="fake", *, missing=None, refuses=None, fails=None):
        self.name = name
        self.missing, self.refuses, self.fails = missing, refuses, fails
        self.built, self.named, self.asked = [], [], 0
        self.source, self.release = "1", "1.0"

    def version(self):
        return self.release

    def source_hash(self):
        return self.source

    def available(self):
        self.asked += 1
        return self.missing

    def supports(self, call):
        return self.refuses

    def build(self, key, stem):
        self.built.append(key)
        time.sleep(0.02)
        if self.fails:
            raise RuntimeError(self.fails)
        return object()

    def register(self, name, function):
        self.named.append(name)


class Filed(Fake):
    """A backend whose kernels are files."""

    suffixes = (".k",)
    loads = 0

    def build(self, key, stem):
        super().build(key, stem)
        file = stem.with_name(stem.name + ".k")
        file.write_bytes(b"kernel")
        return file

    def load(self, file: Path):
        self.loads += 1
        data = file.read_bytes()
        if not data.startswith(b"kernel"):
            raise OSError("no kernel")
        return data


class Called(Fake):
    """Kernels that are Python functions of numpy arrays, through the real bridge."""

    def __init__(self, function, name="called", **options):
        super().__init__(name, **options)
        self.function = function

    def build(self, key, stem):
        import tvm_ffi  # pyright: ignore[reportMissingImports]

        return tvm_ffi.convert(lambda *tensors: self.function(*map(as_numpy, tensors)))

    def register(self, name, function):
        KernelBackend.register(self, name, function)


def as_numpy(tensor) -> np.ndarray:
    """The memory of a tensor: numpy takes neither bfloat16 nor FP8 by DLPack."""
    import ctypes

    dtype = jnp.dtype(str(tensor.dtype))
    count = int(np.prod(tensor.shape)) * dtype.itemsize
    memory = (ctypes.c_uint8 * count).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), dtype).reshape(tuple(tensor.shape))


def configure(monkeypatch, **fields) -> None:
    """Settings, as if they had been in the environment."""
    config = dataclasses.replace(registry.CONFIG, **fields)
    for module in (registry, disk, _jit):
        monkeypatch.setattr(module, "CONFIG", config)


def text(op, *arrays, **attrs) -> str:
    """The program of a call."""
    return jax.jit(lambda *a: op(*a, **attrs)).lower(*arrays).as_text()
