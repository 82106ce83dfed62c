"""cuDNN's attention on meshes, under vmap and in every layout, around the emulation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cudnn import Sizes, arrays, emulated, on_gpu
from _meshes import FAST, A, E, P, mesh, run

import te_flax as te
from te_flax.testing.numerics import trees_close

__all__ = ["emulated", "on_gpu"]
pytestmark = pytest.mark.usefixtures("emulated")
BF16 = jnp.dtype(jnp.bfloat16)
AT = Sizes(b=4, s=8)
attention = functools.partial(
    te.dot_product_attention, mask_type="causal", implementation="cudnn"
)


def gradients(attend, q, k, v, do, *bias):
    """o and all gradients of an attention of ``(q, k, v, *bias)``."""
    o, pull = jax.vjp(attend, q, k, v, *bias)
    return o, *pull(do)


def biased(q, k, v, bias):
    return attention(q, k, v, bias=bias, q_seqlen=jnp.array([16, 3, 7, 9]))


def close(want):
    """One result may be rounded up and the other down: 2^-7 of it.

    Four partial sums, no larger than the largest element, are rounded to bfloat16, and
    so are their three sums: 7 2^-9 of it.
    """

    def bound(a):
        size = np.abs(np.asarray(a, np.float64))
        return 2.0**-7 * size + 7 * 2.0**-9 * size.max()

    return jax.tree.map(bound, want)


@pytest.mark.parametrize(
    ("types", "heads"),
    [((A, A), 2), ((A, A), 1), ((E, E), 1), ((E, A), 2)],
    ids=str,
)
def test_meshes(types, heads):
    """Nothing is gathered; shared heads cost a sum of dk and dv."""
    q, k, v, do, _ = arrays(AT._replace(k=heads), BF16)
    spec = P("dp", None, "tp")
    kv = spec if heads > 1 else P("dp")
    f = functools.partial(gradients, attention)
    found, _ = run(f, mesh(*types), (spec, kv, kv, spec), q, k, v, do, bounds=close)
    assert found == ({} if heads > 1 else {"all-reduce": 1})


def test_shared_bias_is_summed():
    q, k, v, do, _ = arrays(AT, BF16)
    bias = jnp.ones((1, 1, AT.t, AT.s), BF16)
    spec = P("dp", None, "tp")
    f = functools.partial(gradients, biased)
    specs = (spec, spec, spec, spec, P())
    found, _ = run(f, mesh(A, A), specs, q, k, v, do, bias, bounds=close)
    assert found == {"all-reduce": 1}


def test_cotangent_of_another_sharding():
    q, k, v, do, _ = arrays(AT, BF16)
    spec = P("dp", None, "tp")
    f = functools.partial(gradients, attention)
    found, _ = run(f, mesh(A, A), (spec, spec, spec, P()), q, k, v, do, bounds=close)
    assert not found


def test_inside_shard_map():
    q, k, v, do, _ = arrays(AT, BF16)
    spec = P("dp", None, "tp")
    f = functools.partial(gradients, attention)
    on = mesh(A, A)
    four = (spec,) * 4
    inside = jax.shard_map(f, mesh=on, in_specs=four, out_specs=four)
    found, _ = run(inside, on, four, q, k, v, do, oracle=f, bounds=close)
    assert not found


def test_vmap():
    """Over any of the operands, the bias included."""
    q, k, v, do, _ = arrays(AT, BF16)
    bias = jnp.asarray(
        np.random.default_rng(5).standard_normal((AT.n, 3, AT.t, AT.s)), BF16
    )
    qs, dos = (jnp.stack([a, a + a, a - 1], 1) for a in (q, do))
    f = functools.partial(gradients, biased)
    got = jax.jit(jax.vmap(f, (1, None, None, 1, 1)), compiler_options=FAST)(
        qs, k, v, dos, bias
    )
    one = jax.jit(f, compiler_options=FAST)
    each = [one(qs[:, i], k, v, dos[:, i], bias[:, i]) for i in range(3)]
    want = jax.tree.map(lambda *a: jnp.stack(a), *each)
    trees_close(got, want, close(want))
    text = str(jax.make_jaxpr(jax.vmap(attention, (1, None, None)))(qs, k, v))
    assert "maps=()" in text  # one call for all


def test_layout():
    layout = "TBNH"
    q, k, v, do, _ = arrays(AT, BF16)
    order = ["BTNH".index(d) for d in layout]
    other = [jnp.transpose(a, order) for a in (q, k, v, do)]
    attend = functools.partial(attention, layout=layout)
    got, want = (
        jax.jit(functools.partial(gradients, f), compiler_options=FAST)(*a)
        for f, a in ((attend, other), (attention, (q, k, v, do)))
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, jnp.transpose(b, order))
