"""What is refused, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _rows import DEVICES, FEATURES, SHARD, A, E, inside, line, operands, place
from jax.sharding import PartitionSpec as P

import te_flax as te

MESH = line()
ROWS = DEVICES * SHARD


def called(x, gamma, **options):
    f = inside(lambda x, g: te.allgather_rms_norm(x, g, **options), MESH)
    return jax.eval_shape(f, x, gamma)


VALUES = {
    "group_size must divide the 8 devices of 'tp', got 3": {"group_size": 3},
    "group_size must divide the 8 devices of 'tp', got 0": {"group_size": 0},
    "group_size must divide the 8 devices of 'tp', got 16": {"group_size": 16},
    "quantize must be None or one of 'mxfp8'.*, got 'mxfp6_e1m4'": {
        "quantize": "mxfp6_e1m4"
    },
    r"outputs must be some of \('normed', .*, got 'normed'": {"outputs": "normed"},
    r"outputs must be some of .*, got \('codes',\)": {"outputs": ("codes",)},
    r"outputs must be some of .*, got \(\)": {"outputs": ()},
    r"outputs must be some of .*, got \[\['normed'\]\]": {"outputs": [["normed"]]},
    "outputs must be some of .*, got 3": {"outputs": 3},
    r"quantize must be None or one of .*, got \['mxfp8'\]": {"quantize": ["mxfp8"]},
    "outputs must leave out 'quantized' without quantize=": {"outputs": ["quantized"]},
    "axis must name an axis of the mesh .*'tp'.*, got 'dp'": {"axis": "dp"},
    "rows must be 8 numbers, .* of 0 to 4, got .*; give the": {"rows": (1, 2)},
    "rows must be 8 numbers, .* got .*5": {"rows": (5,) * 8},
    "rows must be 8 numbers, .* got .*-1": {"rows": (-1,) * 8},
    "rows must add up to the same in each group of 4, got .*10, 8": {
        "rows": (1, 2, 3, 4, 2, 2, 2, 2),
        "group_size": 4,
    },
    "epsilon must be finite in float32 and >= 0, got -1e-06": {"epsilon": -1e-6},
    "epsilon must be finite in float32 and >= 0, got nan": {"epsilon": float("nan")},
    "weight_offset must be finite in float32, got inf": {"weight_offset": float("inf")},
}
TYPES = {
    r"axis must be the name of one mesh axis, got \('tp',\)": {"axis": ("tp",)},
    "group_size must be an int or None, got 2.0": {"group_size": 2.0},
    "group_size must be an int or None, got True": {"group_size": True},
    "rows must be ints known while tracing, got 4": {"rows": 4},
    "epsilon must be a number known while tracing, got None": {"epsilon": None},
    "weight_offset must be a number .*, got '1'; pass a float": {"weight_offset": "1"},
    "rows must be ints known while tracing, got .*1.5": {"rows": (1.5,) * 8},
}


@pytest.mark.parametrize(
    ("match", "options", "error"),
    [(m, o, ValueError) for m, o in VALUES.items()]
    + [(m, o, TypeError) for m, o in TYPES.items()],
)
def test_options(match, options, error):
    with pytest.raises(error, match=f"^allgather_rms_norm: {match}"):
        called(*operands(), **{"axis": "tp"} | options)


def test_outputs_of_any_kind():
    for names in ({"normed"}, (name for name in ("normed",)), ["normed", "normed"]):
        made = called(*operands(), axis="tp", outputs=names)
        assert made.normed is not None
        assert made.residual is None


def test_row_counts_that_are_traced():
    def f(rows):
        return te.allgather_rms_norm(*operands(), axis="tp", rows=rows)

    mapped = jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P("tp"))
    with pytest.raises(TypeError, match="rows must be ints known while tracing"):
        jax.eval_shape(mapped, jnp.ones(DEVICES, jnp.int32))


@pytest.mark.parametrize(
    ("shape", "gamma", "match"),
    [
        ((ROWS,), (ROWS,), r"x must have dims \[rows, .., features >= 1\], got"),
        ((ROWS, 0), (0,), r"x must have dims \[rows, .., features >= 1\], got"),
        ((ROWS, 96), (64,), r"gamma must have shape \(96,\), got shape \(64,\)"),
        ((ROWS, 96), (1, 96), r"gamma must have shape \(96,\), got shape \(1, 96\)"),
        ((ROWS, 80), (80,), "x must have features in whole blocks of 32, got 80"),
    ],
)
def test_shapes(shape, gamma, match):
    x, gamma = jnp.ones(shape), jnp.ones(gamma)
    with pytest.raises(ValueError, match=f"^allgather_rms_norm: {match}"):
        called(x, gamma, axis="tp", quantize="mxfp8")


def test_any_features_without_codes():
    made = called(jnp.ones((ROWS, 7)), jnp.ones(7), axis="tp")
    assert made.normed.shape == (DEVICES * ROWS, 7)
    named = {"quantize": "mxfp8", "outputs": ("normed", "residual")}
    assert called(jnp.ones((ROWS, 7)), jnp.ones(7), axis="tp", **named)[1] is None


def test_dtypes():
    x, gamma = operands()
    for args, name in (
        ((x.astype(jnp.int32), gamma), "x"),
        ((x, gamma.astype(jnp.float8_e4m3fn)), "gamma"),
        ((np.ones((ROWS, FEATURES)), gamma), "x"),
        (([[1.0] * FEATURES] * ROWS, gamma), "x"),
    ):
        with (
            jax.set_mesh(MESH),
            pytest.raises(TypeError, match=f"{name} must be float32, bfloat16 or flo"),
        ):
            te.allgather_rms_norm(*args, axis="tp")


def test_no_mesh():
    with pytest.raises(ValueError, match=r"axis must .*, got 'tp'; enter jax.set_mesh"):
        te.allgather_rms_norm(*operands(), axis="tp")


def test_rows_that_the_axis_does_not_divide():
    x, gamma = operands(rows=ROWS - 2)
    match = r"x must have rows that 8 devices divide, got shape .*; pad the shards"
    with jax.set_mesh(line(A)), pytest.raises(ValueError, match=match):
        te.allgather_rms_norm(x, gamma, axis="tp")


def test_ragged_rows_cut_by_another_axis_too():
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(E, E))
    placed = place(mesh, *operands(), spec=P(("dp", "tp")))
    match = "rows must be None where other mesh axes cut the rows too, got"
    with pytest.raises(ValueError, match=match):
        te.allgather_rms_norm(*placed, axis="tp", rows=(1,) * 4)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((SHARD, FEATURES - 32), "bfloat16"), (None, "float16")]
)
def test_shards_of_other_columns_or_dtypes(shape, dtype):
    """There is no such array to pass: JAX refuses to make one."""
    cut = jax.NamedSharding(MESH, P("tp"))
    shards = [
        jax.device_put(jnp.ones((SHARD, FEATURES), jnp.bfloat16), device)
        for device in MESH.devices.flat
    ]
    other = jnp.ones(shape or shards[0].shape, dtype)
    shards[-1] = jax.device_put(other, MESH.devices.flat[-1])
    make = jax.make_array_from_single_device_arrays
    with pytest.raises((ValueError, TypeError), match=r"96|dtype"):
        make((ROWS, FEATURES), cut, shards).block_until_ready()
