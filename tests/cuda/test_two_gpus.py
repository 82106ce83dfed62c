"""The sharded cases of the contract and the layers on two GPUs, equal to one GPU's.

python -m pytest -n 12 -m gpu tests/cuda/test_two_gpus.py, with JAX_PLATFORMS=cuda,cpu.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_dense_general_mesh as dense
import test_fused_mesh as fused
import test_transformer_mesh as transformer
from _contract import OPS
from _gpu import PAIR, TWO_GPUS
from _meshes import A, E, mesh
from _operands import PLATFORM, attributes, groups, operands
from test_contract_mesh import FULL, TURN, check_manual, check_sharded

from te_flax.ops._choice import kernels
from te_flax.ops._lowering import why_reference
from te_flax.ops.gemm import gemm

pytestmark = TWO_GPUS
N = 2
SHAPES = ((N, 1), (1, N))
RECIPES = (None, "delayed_scaling", "mxfp8")
both = pytest.mark.parametrize("axis_type", [A, E])


@pytest.fixture(autouse=True)
def exact_products():
    """Float32 products without a recipe are TensorFloat-32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


def handler_of(name):
    """Asks for the op's handler by name where there is one for such operands."""
    op, attrs = OPS[name], attributes(OPS[name])
    arrays = operands(op, groups((8, 128), (512,)), None, attrs)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    if why_reference(op, PLATFORM, avals, attrs, "native"):
        return contextlib.nullcontext()
    return kernels(f"{name}=native")


@pytest.mark.parametrize("name", OPS)
def test_contract(name):
    """An Auto, an Explicit and a Manual mesh; the cut dims take turns."""
    turn = TURN[name] + TURN[name] // 2
    with handler_of(name):
        for i, check in enumerate((check_sharded, check_sharded, check_manual)):
            shapes = SHAPES if name in FULL else SHAPES[(turn + i) % 2 :][:1]
            for shape in shapes:
                on = mesh(*((A, E, A)[i],) * 2, shape=shape, devices=PAIR)
                check(name, on, **({"vma": True} if check is check_manual else {}))


def test_devices_share_the_algorithm_of_a_product():
    """Settled by one device, run by the other one too: the same bits, in a graph."""
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (jax.random.normal(key, (272, 1040)) for key in keys)
    codes = [a.astype(jnp.float8_e4m3fn) for a in (lhs, rhs)]
    one = jnp.float32(1)
    call = functools.partial(
        gemm, orientation="nt", lhs_scale_inv=one, rhs_scale_inv=one
    )
    step = jax.jit(lambda a, b: (call(a, b), call(b, a)))
    results = []
    for device in PAIR:
        placed = jax.device_put(codes, device)
        for _ in range(3):  # XLA records its command buffers
            found = step(*placed)
        assert found[0].devices() == {device}
        results.append([np.asarray(a) for a in found])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


DENSE = [n for n in dense.MESHES if n != "tp, dp of size 1"]  # of two: "dp x tp"


@both
@pytest.mark.parametrize("mesh_name", DENSE)
@pytest.mark.parametrize("recipe", [*RECIPES, "current_scaling"])
def test_dense(recipe, mesh_name, axis_type):
    dense.check_sharded(recipe, mesh_name, axis_type, N)


@pytest.mark.parametrize("recipe", [*RECIPES, "current_scaling"])
def test_dense_inside_shard_map(recipe):
    dense.check_manual(recipe, N)


@pytest.mark.parametrize(("mesh_name", "recipe", "axis_type"), fused.CASES)
def test_fused(mesh_name, recipe, axis_type):
    fused.check_sharded(mesh_name, recipe, axis_type, N)


CASES = [
    (preset, axis_type, recipe)
    for i, preset in enumerate(transformer.PRESETS)
    for j, axis_type in enumerate((A, E))
    for recipe in ("delayed_scaling", (None, "mxfp8")[(i + j) % 2])
]


@pytest.mark.parametrize(("preset", "axis_type", "recipe"), CASES)
def test_transformer(preset, axis_type, recipe):
    transformer.check_results(preset, axis_type, recipe, N)


@both
def test_collectives_of_dp_and_tp(axis_type):
    transformer.check_collectives_of_dp_and_tp(axis_type, N)


def test_fsdp_gathers_codes():
    transformer.check_fsdp_gathers_codes(E, N)


@pytest.mark.parametrize(
    ("axis_type", "recipe"),
    [(A, "delayed_scaling"), (E, "delayed_scaling"), (A, "mxfp8"), (E, None)],
)
def test_sp_scatters_sums_and_gathers_codes(axis_type, recipe):
    products = "values"  # as MXFP8 has them on Hopper
    transformer.check_sp_scatters_sums_and_gathers_codes(axis_type, recipe, products, N)
