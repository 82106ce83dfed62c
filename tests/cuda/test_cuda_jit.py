"""Generated CuTeDSL kernels give the bits of the compiled ones, for every key."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _gpu import FLAGS, GPU, agree, of_slice
from _jit_cases import (
    BF16,
    JIT,
    JitCase,
    attributes,
    both_ways,
    cases,
    large,
    shape_cases,
)

import te_flax as te
from te_flax.config import CONFIG
from te_flax.ops._choice import REGISTRY
from te_flax.testing import oracle


def _installed() -> bool:
    return bool(importlib.util.find_spec("jax_tvm_ffi"))


pytestmark = [
    *GPU,
    pytest.mark.skipif(not _installed(), reason="needs te_flax[cutedsl]"),
]


def run(case: JitCase, arrays, **options):
    """Results of both kernels as numpy arrays."""
    found = both_ways(case).lower(*arrays).compile(compiler_options=options)(*arrays)
    return [tuple(np.asarray(r) for r in results) for results in found]


@pytest.mark.parametrize("case", [*cases(), *shape_cases()], ids=str)
def test_the_bits_of_the_compiled_kernel(case):
    arrays = case.draw()
    generated, compiled = run(case, arrays)
    agree(generated, compiled)
    if case.op.name in (f"quantize_mxfp8_{c}" for c in ("row", "col", "rowcol")):
        agree(generated, oracle.quantize_mxfp8(*arrays, **case.attrs, swizzled=False))


NOOP = ("quantize_mxfp8_rowcol_noop", "quantize_mxfp8_rowcol_swizzled_noop")
NOOP += ("quantize_dbias_mxfp8_rowcol_dbias_noop", "act_bwd_mxfp8_rowcol_h_dbias_noop")


@pytest.mark.parametrize("name", NOOP)
def test_noop_leaves_the_results_alone(name):
    op = REGISTRY[name]
    case = JitCase(op, BF16, attributes(op, BF16))
    flag, *arrays = case.draw()
    previous = arrays[len(case.shapes()) - 1 :]
    call = both_ways(case).lower(flag, *arrays).compile()
    for value in FLAGS:
        generated, compiled = call(np.array([value], np.float32), *arrays)
        agree(generated, compiled)
        keeps = np.isnan(value) or abs(value) > 1e-38
        kept = [np.array_equal(*map(bytes_of, p)) for p in zip(generated, previous)]  # noqa: B905
        assert all(kept) if keeps else not any(kept)


def bytes_of(array):
    return np.asarray(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["quantize_mxfp8_rowcol", NOOP[2]])
def test_command_buffers(name, graphs):
    op = REGISTRY[name]
    case = JitCase(op, BF16, attributes(op, BF16))
    size = 1 if graphs else 1_000_000
    arrays = case.draw()
    agree(*run(case, arrays, xla_gpu_graph_min_graph_size=size))


@pytest.mark.parametrize("start", [0, 3, 160, 1000])
def test_slices_at_any_offset(start):
    op = REGISTRY["quantize_mxfp8_rowcol"]
    case = JitCase(op, BF16, attributes(op, BF16))
    (x,) = case.draw()
    call = lambda x: op(x, impl=JIT, **case.attrs)
    agree(of_slice(call, x, start), jax.jit(call)(x))


def test_vmap_runs_the_kernel_for_each_entry():
    op = REGISTRY["quantize_mxfp8_rowcol"]
    attrs = attributes(op, BF16)
    x = np.random.default_rng(0).standard_normal((3, 64, 96)).astype(BF16)
    call = lambda x: op(x, impl=JIT, **attrs)
    found = jax.jit(jax.vmap(call))(x)
    for i in range(3):
        agree([r[i] for r in found], call(x[i]))


def test_more_than_two_billion_elements():
    op = REGISTRY["quantize_mxfp8_rowcol"]
    case = JitCase(op, BF16, attributes(op, BF16))

    @jax.jit
    def equal(x):
        generated, compiled = both_ways(case)(x)
        as_bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.uint8)
        pairs = zip(generated, compiled, strict=True)
        return [(as_bits(a) == as_bits(b)).all() for a, b in pairs]

    assert all(equal(large()))


def test_a_layer_with_one_switch(capsys):
    layer = te.DenseGeneral(256, 128, rngs=te_rngs(), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (64, 256), jnp.bfloat16)

    def loss():
        with te.autocast(te.MXFP8BlockScaling()):
            return te.value_and_grad(lambda m, x: m(x).astype(jnp.float32).sum())(
                layer, x
            )

    expected = jax.tree.leaves(loss())
    with te.kernels("quantize=jit"):
        found = jax.tree.leaves(loss())
        te.kernel_report()
    agree([np.asarray(a) for a in found], [np.asarray(a) for a in expected])
    assert "cutedsl" in capsys.readouterr().out


def te_rngs():
    from flax import nnx

    return nnx.Rngs(0)


CODE = """
import hashlib, json, sys
import numpy as np
from _jit_cases import BF16, JitCase, attributes, both_ways
from te_flax.backends import registry
from te_flax.backends.cutedsl import CuteDSL
from te_flax.config import CONFIG
from te_flax.ops._choice import REGISTRY

def build(*_):
    raise RuntimeError("it is compiled")

if sys.argv[1] == "second":
    CuteDSL.build = build
digest, names = hashlib.sha256(), sys.argv[2:]
for name in names:
    case = JitCase(REGISTRY[name], BF16, attributes(REGISTRY[name], BF16))
    generated, compiled = both_ways(case)(*case.draw())
    for a, b in zip(generated, compiled, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        digest.update(np.asarray(a).tobytes())
said = [registry.describe(name, "cuda")[1].split(" | ")[1] for name in names]
print(json.dumps([digest.hexdigest(), said]))
"""
KEPT = ("quantize_mxfp8_rowcol", "quantize_dbias_mxfp8_rowcol_dbias")


def process(which, folder):
    """A digest of all results, and what the report says of each op."""
    own = {"TE_FLAX_CACHE": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    own |= {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, which, *KEPT],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path):
    """Without the compiler neither process does: kernels are in TE_FLAX_CACHE."""
    compiler, folder = importlib.util.find_spec("cutlass"), tmp_path
    if compiler is None:
        folder = CONFIG.cache_folder() or tmp_path
        there = [any(folder.glob(f"jit/te_flax.jit.{name}.*")) for name in KEPT]
        if not all(there):
            pytest.skip("needs cutlass, or kernels that it made in TE_FLAX_CACHE")
    first, second = process("first", folder), process("second", folder)
    origin = r"compiled \(\d+\.\d s\)" if compiler else "from disk"
    assert all(re.fullmatch(f"1 config: 1 {origin}", said) for said in first[1])
    assert second == [first[0], ["1 config: 1 from disk"] * len(KEPT)]
