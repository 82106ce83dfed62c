"""Groups of neighbours and ragged shards: no row of another group, no padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _rows import (
    DEVICES,
    FEATURES,
    SHARD,
    A,
    E,
    call,
    compiled,
    gathered,
    inside,
    line,
    one_device,
    operands,
    place,
    run,
    same,
    wire,
)
from jax.sharding import PartitionSpec as P

ALL = ("normed", "quantized", "residual")
# By the size of a group: rows that count on each device.
RAGGED = {
    8: (3, 1, 4, 0, 2, 2, 2, 2),
    4: (3, 1, 4, 0, 2, 2, 2, 2),
    2: (3, 1, 2, 2, 4, 0, 1, 3),
    1: (3,) * DEVICES,
}


def padded(x, rows):
    """The operand with NaN behind the rows that count."""
    counts = np.repeat(rows, SHARD)
    at = np.tile(np.arange(SHARD), DEVICES)
    keep = jnp.asarray(at < counts).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(keep, x, jnp.asarray(jnp.nan, x.dtype))


def rows_of(group, size, rows):
    """Where the rows of a group are."""
    devices = range(group * size, (group + 1) * size)
    return [d * SHARD + i for d in devices for i in range(rows[d])]


def check(made, x, gamma, size, rows, outputs):
    """Every device has what one device makes of the rows of its group."""
    count = sum(rows[:size])
    for device in range(DEVICES):
        mine = x[np.asarray(rows_of(device // size, size, rows), int)]
        part = slice(device * count, (device + 1) * count)
        got = jax.tree.map(lambda a, part=part: np.asarray(a)[part], made)
        same(got, one_device(mine, gamma, outputs))


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
@pytest.mark.parametrize("size", [4, 2, 1])
def test_groups(size, kind):
    """Inside shard_map, check_vma True or False, and outside: the same arrays."""
    x, gamma = operands()
    mesh, rows = line(kind), (SHARD,) * DEVICES
    f = call(ALL, group_size=size)
    for g in (inside(f, mesh), inside(f, mesh, vma=False), f):
        program = compiled(g, *place(mesh, x, gamma))
        made = program(*place(mesh, x, gamma))
        check(made, x, gamma, size, rows, ALL)
        count = size * SHARD * 3
        sent = {"all-gather": gathered(ALL, count)} if size > 1 else {}
        assert wire(program) == sent
        assert made.residual.sharding.spec[0] == "tp"


@pytest.mark.parametrize("quantize", ["mxfp8", "mxfp6_e2m3"])
def test_packed_codes_in_groups_outside(quantize):
    """Their logical shape is that of all results, not of a shard."""
    x, gamma = operands()
    mesh = line()
    f = call(("quantized",), quantize, group_size=4)
    made = run(f, *place(mesh, x, gamma)).quantized
    assert made.shape == (4 * len(x), *x.shape[1:])
    assert made.scale.shape == (*made.shape[:-1], FEATURES // 32)


@pytest.mark.parametrize("outputs", [("quantized",), ALL], ids="+".join)
@pytest.mark.parametrize("size", RAGGED)
def test_ragged_shards(size, outputs):
    x, gamma = operands()
    rows = RAGGED[size]
    f = call(outputs, group_size=size, rows=rows)
    for mesh, vma in ((line(A), True), (line(E), False)):
        made = run(inside(f, mesh, vma), *place(mesh, padded(x, rows), gamma))
        check(made, x, gamma, size, rows, outputs)


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
@pytest.mark.parametrize("size", [8, 2])
def test_ragged_shards_outside(size, kind):
    x, gamma = operands(between=())
    rows, mesh = RAGGED[size], line(kind)
    f = call(ALL, group_size=size, rows=np.array(rows))
    made = run(f, *place(mesh, padded(x, rows), gamma))
    if size == DEVICES:
        mine = x[np.asarray(rows_of(0, size, rows))]
        same(made, one_device(mine, gamma, ALL))
    else:
        check(made, x, gamma, size, rows, ALL)


def test_shards_without_any_row():
    x, gamma = operands(between=())
    mesh, rows = line(), (0,) * DEVICES
    f = inside(call(ALL, rows=rows), mesh, False, P())
    made = run(f, *place(mesh, padded(x, rows), gamma))
    assert made.normed.shape == made.residual.shape == (0, FEATURES)
