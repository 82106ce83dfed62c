"""Gradients: cotangents of all devices of a group come back to the owner of a row.

Cotangents are small integers, so that no order of their sums rounds: dx is te.norm's
of the summed cotangent, to the bit. dgamma is a sum of rounded products.
"""

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
    bits,
    call,
    compiled,
    gathered,
    gradients,
    inside,
    line,
    operands,
    place,
    run,
    summed,
    wire,
)
from jax.sharding import PartitionSpec as P
from test_gathered_groups import ALL, RAGGED, padded, rows_of

import te_flax as te

WHOLE = (SHARD,) * DEVICES


def cotangents(count, dtype, between=(), seed=1):
    rng = np.random.default_rng(seed)
    shape = (count, *between, FEATURES)
    return [jnp.asarray(rng.integers(-4, 5, shape), dtype) for _ in range(2)]


def sums(ct, size, rows):
    """Of what all devices of each group say, for every row; zeros for padding."""
    count = sum(rows[:size])
    total = np.zeros((DEVICES * SHARD, *ct.shape[1:]), np.float32)
    wide = np.asarray(ct, np.float32).reshape(-1, size, count, *ct.shape[1:])
    for group, said in enumerate(wide.sum(1)):
        total[rows_of(group, size, rows)] = said
    return jnp.asarray(total, ct.dtype)


def check(got, x, gamma, dnormed, dresidual, offset=0.0):
    """The gradients of te.norm of all rows, with the residual's added."""
    scale = gamma + jnp.asarray(offset, gamma.dtype)
    config = te.NormConfig(kind="rmsnorm")
    pulled = jax.vjp(lambda x, g: te.norm(x, g, config=config), x, scale)[1]
    dx, dgamma = run(pulled, dnormed)
    if dresidual is not None:
        dx = dx + dresidual
    np.testing.assert_array_equal(bits(got[0]), bits(dx))
    assert got[1].dtype == gamma.dtype
    wide = np.asarray(x, np.float64).reshape(-1, FEATURES)
    normed = wide / np.sqrt(np.mean(wide**2, 1, keepdims=True) + 1e-6)
    terms = np.abs(normed * np.asarray(dnormed, np.float64).reshape(wide.shape))
    # Each sum in another order, of terms that the norm's own sum has rounded.
    bound = (len(wide) + FEATURES) * 2.0**-23 * terms.sum(0)
    error = np.abs(np.asarray(got[1], np.float64) - np.asarray(dgamma, np.float64))
    assert (error <= bound).all()


