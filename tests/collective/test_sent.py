"""What travels is the bits, and on GPUs nothing copies them for that."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _rows import A, E, bits, line
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from te_flax.functional import _gather
from te_flax.functional._row_gather import RowGather
from te_flax.quantize.tensor import ScaledTensor
from te_flax.sharding import Placement

ROWS, WHOLE = P("tp", None), P(None, None)


def rows(codes):
    """As a norm's rows are gathered."""
    gather = RowGather(axis="tp", size=8, group=8, shard=2).gather
    return jax.shard_map(gather, in_specs=ROWS, out_specs=WHOLE, check_vma=False)(codes)


def codes_of(kind):
    """As the codes of a product's operand are."""
    route = _gather.Route(Placement(auto=ROWS), Placement(auto=WHOLE))
    if kind == E:
        route = _gather.Route(Placement(), Placement(explicit=WHOLE))

    def travel(codes):
        x = ScaledTensor(
            data=codes, scale=jnp.ones(()), scaling="tensor", format="e4m3"
        )
        return _gather.travel(x, route).data

    return travel


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
@pytest.mark.parametrize("way", ["rows", "codes"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
def test_codes_travel_as_bytes(dtype, way, kind):
    mesh, raw = line(kind), np.arange(256, dtype=np.uint8).reshape(16, 16)
    placed = jax.device_put(raw.view(dtype), NamedSharding(mesh, ROWS))
    with jax.set_mesh(mesh):
        traced = jax.jit(rows if way == "rows" else codes_of(kind)).trace(placed)
    there = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "bitcast_convert" not in there
    program = traced.lower().compile()
    assert re.search(r" = u8\[16,16\]\S* all-gather\(", program.as_text() or "")
    np.testing.assert_array_equal(bits(program(placed)), raw)
