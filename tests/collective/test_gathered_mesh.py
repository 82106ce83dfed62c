"""Outside shard_map: Auto, Explicit and mixed meshes, other axes beside the one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _rows import (
    FEATURES,
    A,
    E,
    bits,
    call,
    compiled,
    gathered,
    gradients,
    one_device,
    operands,
    place,
    run,
    same,
    wire,
)
from jax.sharding import PartitionSpec as P

import te_flax as te

ALL = ("normed", "quantized", "residual")
ROWS, BETWEEN = 32, (4,)


def mesh_of(*kinds, shape=(2, 4), names=("dp", "tp")):
    return jax.make_mesh(shape, names, axis_types=kinds)


# mesh, how x lies on it, and how the results do over its Explicit axes.
CASES = {
    "auto": (mesh_of(A, shape=(8,), names=("tp",)), P("tp"), P()),
    "explicit": (mesh_of(E, shape=(8,), names=("tp",)), P("tp"), P()),
    "auto, batch": (mesh_of(A, A), P("tp", "dp"), P(None, "dp")),
    "explicit, batch": (mesh_of(E, E), P("tp", "dp"), P(None, "dp")),
    "explicit, rows twice": (mesh_of(E, E), P(("dp", "tp")), P("dp")),
    "auto beside explicit": (mesh_of(A, E), P("tp"), P()),
    "three auto": (
        mesh_of(A, A, A, shape=(2, 2, 2), names=("dp", "tp", "pp")),
        P("tp", "dp"),
        P(None, "dp"),
    ),
    "explicit of size 1": (mesh_of(E, E, shape=(8, 1)), P(("dp", "tp")), P("dp")),
    "auto of size 1": (mesh_of(A, A, shape=(8, 1)), P(None, None), P()),
}


FP6 = ("auto, batch", "explicit, batch", "explicit, rows twice", "three auto")


@pytest.mark.parametrize("outputs", [("quantized",), ALL], ids="+".join)
@pytest.mark.parametrize(
    ("case", "quantize"),
    [(case, "mxfp8") for case in CASES] + [(case, "mxfp6_e2m3") for case in FP6],
)
def test_results_and_bytes(case, quantize, outputs):
    mesh, spec, lies = CASES[case]
    x, gamma = operands(rows=ROWS, between=BETWEEN)
    with jax.set_mesh(mesh):
        placed = place(mesh, x, gamma, spec=spec)
        program = compiled(call(outputs, quantize), *placed)
        made = program(*placed)
    same(made, one_device(x, gamma, outputs, quantize))
    for a in jax.tree.leaves(made):
        assert a.sharding.is_equivalent_to(jax.NamedSharding(mesh, lies), a.ndim)
    shares = [mesh.shape[a] for dim in lies for a in (dim,) if a is not None]
    rows = ROWS * BETWEEN[0] // int(np.prod(shares))
    sent = {"all-gather": gathered(outputs, rows, quantize=quantize)}
    sent = sent if mesh.shape["tp"] > 1 else {}
    assert wire(program) == sent
    assert " conditional(" not in (program.as_text() or "")  # for platforms


@pytest.mark.parametrize("case", ["auto", "explicit", "explicit, rows twice"])
def test_without_a_mesh_in_context(case):
    """The mesh is that of x, in an eager and in a compiled call."""
    mesh, spec, _ = CASES[case]
    x, gamma = operands(rows=ROWS, between=BETWEEN)
    placed = place(mesh, x, gamma, spec=spec)
    want = one_device(x, gamma, ALL)
    same(call(ALL)(*placed), want)
    same(run(call(ALL), *placed), want)


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    """Of own rows, where x lies; no cotangent travels that all devices have."""
    mesh, spec, _ = CASES[case]
    x, gamma = operands(jnp.float32, rows=ROWS, between=BETWEEN)
    rng = np.random.default_rng(1)
    said = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for _ in range(2)]
    config = te.NormConfig(kind="rmsnorm")
    pulled = jax.vjp(lambda x, g: te.norm(x, g, config=config), x, gamma)[1]
    dx, dgamma = jax.jit(pulled)(said[0])
    with jax.set_mesh(mesh):
        placed = place(mesh, x, gamma, spec=spec)
        cut = [place(mesh, ct, spec=P())[0] for ct in said]
        program = compiled(gradients(call(("normed",)), cut[0], None), *placed)
        got = program(*placed)
        both = run(gradients(call(ALL), *cut), *placed)
    np.testing.assert_array_equal(bits(got[0]), bits(dx))
    np.testing.assert_array_equal(bits(both[0]), bits(dx + said[1]))
    assert got[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), x.ndim)
    terms = np.abs(np.asarray(said[0])).sum((0, 1)) * np.sqrt(FEATURES)
    bound = (ROWS * BETWEEN[0] + FEATURES) * 2.0**-23 * terms
    for found in (got[1], both[1]):
        assert (np.abs(np.asarray(found) - np.asarray(dgamma)) <= bound).all()
    assert set(wire(program)) <= {"all-reduce"}


def test_results_are_whole_beside_a_gradient():
    """The backward pass wants its own rows; XLA would cut the results like them."""
    mesh, spec, _ = CASES["auto"]
    x, gamma = operands(rows=ROWS, between=BETWEEN)

    def loss(x, gamma):
        made = call(ALL)(x, gamma)
        found = jax.tree.leaves((made.normed, made.residual))
        return sum(jnp.sum(a).astype(jnp.float32) for a in found), made

    with jax.set_mesh(mesh):
        _, made = run(jax.grad(loss, has_aux=True), *place(mesh, x, gamma, spec=spec))
    same(made, one_device(x, gamma, ALL))
    codes = made.quantized
    found = [made.normed, made.residual, codes.data, codes.scale]
    assert [a.sharding.is_fully_replicated for a in found] == [True] * 4


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
def test_groups_beside_another_axis(kind):
    mesh = mesh_of(kind, kind)
    x, gamma = operands(rows=ROWS, between=BETWEEN)
    spec = P("tp", "dp")
    with jax.set_mesh(mesh):
        made = run(call(ALL, group_size=2), *place(mesh, x, gamma, spec=spec))
    want = one_device(x, gamma, ALL)
    half = slice(None, ROWS // 2), slice(ROWS // 2, None)
    for device in range(4):
        part, own = (
            slice(device * ROWS // 2, (device + 1) * ROWS // 2),
            half[device // 2],
        )
        same(
            jax.tree.map(lambda a, part=part: np.asarray(a)[part], made.normed),
            np.asarray(want.normed)[own],
        )
    assert made.normed.shape[0] == made.quantized.shape[0] == 2 * ROWS


def test_axis_of_a_surrounding_shard_map():
    """Manual over one axis, the rows cut over another."""
    mesh = mesh_of(A, A)
    x, gamma = operands(rows=ROWS, between=BETWEEN)

    def own(x, gamma):
        return call(ALL)(x, gamma)

    f = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(P(None, "dp"), P()),
        out_specs=P(None, "dp"),
        axis_names={"dp"},
    )
    with jax.set_mesh(mesh):
        made = run(f, *place(mesh, x, gamma, spec=P("tp", "dp")))
    same(made, one_device(x, gamma, ALL))


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
def test_batch_beside_a_manual_axis(kind):
    """Manual over the axis alone; the batch lies on another."""
    mesh = mesh_of(kind, kind)
    x, gamma = operands(rows=ROWS, between=BETWEEN)
    f = jax.shard_map(
        call(ALL),
        mesh=mesh,
        in_specs=(P("tp"), P()),
        out_specs=P(),
        axis_names={"tp"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        made = run(f, *place(mesh, x, gamma, spec=P("tp", "dp")))
    same(made, one_device(x, gamma, ALL))


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
def test_ragged_rows_beside_another_axis(kind):
    """In a shard_map over the axis alone, and outside; with gradients."""
    mesh, rows = mesh_of(kind, kind), (3, 8, 0, 5)
    x, gamma = operands(jnp.float32, rows=ROWS, between=BETWEEN)
    kept = np.concatenate([np.arange(8 * i, 8 * i + n) for i, n in enumerate(rows)])
    want = one_device(x[kept], gamma, ALL)
    x = x.at[np.setdiff1d(np.arange(ROWS), kept)].set(jnp.nan)
    f = call(ALL, rows=rows)
    mapped = jax.shard_map(
        f, in_specs=(P("tp"), P()), out_specs=P(), axis_names={"tp"}, check_vma=False
    )
    with jax.set_mesh(mesh):
        placed = place(mesh, x, gamma, spec=P("tp", "dp"))
        for g in (f, mapped):
            same(run(g, *placed), want)
            dx, dgamma = run(gradients(g, *want[::2]), *placed)
            assert np.isfinite(dx).all()
            assert np.isfinite(dgamma).all()
            assert np.asarray(dx)[kept].any()


def test_explicit_rows_must_be_cut_over_the_axis():
    mesh = mesh_of(E, E)
    x, gamma = operands(rows=ROWS, between=BETWEEN)
    for spec in (P(), P("dp"), P(("tp", "dp")), P(None, "tp")):
        with (
            jax.set_mesh(mesh),
            pytest.raises(ValueError, match="x must be cut over 'tp' on axis 0"),
        ):
            call(ALL)(*place(mesh, x, gamma, spec=spec))
