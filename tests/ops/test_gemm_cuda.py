"""The Python side of the CUDA products: what they serve, their memory, their cache."""

import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from te_flax.config import Config
from te_flax.ops import gemm_cuda
from te_flax.ops.gemm import gemm_op
from te_flax.ops.gemm_variants import GEMMS, SCALINGS

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BASE = (32 << 20) + 256  # the library's, and what aligns it
ROOT = Path(__file__).parents[2]


def types(*shapes, dtypes):
    return [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]


def attributes(out_dtype="bfloat16", k_ndim=1):
    rest = {"split_accumulator": True, "precision": "default"}
    return {"out_dtype": out_dtype, "k_ndim": k_ndim, "keep_contraction": False} | rest


def size(scaling, m, k, n, out_dtype="bfloat16", bias=None, orientation="nt"):
    """Scratch bytes beyond those of every product."""
    op = gemm_op(orientation, scaling, bias is not None)
    lhs = (m, k) if orientation[0] == "n" else (k, m)
    rhs = (n, k) if orientation[1] == "t" else (k, n)
    kind = jnp.bfloat16 if scaling == "none" else E4M3
    shapes, dtypes = [lhs, rhs], [kind, kind]
    if scaling != "none":
        shapes += [(), ()]  # the formula does not read them
        dtypes += [jnp.float32] * 2
    if bias is not None:
        shapes, dtypes = [*shapes, (n,)], [*dtypes, bias]
    avals = types(*shapes, dtypes=dtypes)
    assert op.workspace is not None
    return op.workspace(*avals, **attributes(out_dtype)) - BASE


def test_whole_tiles_need_no_copies():
    for out_dtype in ("float32", "bfloat16", "float16"):
        assert size("tensor", 64, 128, 256, out_dtype) == 0
    assert size("tensor", 63, 128, 256) == 0  # M may be anything
    for orientation in ("nn", "nt", "tn", "tt"):
        assert size("none", 63, 17, 5, orientation=orientation) == 0


def test_padded_copies_and_float32_sums():
    # K 17 -> 32, N 24 -> 32: both operands, then the sums.
    assert size("tensor", 64, 17, 24) == 64 * 32 + 32 * 32 + 4 * 64 * 32
    assert size("tensor", 64, 32, 24) == 32 * 32 + 4 * 64 * 32  # rhs alone
    assert size("tensor", 64, 17, 32) == 64 * 32 + 32 * 32  # no sums
    # M 63 -> 64, K 200 -> 256; scales [2, 64] and [2, 144], or 2 rows of 2 -> 4.
    padded = 64 * 256 + 144 * 256
    sums = 4 * 64 * 144
    assert size("block_1d", 63, 200, 144) == padded + 512 + 1280 + sums
    assert size("block_2d", 63, 200, 144) == padded + 512 + 256 + sums
    assert size("block_2d", 64, 512, 144) == 4 * 4 * 64  # a row of scales is whole


def test_mxfp8_becomes_bfloat16():
    assert size("mxfp8", 64, 128, 256) == 2 * 128 * (64 + 256)
    assert size("mxfp8", 1, 32, 1) == 2 * 512  # room for swizzled scales instead


def test_sums_where_the_library_cannot_write_the_result():
    sums = 4 * 64 * 256
    for scaling, out_dtype, bias, extra in (
        ("none", "float16", None, sums),
        ("none", "bfloat16", jnp.bfloat16, 0),
        ("none", "bfloat16", jnp.float32, sums),
        ("none", "float32", jnp.float32, 0),
        ("tensor", "float32", jnp.bfloat16, 0),
        ("tensor", "float32", jnp.float32, 0),  # in place
        ("tensor", "float16", jnp.float16, 0),
        ("block_2d", "float16", None, 4 * 4 * 64 + sums),
    ):
        assert size(scaling, 64, 512, 256, out_dtype, bias) == extra


