"""What benchmarks.wire reads in a module, and the benchmark of tp that uses it."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tensor_parallel
from benchmarks.wire import Collective, collectives

TEXT = """
 %a = f32[8,2]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%s
 %b = (f32[2]{0}, bf16[4,4]{1,0}) all-reduce-start(%x, %y), replica_groups=[1,4]<=[4]
 %c = (f8e4m3fn[16,8]{1,0}, f8e4m3fn[64,8]{1,0}) all-gather-start(%x), replica_groups={}
 %d = ((f32[8,8]{1,0}), f32[4,8]{1,0}, u32[]) reduce-scatter-start(%x),
 replica_groups={{0,1},{2,3}}
 %d = ((f32[3]{0}), f32[3]{0}) all-reduce-start(%x), replica_groups=[2,2]<=[4]
 %e = f32[8]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%s
 %f = f16[8]{0} all-gather(%x), replica_groups=mesh['i'=2,'j'=2] {'j'}, dimensions={0}
 %g = f32[] add(%all-reduce, %y)
"""


def test_every_form():
    text = TEXT.replace(",\n replica_groups", ", replica_groups")
    assert list(collectives(text, 4)) == [
        Collective("all-reduce", ("f32[8,2]",), 2),
        Collective("all-reduce", ("f32[2]", "bf16[4,4]"), 4),
        Collective("all-gather", ("f8e4m3fn[64,8]",), 4),
        Collective("reduce-scatter", ("f32[4,8]",), 2),
        Collective("all-reduce", ("f32[3]",), 2),
        Collective("all-gather", ("f16[8]",), 2),
    ]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 1.5 * 96),
        ("all-gather", 0.75 * 96),
        ("all-to-all", 0.75 * 96),
        ("reduce-scatter", 3 * 96),
        ("collective-permute", 96),
    ],
)
def test_bytes_of_a_ring(kind, sent):
    assert Collective(kind, ("f32[8]", "f8e5m2[4,16]"), 4).sent() == sent


def test_a_compiled_program():
    """Of four devices each sends three quarters of the array, twice."""
    on = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((4, 128)), NamedSharding(on, P("d")))
    text = jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text() or ""
    (found,) = collectives(text, 4)
    assert (found.kind, found.group) == ("all-reduce", 4)
    assert found.sent() == 2 * 3 / 4 * 128 * 4


def test_a_row_of_the_benchmark(tmp_path):
    words = ["--small", "--recipes", "none", "--layouts", "tp=2", "--repeats", "1"]
    with jax.numpy_dtype_promotion("standard"):
        tensor_parallel.main([*words, "--json", str(tmp_path / "rows")])
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["ms"] > 0
    # Four sums of an activation [2, 64, 256], two each way.
    assert 4 <= row["sent_mb"] * 1e6 / (2 * 64 * 256 * 2) < 9
    assert row["collective_ms"] is None  # the CPU has no such kernels


def test_collectives_that_other_kernels_cover():
    spans = (("ncclDevKernel", 0, 10), ("gemm", 4, 3), ("gemm", 8, 7), ("copy", 20, 1))
    events = [
        types.SimpleNamespace(name=name, start_ns=start, duration_ns=length)
        for name, start, length in spans
    ]
    assert tensor_parallel._split(events) == (10, 5)
