"""Algorithms are timed once per shape and kept in the user's cache."""

import os
import subprocess
import sys

import jax
import pytest
from _gpu import GPU

from te_flax.ops import _extension

pytestmark = GPU
CODE = """
import time, jax, jax.numpy as jnp, numpy as np
from te_flax.ops._choice import kernels
from te_flax.ops.gemm import gemm
a = jnp.ones(({m}, 256), jnp.float8_e4m3fn)
b = jnp.ones((512, 256), jnp.float8_e4m3fn)
one = jnp.float32(1)
def f(a, b):
    return gemm(a, b, orientation="nt", lhs_scale_inv=one, rhs_scale_inv=one)
with kernels("gemm=native"):
    f = jax.jit(f)
    assert (np.asarray(f(a, b)) == 256).all() and (np.asarray(f(a, b)) == 256).all()
"""
DOT = """
import jax, jax.numpy as jnp
a = jnp.ones((512, 512), jnp.bfloat16)
jax.jit(jnp.dot)(a, a).block_until_ready()
"""
LIBRARIES = """
import pathlib
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
found = {line.split()[-1] for line in lines if "libcublasLt.so" in line}
assert len(found) == 1, found
"""


def run(folder, m=256, code=CODE, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TE_FLAX_")}
    clean |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code.replace("{m}", str(m))],
        env=clean | {"TE_FLAX_CACHE": str(folder), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def entries(folder):
    return (folder / "cublaslt.txt").read_text().splitlines()[1:]


def test_a_shape_is_stored_once(tmp_path):
    folder = tmp_path / "new" / "folder"
    run(folder)
    first = entries(folder)
    assert len(first) == 1
    assert "512x256x256/tn" in first[0]
    run(folder)
    assert entries(folder) == first
    run(folder, m=512)
    assert len(entries(folder)) == 2
    assert first[0] in entries(folder)


def test_a_damaged_file_is_replaced(tmp_path):
    (tmp_path / "cublaslt.txt").write_bytes(b"\x00\xff damaged")
    assert "is damaged: what it lacks is timed again" in run(tmp_path)
    assert len(entries(tmp_path)) == 1
    assert "damaged" not in run(tmp_path)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert "algorithms are timed again in every process" in run(tmp_path / "file")


def test_no_timing(tmp_path):
    run(tmp_path, TE_FLAX_AUTOTUNE="0")
    assert not (tmp_path / "cublaslt.txt").exists()


def test_the_key_names_the_gpu_and_the_library(tmp_path):
    run(tmp_path)
    gpu, version, _ = entries(tmp_path)[0].split("/", 2)
    assert gpu == jax.devices("cuda")[0].device_kind.replace(" ", "_")
    assert int(version) == _extension.cublaslt()[0]


@pytest.mark.parametrize("code", [CODE + DOT, DOT + CODE], ids=["ours", "jax"])
def test_one_copy_of_the_library_is_loaded(tmp_path, code):
    """Whichever product comes first, jax's or ours."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_triton_gemm=false"
    run(tmp_path, code=code + LIBRARIES, XLA_FLAGS=flags)


@pytest.mark.slow
def test_processes_at_once_leave_a_sound_file(tmp_path):
    clean = {**os.environ, "TE_FLAX_CACHE": str(tmp_path)}
    clean |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", CODE.replace("{m}", str(64 * i))], env=clean
        )
        for i in range(1, 5)
    ]
    assert [job.wait() for job in jobs] == [0] * 4
    assert 1 <= len(entries(tmp_path)) <= 4
    assert not list(tmp_path.glob("cublaslt.txt.*"))
