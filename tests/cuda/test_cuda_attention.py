"""CUDA: attention on cuDNN against float64, against jax.nn, and what is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cudnn import Sizes, arrays, cases, check
from _gpu import GPU
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.testing.patterns import same_bits

pytestmark = GPU
BF16 = jnp.dtype(jnp.bfloat16)
F16 = jnp.dtype(jnp.float16)
GROUPED = Sizes(t=256, s=256, n=8, k=2, h=128, v=128)
UNEVEN = Sizes(t=192, s=320, n=4, k=4, h=64, v=64)
LONG = Sizes(t=320, s=128, n=4, k=1, h=64, v=64)
LATENT = Sizes(t=256, s=256, n=4, k=4, h=192, v=128)
each_layout = pytest.mark.parametrize("layout", ["BNTH", "TBNH"])
attention = functools.partial(te.dot_product_attention, implementation="cudnn")


def both_passes(attend, q, k, v, do):
    o, pull = jax.vjp(attend, q, k, v)
    return o, *pull(do)


@pytest.mark.parametrize("name", cases(GROUPED, BF16))
def test_grouped_heads(name):
    check(GROUPED, name, BF16, "cudnn", fast=False)


@pytest.mark.parametrize("name", cases(UNEVEN, F16))
def test_more_keys_than_queries(name):
    check(UNEVEN, name, F16, "cudnn", fast=False)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "lengths", "packed"])
def test_more_queries_than_keys(name):
    check(LONG, name, BF16, "cudnn", fast=False)


@pytest.mark.parametrize("name", ["plain", "causal", "lengths"])
def test_latent_head_dims(name):
    check(LATENT, name, BF16, "cudnn", fast=False)


@pytest.mark.parametrize("name", ["plain", "causal", "bias"])
def test_short_and_narrow(name):
    check(Sizes(t=10, s=14, h=8, v=8), name, BF16, "cudnn", fast=False)


@pytest.mark.parametrize("causal", [False, True])
def test_bits_of_jax_nn(causal):
    q, k, v, do, _ = arrays(GROUPED, BF16)
    theirs = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    ours = functools.partial(attention, mask_type="causal" if causal else "no_mask")
    got, want = (
        jax.jit(functools.partial(both_passes, f))(q, k, v, do) for f in (ours, theirs)
    )
    same_bits(np.asarray(got[0]), np.asarray(want[0]))  # dq adds up in any order


@each_layout
def test_layouts(layout):
    q, k, v, do, _ = arrays(GROUPED, BF16)
    order = ["BTNH".index(d) for d in layout]
    f = functools.partial(both_passes, functools.partial(attention, layout=layout))
    got = jax.jit(f)(*(jnp.transpose(a, order) for a in (q, k, v, do)))
    want = jax.jit(functools.partial(both_passes, attention))(q, k, v, do)
    same_bits(np.asarray(got[0]), np.asarray(jnp.transpose(want[0], order)))
    for a, b in zip(got[1:], want[1:], strict=True):
        b = np.asarray(jnp.transpose(b, order), np.float32)
        # Another order of sums, rounded to bfloat16 once more.
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=2.0**-6, atol=2.0**-6 * np.abs(b).max()
        )


def test_default():
    q, k, v, _, _ = arrays(GROUPED, BF16)
    assert "te_cudnn_attention_fwd" in str(
        jax.make_jaxpr(te.dot_product_attention)(q, k, v)
    )
    wide = [a.astype(jnp.float32) for a in (q, k, v)]
    assert "te_cudnn" not in str(jax.make_jaxpr(te.dot_product_attention)(*wide))
    with jax.default_device(jax.devices("cpu")[0]):
        assert "te_cudnn" not in str(jax.make_jaxpr(te.dot_product_attention)(q, k, v))
    same_bits(
        np.asarray(te.dot_product_attention(q, k, v)),
        np.asarray(jax.jit(attention)(q, k, v)),
    )


def test_vmap():
    q, k, v, do, _ = arrays(GROUPED, BF16)
    qs = jnp.stack([q, q + q, q - 1], 2)
    f = functools.partial(both_passes, functools.partial(attention, mask_type="causal"))
    got = jax.jit(jax.vmap(f, (2, None, None, None)))(qs, k, v, do)
    for i in range(3):
        want = jax.jit(f)(qs[:, :, i], k, v, do)
        same_bits(np.asarray(got[0][i]), np.asarray(want[0]))


def test_inside_a_loop():
    """XLA captures the calls of a loop in command buffers."""
    q, k, v, do, _ = arrays(GROUPED, BF16)
    f = functools.partial(both_passes, attention)

    @jax.jit
    def loop(q):
        return jax.lax.fori_loop(0, 5, lambda _, q: f(q, k, v, do)[0] + q, q)

    assert np.isfinite(np.asarray(loop(q), np.float32)).all()


@pytest.mark.parametrize("packed", [False, True])
def test_padding_may_hold_anything(packed):
    """Whatever finite number lies behind the last token of an example."""
    q, k, v, do, _ = arrays(GROUPED, BF16)
    counts = jnp.array([100, 256, 3], jnp.int32)
    given = jnp.stack([counts // 2, counts - counts // 2], 1) if packed else counts
    inside = (jnp.arange(GROUPED.t) < counts[:, None])[..., None, None]
    attend = functools.partial(attention, q_seqlen=given, kv_seqlen=given)
    f = jax.jit(functools.partial(both_passes, attend))
    clean = [jnp.where(inside, a, jnp.zeros((), BF16)) for a in (q, k, v, do)]
    dirty = [jnp.where(inside, a, jnp.asarray(1e4, BF16)) for a in (q, k, v, do)]
    got, want = ([np.asarray(a, np.float32) for a in f(*x)] for x in (dirty, clean))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=2.0**-6 * np.abs(b).max())
        assert not np.where(inside, 0, a).any()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axis", [0, 2])
def test_two_devices(kind, axis):
    """Cut along examples, or along heads."""
    q, k, v, do, _ = arrays(GROUPED._replace(b=2), BF16)
    types = (getattr(AxisType, kind),)
    mesh = jax.make_mesh((2,), ("x",), axis_types=types, devices=jax.devices()[:2])
    spec = P(*["x" if i == axis else None for i in range(4)])
    f = functools.partial(both_passes, functools.partial(attention, mask_type="causal"))
    want = jax.jit(f)(q, k, v, do)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k, v, do)]
        got = jax.jit(f)(*placed)
    same_bits(np.asarray(got[0]), np.asarray(want[0]))
