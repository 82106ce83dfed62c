"""The emulation of FP8 attention against numpy, on a mesh, and its mailbox."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _cases import CASES, DO, FAST, KEYS, SWAP, VALUES, B, K, N, Q, inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.functional.attention.fp8 import BACKWARD, FORWARD
from te_flax.ops.history import decode
from te_flax.quantize.mailbox import MAILBOX_SIZE
from te_flax.testing.numerics import rounding_share

LIMITS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
E5M2 = te.TensorQuantizer(format="e5m2")
SCALES = {name: 2.0 ** (i % 5 + 2) * 1.3 for i, name in enumerate(FORWARD + BACKWARD)}


def state(known):
    mailbox = jnp.zeros((5, MAILBOX_SIZE), jnp.float32)
    if not known:
        return te.AttentionState(mailbox=mailbox)
    forward, backward = (
        jnp.asarray([SCALES[n] for n in names]) for names in (FORWARD, BACKWARD)
    )
    pairs = te.Scale(forward, 1 / forward), te.Scale(backward, 1 / backward)
    return te.AttentionState(pairs[0], pairs[1], mailbox)


def run(case, known, arrays=(Q, KEYS, VALUES), do=DO):
    """o, amaxes forward, gradients, amaxes backward."""
    config = te.AttentionConfig(backward=E5M2, report=True)

    def loss(q, k, v, held):
        o, amaxes = te.dot_product_attention(q, k, v, fp8=(config, held), **case)
        if jax.typeof(o).sharding.mesh.axis_types:
            o = jax.sharding.reshard(o, P())
        return jnp.sum(o * do), (o, amaxes)

    f = jax.grad(loss, range(4), has_aux=True)
    grads, (o, amaxes) = jax.jit(f, compiler_options=FAST)(*arrays, state(known))
    return o, amaxes, grads[:3], decode(grads[3].mailbox)


class Emulation:
    """The same steps in float64 between the roundings, scale by scale."""

    def __init__(self, known):
        self.known, self.amax = known, {}

    def round(self, name, x):
        dtype, limit = LIMITS["e4m3" if name in FORWARD else "e5m2"]
        self.amax[name] = np.abs(x).max()
        scale = SCALES[name] if self.known else limit / self.amax[name]
        scale = np.float32(scale)
        codes = np.clip(np.float32(x) * scale, -limit, limit).astype(dtype)
        return codes.astype(np.float64) / np.float64(scale)

    def __call__(self, x):
        group = N // K
        k, v = self.round("k", x.k), self.round("v", x.v)
        q, do = self.round("q", x.q), self.round("do", x.do)
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = x.scale * np.einsum("bnth,bnsh->bnts", q, k) + x.added
        p = np.where(x.seen, np.exp(scores), 0)
        total = p.sum(-1, keepdims=True)
        p = p / np.where(total == 0, 1, total)
        s = self.round("s", p)
        o = self.round("o", np.einsum("bnts,bnsh->bnth", s, v))
        dv = np.einsum("bnts,bnth->bnsh", s, do)
        dp = np.einsum("bnth,bnsh->bnts", do, v) - (do * o).sum(-1, keepdims=True)
        dp = self.round("dp", p * dp)
        dq = self.round("dq", x.scale * np.einsum("bnts,bnsh->bnth", dp, k))
        dk = x.scale * np.einsum("bnts,bnth->bnsh", dp, q)
        dk, dv = (a.reshape(B, K, group, *a.shape[2:]).sum(2) for a in (dk, dv))
        return o, (dq, self.round("dk", dk), self.round("dv", dv))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("case", ["causal", "bias"])
def test_emulation(case, known):
    o, forward, grads, backward = run(CASES[case], known)
    x = inputs(CASES[case])
    numpy = Emulation(known)
    want_o, want_grads = numpy(x)
    for names, amaxes in ((FORWARD, forward), (BACKWARD, backward)):
        for name, amax in zip(names, np.asarray(amaxes), strict=True):
            exact = name in ("q", "k", "v", "do")
            want = np.float32(numpy.amax[name])
            assert amax[1] == 0
            assert amax[0] == want if exact else abs(amax[0] - want) < 0.02 * want
    pairs = zip(
        ("o", "dq", "dk", "dv"), (o, *grads), (want_o, *want_grads), strict=True
    )
    for name, got, want in pairs:
        got = np.transpose(np.asarray(got, np.float64), SWAP)
        # A sum that lies between two codes may round to either.
        other = np.abs(got - want) > 1e-5 * np.abs(want).max()
        assert other.mean() < 0.02, name
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_it_stays_near_the_unquantized_result():
    """Eleven roundings of e4m3 and e5m2 on the way to a gradient at most."""
    o, _, grads, _ = run(CASES["causal"], known=False)
    unit = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}

    def loss(q, k, v):
        o = te.dot_product_attention(q, k, v, **CASES["causal"])
        return jnp.sum(o * DO), o

    want = jax.jit(jax.grad(loss, range(3), has_aux=True), compiler_options=FAST)
    exact, plain = want(Q, KEYS, VALUES)
    share = rounding_share([unit["e4m3"]] * 5)
    assert np.linalg.norm(o - plain) < share * np.linalg.norm(plain)
    share = rounding_share([unit["e4m3"]] * 5 + [unit["e5m2"]] * 3)
    for a, b in zip(grads, exact, strict=True):
        assert 0 < np.linalg.norm(a - b) < share * np.linalg.norm(b)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_amaxes_are_global(kind):
    on = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))
    want = run({"mask_type": "causal"}, known=False)
    with jax.set_mesh(on):
        spec = NamedSharding(on, P("dp", None, "tp"))
        arrays = [jax.device_put(a, spec) for a in (Q, KEYS, VALUES)]
        got = run({"mask_type": "causal"}, False, arrays, jax.device_put(DO, P()))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        near = np.abs(np.asarray(a) - np.asarray(b)) <= 1e-5 * np.abs(b).max()
        assert near.mean() > 0.98
    np.testing.assert_array_equal(got[1][:3], want[1][:3])
    np.testing.assert_array_equal(got[3][0], want[3][0])


def test_low_scores_weigh_as_others_do():
    """Beside -1e30 nothing is left of q . k: the codes are those of queries of 0."""
    low, none = (jnp.full((1, N, 1, 1), b) for b in (-1e30, 0.0))
    o, forward, (dq, _, dv), backward = run({"bias": low}, True)
    want = run({"bias": none}, True, (0 * Q, KEYS, VALUES))
    for a, b in zip((o, dq, dv), (want[0], want[2][0], want[2][2]), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(forward[1:], want[1][1:])
    np.testing.assert_array_equal(backward[:3], want[3][:3])


def test_a_query_that_sees_nothing():
    case = CASES["lengths"]
    o, amaxes, grads, _ = run(case, known=True, do=DO.at[1].set(jnp.nan))
    for a in (o, amaxes, *grads):
        assert np.isfinite(a).all()
    assert not np.any(o[1])
    assert not any(np.any(g[1]) for g in grads)


def test_wrong_arguments():
    for wrong in (te.DelayedScaling(), (te.AttentionConfig(),), "e4m3"):
        with pytest.raises(TypeError, match="fp8 must be an AttentionConfig, or a"):
            te.dot_product_attention(Q, KEYS, VALUES, fp8=wrong)
    config = te.AttentionConfig()
    with pytest.raises(NotImplementedError, match="'chunked': fp8: FP8 attention"):
        te.dot_product_attention(Q, KEYS, VALUES, fp8=config, implementation="chunked")