def test_sums_where_the_bias_would_meet_a_rounded_product():
    copies = 2 * 63 * 200 + 2 * 144 * 200
    for m, k, n, orientation, aligned in (
        *[(63, 200, 144, "nt", True), (63, 200, 144, "tn", False)],
        *[(64, 17, 144, "nt", False), (64, 17, 144, "tn", True)],
        *[(64, 200, 12, "nt", False), (64, 200, 12, "tt", False)],
    ):
        up = 256 * -(-4 * m * n // 256)
        for bias, sums in ((None, 0), (jnp.bfloat16, 0 if aligned else up)):
            assert size("none", m, k, n, bias=bias, orientation=orientation) == sums
    for orientation, sums in (("nn", 0), ("tn", 4 * 63 * 144)):
        got = size("mxfp8", 63, 200, 144, bias=jnp.bfloat16, orientation=orientation)
        assert 0 <= got - copies - sums < 3 * 256


def test_empty_dims_have_a_size():
    for scaling in ("none", "tensor", "mxfp8", "block_1d", "block_2d"):
        for m, k, n in ((0, 32, 16), (16, 0, 16), (16, 32, 0)):
            assert size(scaling, m, k, n) >= 0


@pytest.fixture
def machine(monkeypatch):
    """Pretends a library version and a GPU."""

    def pretend(version=130100, capability=90, problem=""):
        found = version, problem
        monkeypatch.setattr(gemm_cuda._extension, "cublaslt", lambda: found)
        monkeypatch.setattr(
            gemm_cuda._extension, "compute_capability", lambda: capability
        )

    pretend()
    return pretend


def why_not(scaling, dtypes=(E4M3, E4M3), orientation="nt", out_dtype="bfloat16"):
    op = gemm_op(orientation, scaling, False)
    assert op.supports is not None
    avals = types((8, 8), (8, 8), dtypes=dtypes)
    return op.supports(*avals, **attributes(out_dtype)) or ""


def test_what_the_handler_serves(machine):
    assert why_not("none", (jnp.bfloat16,) * 2, "tn") == ""
    for pair in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        for scaling in ("tensor", "block_1d", "block_2d", "mxfp8"):
            assert why_not(scaling, pair) == ""
    assert why_not("mxfp8", (E5M2, E5M2), "nn") == ""
    machine(capability=None)  # lowering for another machine
    assert why_not("block_2d") == ""


def test_what_it_leaves_to_xla_and_why(machine):
    assert "float64" in why_not("none", (jnp.float64,) * 2)
    assert "float64" in why_not("tensor", out_dtype="float64")
    assert "float32 operands" in why_not("none", (jnp.float32,) * 2)
    assert "NVFP4" in why_not("nvfp4_2d", (jnp.uint8,) * 2)
    assert "e5m2 by e5m2" in why_not("tensor", (E5M2, E5M2))
    assert "contraction last" in why_not("tensor", orientation="nn")
    machine(capability=80)
    assert why_not("tensor") == "FP8 products need sm_89 or newer, and the GPU is sm_80"
    assert why_not("mxfp8") == ""
    machine(capability=100)
    assert "blocks need sm_90, and the GPU is sm_100" in why_not("block_1d")
    machine(version=120803)
    assert "need cuBLASLt 12.9, and it is 12.8" in why_not("block_2d")
    assert why_not("tensor") == ""
    machine(version=0, problem="libcublasLt.so.13: cannot open")
    assert why_not("tensor") == (
        "cuBLASLt does not load (libcublasLt.so.13: cannot open)"
    )


def test_what_auto_leaves_to_xla():
    for op in GEMMS.values():
        assert op.prefers_reference is not None
        assert op.prefers_reference("cpu") == "exact upcast and XLA's dot"
        assert op.prefers_reference("cuda") is None
    assert set(SCALINGS) == {scaling for _, scaling, _ in GEMMS}


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().cache_folder() == tmp_path / "te_flax"
    assert Config(cache="/own").cache_folder() == Path("/own")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config().cache_folder() == tmp_path / ".cache" / "te_flax"


DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#include "cuda/gemm_cache.h"
// file [key word]: adds an entry, or prints all of them and the warning.
int main(int n, char** args) {
  if (n == 4) {
    te_flax::cuda::AlgoWords words = {};
    words[0] = std::strtoull(args[3], nullptr, 16);
    words[7] = ~0ull;
    std::puts(te_flax::cuda::AddAlgo(args[1], args[2], words).c_str());
  } else {
    std::string warning;
    for (const auto& [key, words] : te_flax::cuda::ReadAlgos(args[1], &warning))
      std::printf("%s %lx %lx\n", key.c_str(), words[0], words[7]);
    std::puts(warning.c_str());
  }
}
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Runs the cache file's C++ code."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cc").write_text(DRIVER)
    sources = [folder / "driver.cc", ROOT / "csrc/cuda/gemm_cache.cc"]
    command = [compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", *sources]
    subprocess.run([*command, "-o", folder / "driver"], check=True)

    def run(*args):
        done = subprocess.run(
            [folder / "driver", *map(str, args)], check=True, capture_output=True
        )
        return done.stdout.decode().strip()

    return run


def test_cache_file_round_trip(cache, tmp_path):
    file = tmp_path / "new" / "folder" / "algorithms.txt"
    assert cache(file) == ""
    assert cache(file, "b/2x3", "abc") == ""
    assert cache(file, "a", "1") == ""
    assert cache(file, "b/2x3", "def") == ""  # replaces
    ones = "f" * 16
    assert cache(file).splitlines() == [f"a 1 {ones}", f"b/2x3 def {ones}"]
    assert [f.name for f in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "damage", [b"", b"\x00\xff", b"another format\nkey 1\n"], ids=repr
)
def test_damaged_cache_file(cache, tmp_path, damage):
    file = tmp_path / "algorithms.txt"
    file.write_bytes(damage)
    assert "is damaged: what it lacks is timed again" in cache(file)
    assert cache(file, "key", "7") == ""
    assert cache(file) == f"key 7 {'f' * 16}"


def test_a_cut_cache_file_keeps_what_is_whole(cache, tmp_path):
    file = tmp_path / "algorithms.txt"
    cache(file, "a", "1")
    cache(file, "b", "2")
    file.write_bytes(file.read_bytes()[:-30])
    kept, warning = cache(file).splitlines()
    assert kept.startswith("a 1 ")
    assert "is damaged" in warning


def test_cache_folder_that_cannot_be_written(cache, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in cache(tmp_path / "file" / "algorithms.txt", "a", "1")