@pytest.mark.parametrize("vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize(("size", "rows"), [(8, None), (4, None), (2, RAGGED[2])])
def test_inside_and_outside_of_shard_map(size, rows, vma):
    """Differentiated on each device, and as a whole."""
    x, gamma = operands(between=(2,))
    gamma = gamma.astype(jnp.float32)
    counts = rows or WHOLE
    mesh = line(A if vma else E)
    f = call(ALL, group_size=size, rows=rows)
    said = cotangents(DEVICES * sum(counts[:size]), x.dtype, (2,))
    want = [sums(ct, size, counts) for ct in said]

    def own(x, gamma, *said):
        dx, dgamma = gradients(f, *said)(x, gamma)
        return dx, summed(dgamma, vma)

    specs = {"in_specs": (P("tp"), P(), P("tp"), P("tp")), "out_specs": (P("tp"), P())}
    on_each = jax.shard_map(own, mesh=mesh, check_vma=vma, **specs)
    placed = place(mesh, padded(x, counts), gamma)
    cut = [place(mesh, ct)[0] for ct in said]
    check(run(on_each, *placed, *cut), x, gamma, *want)
    whole = run(gradients(inside(f, mesh, vma), *cut), *placed)
    check(whole, x, gamma, *want)


@pytest.mark.parametrize("kind", [A, E], ids=lambda k: k.name)
@pytest.mark.parametrize(("size", "rows"), [(8, None), (8, RAGGED[8]), (4, RAGGED[4])])
def test_without_shard_map(size, rows, kind):
    x, gamma = operands(jnp.float32, between=())
    counts, mesh = rows or WHOLE, line(kind)
    f = call(ALL, group_size=size, rows=rows)
    groups = size < DEVICES
    said = cotangents(sum(counts[:size]) * (DEVICES if groups else 1), x.dtype)
    want = [sums(ct, size, counts) if groups else back(ct, counts) for ct in said]
    placed = place(mesh, padded(x, counts), gamma)
    cut = [place(mesh, ct, spec=P("tp" if groups else None))[0] for ct in said]
    got = run(gradients(f, *cut), *placed)
    check(got, x, gamma, *want)
    assert got[0].sharding.spec[0] == "tp"


def back(ct, rows):
    total = np.zeros((DEVICES * SHARD, FEATURES), np.float32)
    total[rows_of(0, DEVICES, rows)] = np.asarray(ct, np.float32)
    return jnp.asarray(total, ct.dtype)


def test_epsilon_zero_and_rows_without_values():
    """Zeros have no norm without epsilon; in padding that does not matter."""
    x, gamma = operands(jnp.float32, between=())
    rows, mesh = RAGGED[8], line()
    x = padded(x, rows)
    x = jnp.where(jnp.isnan(x), 0, x)
    f = inside(call(("normed",), rows=rows, epsilon=0.0), mesh, False, P())
    said = cotangents(sum(rows), x.dtype)[0]
    dx, dgamma = run(gradients(f, said, said), *place(mesh, x, gamma))
    assert np.isfinite(dx).all()
    assert np.isfinite(dgamma).all()


@pytest.mark.parametrize("offset", [1.0, 0.5])
def test_weight_offset(offset):
    x, gamma = operands(jnp.float32, between=())
    mesh = line()
    f = inside(call(("normed",), weight_offset=offset), mesh)
    said = cotangents(DEVICES * len(x), x.dtype)[0]
    got = run(gradients(f, said, None), *place(mesh, x, gamma))
    check(got, x, gamma, sums(said, 8, WHOLE), None, offset)


def test_what_the_loss_leaves_out_is_not_reduced():
    """One reduce-scatter for each result that counts, none of them for codes."""
    x, gamma = operands(jnp.float32, between=())
    mesh = line()
    f = inside(call(ALL), mesh)

    def loss(names):
        def of(x, gamma, said):
            made = f(x, gamma)
            pairs = zip(names, said, strict=False)
            return sum(jnp.vdot(getattr(made, name), ct) for name, ct in pairs)

        return jax.grad(of, (0, 1))

    said = [place(mesh, ct)[0] for ct in cotangents(DEVICES * len(x), x.dtype)]
    for names, dgamma in ((("normed",), 1), (("residual",), 0), (ALL[::2], 1)):
        program = compiled(loss(names), *place(mesh, x, gamma), said)
        found = wire(program)
        assert found.pop("reduce-scatter") == [4 * SHARD * FEATURES] * len(names)
        assert found.pop("all-reduce", []) == [4 * FEATURES] * dgamma
        rows = DEVICES * SHARD
        gathers = [] if names == ("residual",) else gathered(ALL, rows, 4)
        assert found.pop("all-gather", []) == gathers
        assert not found


def test_codes_alone_have_no_gradient():
    x, gamma = operands(jnp.float32, between=())
    mesh = line()
    f = inside(call(("quantized",)), mesh)

    def loss(x, gamma):
        return jnp.sum(f(x, gamma).quantized.data.astype(jnp.float32))

    dx, dgamma = run(jax.grad(loss, (0, 1)), *place(mesh, x, gamma))
    assert not dx.any()
    assert not dgamma.any()


def test_under_remat_and_kernel_rules():
    """The backward pass follows the rules of the call, in a later context too."""
    x, gamma = operands(jnp.float32, between=())
    mesh = line()
    f = jax.checkpoint(call(("normed",)))

    def by_reference(x, gamma):
        with te.kernels("norm=reference"):
            return f(x, gamma)

    said = place(mesh, cotangents(DEVICES * len(x), x.dtype)[0])[0]
    slow = jax.jit(gradients(inside(by_reference, mesh), said, None))
    assert "te_flax.norm" not in slow.lower(*place(mesh, x, gamma)).as_text()
    got = run(gradients(inside(f, mesh), said, None), *place(mesh, x, gamma))
    check(got, x, gamma, sums(said, 8, WHOLE), None)
