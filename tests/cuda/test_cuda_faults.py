"""Faults of the machine on a GPU: by name an error that says why, else right numbers.

A GPU that is too old, a library that does not load and a build for other GPUs are
pretended in Python, where the choice is made; memory really runs out.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _dense import RECIPES
from _gpu import CODES, GPU, same_bits
from _operands import attributes, operands
from test_dense_general import (
    test_both_passes_stay_within_the_error_of_the_format as check_both_passes,
)

import te_flax as te
from te_flax.ops import _extension, _report
from te_flax.ops.amax import AMAX
from te_flax.ops.gemm import gemm, gemm_op

pytestmark = GPU
# M, K, N that FP8 products cannot take as they are.
SHAPES = [(63, 17, 24), (1, 48, 24), (128, 48, 17), (64, 17, 32)]


def product(rules):
    """A tensor-scaled product of exact values, and whether our handler made it."""
    codes = np.random.default_rng(0).integers(-8, 9, (2, 32, 64))
    lhs, rhs = codes.astype(CODES["e4m3"])
    one = jnp.float32(1)

    def f(lhs, rhs):
        options = {"orientation": "nt", "split_accumulator": True}
        return gemm(lhs, rhs, lhs_scale_inv=one, rhs_scale_inv=one, **options)

    with te.kernels(rules):
        lowered = jax.jit(f).lower(*jax.device_put((lhs, rhs), jax.devices("cuda")[0]))
    got = np.asarray(lowered.compile()(lhs, rhs))
    np.testing.assert_array_equal(got, (codes[0] @ codes[1].T).astype(got.dtype))
    return "te_flax.gemm" in lowered.as_text()


def refuses(rules, why):
    """By name an error with the reason."""
    with pytest.raises(NotImplementedError, match=why):
        product(rules)


def test_a_product_runs_in_our_handler():
    assert product("gemm=native")
    assert product("gemm=auto")


def test_a_gpu_older_than_sm_89(monkeypatch):
    monkeypatch.setattr(_extension, "compute_capability", lambda: 80)
    refuses("gemm=native", "need sm_89 or newer, and the GPU is sm_80")
    assert not product("gemm=auto")


def test_cublaslt_does_not_load(monkeypatch):
    problem = "libcublasLt.so.13: cannot open shared object file"
    monkeypatch.setattr(_extension, "cublaslt", lambda: (0, problem))
    refuses("gemm=native", f"cuBLASLt does not load .{problem}")
    assert not product("gemm=auto")


def test_cublaslt_is_too_old_for_scaled_blocks(monkeypatch):
    monkeypatch.setattr(_extension, "cublaslt", lambda: (120803, ""))
    op = gemm_op("nt", "block_1d", False)
    given = operands(op, {"B": (128,), "K": (128,), "N": (128,)})
    f = jax.jit(functools.partial(op, **attributes(op)))
    why = r"need cuBLASLt 12\.9, and it is 12\.8"
    with te.kernels("gemm=native"), pytest.raises(NotImplementedError, match=why):
        f.lower(*given)
    with te.kernels("gemm=auto"):
        assert "te_flax.gemm" not in f.lower(*given).as_text()


def test_a_build_without_code_for_this_gpu(monkeypatch):
    """The modules know their architectures; the device is the real one."""
    device = jax.devices("cuda")[0]
    monkeypatch.setitem(_extension.load().info, "cuda_archs", ["75", "120a"])
    monkeypatch.setattr(_extension, "_no_image", _extension._no_image.__wrapped__)
    capability = str(device.compute_capability).replace(".", "")
    why = f"has code for sm_75, sm_120a and .* is sm_{capability}; install te_flax with"
    refuses("gemm=native", why)
    assert not product("gemm=auto")
    x = jax.device_put(np.float32([1, -3, 2]), device)
    with te.kernels("amax=native"), pytest.raises(NotImplementedError, match=why):
        jax.jit(lambda x: AMAX(x))(x)
    same_bits(np.asarray(jax.jit(lambda x: AMAX(x))(x)[0]), np.float32([3, 0]))
    found = {row.why for row in _report.rows() if row.platform == "cuda"}
    assert any("has code for sm_75" in reason for reason in found)


# Operands and result take two thirds of the memory, the workspace as much again.
EXHAUST = """
import jax, jax.numpy as jnp, numpy as np
import te_flax as te
from te_flax.ops.gemm import gemm
limit = jax.devices("cuda")[0].memory_stats()["bytes_limit"]
n = int((limit / 6) ** 0.5) // 256 * 256
@jax.jit
def f(a, b, s, t):
    scales = {"lhs_scale_inv": s, "rhs_scale_inv": t}
    return gemm(a, b, orientation="nt", out_dtype="bfloat16", **scales)
def call(n):
    a = jnp.ones((n, n), jnp.float8_e4m3fn)
    s = jnp.full((n, n // 32), 127, jnp.uint8)
    return np.asarray(f(a, a, s, s)[0, :4], np.float32)
with te.kernels("gemm=native"):
    try:
        call(n)
        print("no error at", n, limit)
    except jax.errors.JaxRuntimeError as error:
        print("error:", str(error)[:300])
    print("then", call(256))
"""


def test_memory_for_a_workspace_runs_out(tmp_path):
    """XLA's own error, before any kernel runs; smaller calls go on."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    clean |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".003"}
    clean |= {"TE_FLAX_AUTOTUNE": "0", "TE_FLAX_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", EXHAUST], env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "error: RESOURCE_EXHAUSTED" in done.stdout, done.stdout
    assert "then [256. 256. 256. 256.]" in done.stdout, done.stdout


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_products_cannot_take_are_padded(recipe, shape):
    """In both passes of a layer, by our handler alone."""
    with te.kernels("gemm=native"):
        check_both_passes(recipe, shape)
