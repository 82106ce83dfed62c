"""One op definition on every kind of mesh, under every JAX transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _meshes import A, E, P, mesh, placed, run
from _operands import gemm_oracle
from _rmsnorm import (
    fwd_reference,
    rms,
    rms_bounds,
    rms_bounds_of,
    rms_oracle,
    rmsnorm,
)
from flax import nnx
from jax import lax

from te_flax.functional.dense import dense
from te_flax.ops._op import KernelOp
from te_flax.ops.mxfp8 import QUANTIZE_MXFP8_ROWCOL
from te_flax.ops.quantize import QUANTIZE_ROWCOL
from te_flax.testing.numerics import (
    chain_bound,
    gemm_bound,
    sharded_bound,
    trees_close,
)

TWO = {
    "auto": mesh(A, A),
    "explicit": mesh(E, E),
    "mixed_ea": mesh(E, A),
    "mixed_ae": mesh(A, E),
}
every = pytest.mark.parametrize("kind", TWO)
pure = pytest.mark.parametrize("kind", ["auto", "explicit"])
vma = pytest.mark.parametrize("check_vma", [True, False])
ONE = {"all-reduce": 1}

_KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(_KEYS[0], (8, 16, 128))
GAMMA = 1 + jax.random.normal(_KEYS[1], (128,))
W = jax.random.normal(_KEYS[2], (128, 128)) / 12
GAMMAS = jnp.tile(GAMMA, (8, 1)) * jnp.arange(1.0, 9.0)[:, None]
BOUNDS = rms_bounds(X, GAMMA)
VMAPPED = rms_bounds_of(*zip(X, GAMMAS, strict=True))


def chained(want):
    """Bounds up to three layers of norm and product, forward and backward."""
    return jax.tree.map(lambda w: chain_bound([128] * 3 * 6, w), want)


def mxfp8(x):
    return QUANTIZE_MXFP8_ROWCOL(x, row_format="e4m3", col_format="e4m3", k_ndim=1)


def tensor(x):
    options = {"row_format": "e4m3", "col_format": "e5m2", "k_ndim": 1}
    return QUANTIZE_ROWCOL(x, jnp.float32(8.0), **options)


@every
@pytest.mark.parametrize(
    "specs",
    [(P("dp", "tp"), P()), (P("dp", None, "tp"), P("tp"))],
    ids=["batch+seq", "h"],
)
def test_gradients(kind, specs):
    found, _ = run(rms, TWO[kind], specs, X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)
    if "mixed" not in kind and specs[1] == P():
        assert found == ONE


@pure
def test_mesh_only_on_the_arrays(kind):
    specs = (P("dp", "tp"), P())
    found, _ = run(
        rms, TWO[kind], specs, X, GAMMA, oracle=rms_oracle, context=False, bounds=BOUNDS
    )
    assert found == ONE


@every
def test_vmap_of_a_cut_batch(kind):
    """A gamma per entry costs no collective: the loop runs inside the shard."""
    f, oracle = jax.vmap(rms), jax.vmap(rms_oracle)
    found, _ = run(
        f, TWO[kind], (P("dp"), P("dp")), X, GAMMAS, oracle=oracle, bounds=VMAPPED
    )
    assert found == {}


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, None)], ids=str)
def test_vmap(axes):
    args = (X[0] if axes[0] is None else X, GAMMAS if axes[1] == 0 else GAMMA)
    got = jax.vmap(rms, axes)(*args)
    want = jax.vmap(rms_oracle, axes)(*args)
    pick = lambda a, axis, i: a if axis is None else jnp.take(a, i, axis)
    count = args[0].shape[axes[0]] if axes[0] is not None else len(args[1])
    entries = [map(pick, args, axes, (i, i)) for i in range(count)]
    trees_close(got, want, rms_bounds_of(*entries))


def test_vmap_nests():
    f = lambda rms: jax.vmap(jax.vmap(rms, (0, None)))(X[:, :, None], GAMMAS)
    bounds = [
        rms_bounds_of(*((row[None], g) for row in x))
        for x, g in zip(X, GAMMAS, strict=True)
    ]
    bounds = tuple(np.stack(b) for b in zip(*bounds, strict=True))
    trees_close(f(rms), f(rms_oracle), bounds)


def test_vmap_joins_a_group_where_it_can():
    shared = str(jax.make_jaxpr(jax.vmap(rmsnorm, (0, None)))(X, GAMMA))
    assert "maps=()" in shared
    own = str(jax.make_jaxpr(jax.vmap(rmsnorm))(X, GAMMAS))
    assert "maps=((True, True),)" in own
    op = KernelOp(
        name="test_turn",
        signature="x: M.. k -> y: k M..",
        reference=lambda x: (jnp.moveaxis(x, -1, 0),),
        batch_group="M",
    )
    try:
        turn = jax.vmap(lambda x: op(x)[0])
        assert "maps=()" in str(jax.make_jaxpr(turn)(X))
        np.testing.assert_array_equal(turn(X), jnp.moveaxis(X, -1, 1))
    finally:
        del KernelOp.registry["test_turn"]


@every
def test_whole_blocks_stay_cut(kind):
    x = jnp.tile(X, (1, 4, 1))
    found, _ = run(mxfp8, TWO[kind], (P("dp", None, "tp"),), x)
    if "mixed" not in kind:
        assert found == ONE  # of the amax


@pure
def test_a_split_block_is_gathered(kind):
    found, _ = run(mxfp8, TWO[kind], (P(None, None, "tp"),), X[..., :96])
    assert found.get("all-gather") == 1
    # A ragged last block along K does not matter to tokens.
    found, _ = run(mxfp8, TWO[kind], (P("dp"),), jnp.tile(X[..., :40], (1, 4, 1)))
    assert "all-gather" not in found


@pure
def test_scales_of_a_cut_sequence_keep_their_order(kind):
    """A sequence cut behind a batch: only the scales along tokens are gathered."""
    x = jnp.tile(X, (1, 4, 1)) * jnp.exp2(jnp.arange(64.0))[:, None]
    found, (row, _, col, col_scale, _) = run(mxfp8, TWO[kind], (P("dp", "tp"),), x)
    assert found == {"all-reduce": 1, "all-gather": 1}
    assert row.sharding.num_devices == col.sharding.num_devices == 8
    assert row.addressable_shards[0].data.shape == (2, 32, 128)
    assert col_scale.addressable_shards[0].data.shape in ((4, 128), (16, 128))


@pytest.mark.parametrize("kinds", [(A, A), (E, E), (E, A), (A, E)], ids=str)
@pytest.mark.parametrize("shape", [(8, 1), (1, 8)], ids=str)
def test_axes_of_size_one(kinds, shape):
    on = mesh(*kinds, shape=shape)
    for f in (tensor, mxfp8):
        run(f, on, (P("dp", None, "tp"),), jnp.tile(X, (1, 4, 4)))
    run(rms, on, (P("dp", "tp"), P()), X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)


@pure
def test_types_keep_axes_of_size_one(kind):
    """A carry keeps its type on an Explicit mesh."""
    on = mesh(E, E, shape=(8, 1)) if kind == "explicit" else mesh(A, A, shape=(8, 1))

    def layers(norm):
        return lambda x, g: lax.scan(lambda h, _: (norm(h, g), None), x, length=2)[0]

    oracle = layers(lambda x, g: fwd_reference(x, g, eps=1e-6)[0])
    run(
        layers(rmsnorm),
        on,
        (P("dp", "tp"), P()),
        X,
        GAMMA,
        oracle=oracle,
        bounds=chained,
    )


@pure
@vma
@pytest.mark.parametrize("axes", [("dp", "tp"), ("dp",), ("tp",)], ids="+".join)
@pytest.mark.parametrize("grad", ["inside", "outside"])
def test_shard_map(kind, check_vma, axes, grad):
    spec = {2: P("dp", "tp"), 1: P("dp") if axes == ("dp",) else P(None, "tp")}
    spec = spec[len(axes)]
    options = {"mesh": TWO[kind], "axis_names": set(axes), "check_vma": check_vma}

    def own(x, g):
        dx, dg = rms(x, g)
        return dx, dg if check_vma else lax.psum(dg, axes)  # else the user sums

    def f(x, g):
        if grad == "inside":
            call = jax.shard_map(
                own, in_specs=(spec, P()), out_specs=(spec, P()), **options
            )
            return call(x, g)
        part = jax.shard_map(rmsnorm, in_specs=(spec, P()), out_specs=spec, **options)
        return jax.grad(lambda x, g: jnp.sum(jnp.square(part(x, g))), (0, 1))(x, g)

    run(f, TWO[kind], (P("dp", "tp"), P()), X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)


@vma
def test_vmap_inside_shard_map(check_vma):
    f = jax.shard_map(
        jax.vmap(rms),
        mesh=TWO["auto"],
        in_specs=(P("dp"), P("dp")),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    found, _ = run(
        f,
        TWO["auto"],
        (P("dp"), P("dp")),
        X,
        GAMMAS,
        oracle=jax.vmap(rms_oracle),
        bounds=VMAPPED,
    )
    assert found == {}


@pytest.mark.parametrize(
    "kinds", [(A, A, A), (E, E, E), (E, A, A), (A, E, A), (E, E, A)], ids=str
)
@pytest.mark.parametrize("axes", [(), ("b",), ("a", "c"), ("a",)], ids="+".join)
def test_three_axes(kinds, axes):
    cube = mesh(*kinds, shape=(2, 2, 2), names=("a", "b", "c"))
    if not axes:
        specs = (P(("c", "a"), "b"), P("c"))
        run(rms, cube, specs, X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)
        return
    part = jax.shard_map(
        rmsnorm, mesh=cube, in_specs=(P(axes), P()), out_specs=P(axes),
        axis_names=set(axes),
    )  # fmt: skip
    f = lambda x, g: jax.grad(
        lambda x, g: jnp.sum(jnp.square(part(x, g))), (0, 1)
    )(x, g)  # fmt: skip
    specs = (P(axes, tuple(n for n in "abc" if n not in axes)), P())
    left = {n: k for n, k in zip("abc", kinds, strict=True) if n not in axes}
    against = E in left.values() and A in left.values()
    if against and min(n for n, k in left.items() if k == E) < max(axes):
        with pytest.raises(NotImplementedError, match="make the Auto axes Explicit"):
            run(f, cube, specs, X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)
    else:
        run(f, cube, specs, X, GAMMA, oracle=rms_oracle, bounds=BOUNDS)


def test_auto_axes_inside_an_explicit_mesh():
    f = jax.sharding.auto_axes(rms, out_sharding=(P("dp"), P()))
    specs = (P("dp"), P())
    found, _ = run(
        f, TWO["explicit"], specs, X, GAMMA, oracle=rms_oracle, bounds=BOUNDS
    )
    assert found == ONE


@pure
def test_scan_over_layers_with_remat(kind):
    gammas, ws = jnp.tile(GAMMA, (3, 1)), jnp.stack([W] * 3)

    def net(norm, product):
        def body(h, p):
            return jax.checkpoint(lambda h, p: h + product(norm(h, p[0]), p[1]))(
                h, p
            ), None

        def loss(p, x):
            return jnp.mean(lax.scan(body, x, p)[0] ** 2)

        return lambda x, g, w: jax.value_and_grad(loss)((g, w), x)

    run(
        net(rmsnorm, lambda x, w: dense(x, w)[0]),
        TWO[kind],
        (P("dp"), P(), P()),
        *(X, gammas, ws),
        oracle=net(lambda x, g: fwd_reference(x, g, eps=1e-6)[0], jnp.matmul),
        bounds=chained,
    )


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(GAMMA)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs(), (128, 128)))

    def __call__(self, x):
        return x + dense(rmsnorm(x, self.scale[...]), self.kernel[...])[0]


def test_nnx():
    block = _Block(nnx.Rngs(0))

    @nnx.jit
    @nnx.value_and_grad
    def step(m, x):
        return jnp.mean(nnx.remat(_Block.__call__)(m, x) ** 2)

    def plain(p):
        return jnp.mean((X + fwd_reference(X, p[0], eps=1e-6)[0] @ p[1]) ** 2)

    loss, grads = step(block, X)
    want, dwant = jax.value_and_grad(plain)((block.scale[...], block.kernel[...]))
    got = loss, (grads["scale"][...], grads["kernel"][...])
    trees_close(got, (want, dwant), chained((want, dwant)))
    stack = nnx.vmap(_Block)(nnx.Rngs(0).split(3))
    over = nnx.scan(lambda h, m: m(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    loss, grads = nnx.jit(nnx.value_and_grad(lambda m: jnp.mean(over(X, m) ** 2)))(
        stack
    )
    assert np.isfinite(loss)
    assert grads["kernel"][...].shape == (3, 128, 128)


def test_partly_manual_scatter():
    """Collectives number the whole mesh, shardings name the one Auto axis."""
    from te_flax.ops.gemm import gemm

    options = {"orientation": "tn", "k_ndim": 2, "keep_contraction": True}

    def body(x, g):
        return lax.psum(gemm(x, g, out_sharding=P("dp"), **options), "tp")

    f = jax.shard_map(
        body, mesh=TWO["auto"], in_specs=(P(None, "tp"),) * 2, out_specs=P(),
        axis_names={"tp"},
    )  # fmt: skip
    oracle = lambda x, g: gemm(x, g, **options)
    exact, size = gemm_oracle("tn", (X, X[..., :64]), k_ndim=2)
    limit = sharded_bound(gemm_bound(size, 128, exact, np.float32))
    specs = (P("dp", "tp"),) * 2
    run(f, TWO["auto"], specs, X, X[..., :64], oracle=oracle, bounds=limit)


def test_native_by_name_where_the_partitioner_is_confused():
    from te_flax.ops._choice import kernels

    cube = mesh(A, A, A, shape=(2, 2, 2), names=("a", "b", "c"))
    f = jax.shard_map(
        lambda x: tensor(x)[0], mesh=cube, in_specs=P("b"), out_specs=P("b"),
        axis_names={"b"},
    )  # fmt: skip
    with kernels("quantize_rowcol=native"), jax.set_mesh(cube):
        x = placed(cube, (P("b", "a"),), (X,))[0]
        with pytest.raises(NotImplementedError, match="all but one of them manual"):
            jax.jit(f).lower(x)
