"""Attention on Auto, Explicit and mixed meshes and in shard_map equals one device's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.functional.attention import blocks
from te_flax.testing.numerics import close_to

FAST = {"xla_backend_optimization_level": 0}
B, T, S, N, K, H = 4, 6, 8, 4, 2, 8
A, E = AxisType.Auto, AxisType.Explicit
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


ARGS = (
    normal(B, T, N, H),
    normal(B, S, K, H),
    normal(B, S, K, H),
    normal(1, N, T, S),
    normal(N),
    normal(B, T, N, H),
    jnp.array([8, 5, 0, 3]),
)
HEADS = P("dp", None, "tp")
CUT = (HEADS, HEADS, HEADS, P(None, "tp"), P("tp"), HEADS, P("dp"))
# k, v and the cotangent lie otherwise than q.
UNLIKE = (HEADS, P("dp"), P(None, None, "tp"), P(), P(), P(None, None, "tp"), P())
both = pytest.mark.parametrize("implementation", ["chunked", "reference"])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)


def mesh(*types):
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=types)


def attend(q, k, v, bias, sink, lengths, implementation, dropout=0.0):
    return te.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        sink=sink,
        softmax_type="learnable",
        kv_seqlen=lengths,
        mask_type="padding_causal",
        alibi_slopes=True,
        dropout_rate=dropout,
        dropout_key=jax.random.key(3),
        implementation=implementation,
    )


def loss(q, k, v, bias, sink, do, lengths, implementation, dropout=0.0):
    o = attend(q, k, v, bias, sink, lengths, implementation, dropout)
    if jax.typeof(o).sharding.mesh.axis_types and jax.typeof(o) != jax.typeof(do):
        do = jax.sharding.reshard(do, jax.typeof(o).sharding)
    return jnp.sum(o * do)


@functools.cache
def one_device(implementation, dropout):
    f = functools.partial(loss, implementation=implementation, dropout=dropout)
    return jax.jit(jax.grad(f, range(5)), compiler_options=FAST)(*ARGS)


def equal(got, want):
    """Sums over shards come in another order: 1e-5 of the largest entry."""
    for a, b in zip(got, want, strict=True):
        close_to(a, np.asarray(b), 1e-5 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize(
    ("types", "specs", "implementation"),
    [
        ((A, A), CUT, "chunked"),
        ((A, A), UNLIKE, "reference"),
        ((E, E), CUT, "chunked"),
        ((E, E), UNLIKE, "chunked"),
        ((E, E), CUT, "reference"),
        ((E, A), UNLIKE, "chunked"),
        ((A, E), CUT, "reference"),
    ],
)
def test_meshes(types, specs, implementation):
    on = mesh(*types)
    f = functools.partial(loss, implementation=implementation, dropout=0.3)
    with jax.set_mesh(on):
        placed = [
            jax.device_put(a, NamedSharding(on, s))
            for a, s in zip(ARGS, specs, strict=True)
        ]
        got = jax.jit(jax.grad(f, range(5)), compiler_options=FAST)(*placed)
    equal(got, one_device(implementation, 0.3))


@both
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(implementation, check_vma):
    on = mesh(A, A)

    def total(q, k, v, bias, sink, do, lengths):
        f = functools.partial(attend, implementation=implementation)
        specs = (*CUT[:5], CUT[6])
        f = jax.shard_map(
            f, mesh=on, in_specs=specs, out_specs=HEADS, check_vma=check_vma
        )
        # ALiBi's published slopes go by the number of heads a device sees.
        return jnp.sum(f(q, k, v, bias, sink, lengths) * do)

    def halves(q, k, v, bias, sink, do, lengths):
        cut = lambda a, axis: jnp.split(a, 2, axis)
        parts = (cut(q, 2), cut(k, 2), cut(v, 2), cut(bias, 1), cut(sink, 0))
        found = [
            attend(*part, lengths, implementation) for part in zip(*parts, strict=True)
        ]
        return jnp.sum(jnp.concatenate(found, 2) * do)

    got, want = (
        jax.jit(jax.grad(f, range(5)), compiler_options=FAST)(*ARGS)
        for f in (total, halves)
    )
    equal(got, want)


def test_grad_inside_shard_map():
    """What every device shares gets the sum over the devices."""
    on = mesh(A, A)
    q, k, v, bias, *_ = ARGS

    def inside(q, k, v, bias):
        f = lambda *a: jnp.sum(te.dot_product_attention(*a[:3], bias=a[3]))
        return jax.grad(f, range(4))(q, k, v, bias)

    specs = CUT[:4]
    f = jax.shard_map(inside, mesh=on, in_specs=specs, out_specs=specs)
    got = jax.jit(f, compiler_options=FAST)(q, k, v, bias)
    equal(got, jax.jit(inside, compiler_options=FAST)(q, k, v, bias))


@pytest.mark.parametrize("types", [(A, A), (E, E)])
@pytest.mark.parametrize(
    ("spec", "dim"),
    [(P(None, "tp"), "sequence"), (P(None, None, None, "tp"), "head_dim")],
)
def test_a_sharded_sequence_is_refused(types, spec, dim):
    on = mesh(*types)
    with jax.set_mesh(on):
        q, k, v = (jax.device_put(a, NamedSharding(on, P("dp"))) for a in ARGS[:3])
        v = jax.device_put(v, NamedSharding(on, spec))
        rule = rf"v must not be sharded along {dim}, got \('tp',\); reshard"
        with pytest.raises(ValueError, match=rule):
            te.dot_product_attention(q, k, v)


@pytest.mark.parametrize("kind", [A, E])
def test_an_axis_of_size_1_cuts_nothing(kind):
    on = jax.make_mesh((2, 1), ("dp", "sp"), axis_types=(kind, kind))
    with jax.set_mesh(on):
        placed = [jax.device_put(a, NamedSharding(on, P("dp", "sp"))) for a in ARGS[:3]]
        got = te.dot_product_attention(*placed)
    close_to(got, np.asarray(te.dot_product_attention(*ARGS[:3])), 1e-6)


def test_key_heads_that_the_shards_do_not_divide():
    on = mesh(E, E)
    shapes = ((B, T, 8, H), (B, T, 2, H))
    with jax.set_mesh(on):
        q, k = (
            jax.device_put(normal(*s), NamedSharding(on, P(None, None, a)))
            for s, a in zip(shapes, ("dp", None), strict=True)
        )
        rule = r"k must have a number of heads that \('dp',\) of 4 shards divide, got 2"
        with pytest.raises(ValueError, match=rule):
            te.dot_product_attention(q, k, k)
        one = k[:, :, :1]  # multi-query: every shard reads the same head
        got = te.dot_product_attention(q, one, one)
    want = te.dot_product_attention(*(np.asarray(a) for a in (q, one, one)))
    close_to(got, np.asarray(want), 1e-6)
