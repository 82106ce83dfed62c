"""FP8 attention around the emulated kernels equals the emulation in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _cudnn import Sizes, arrays, emulated, on_gpu
from _fp8 import both, close_fp8
from _meshes import A, E, P, mesh

import te_flax as te

__all__ = ["emulated", "on_gpu"]
pytestmark = pytest.mark.usefixtures("emulated")
BF16 = jnp.dtype(jnp.bfloat16)
AT = Sizes(b=2, t=128, s=128, n=2, k=1, h=128, v=128)


@pytest.mark.parametrize(
    "options",
    [{"mask_type": "causal"}, {"scale": 0.1, "layout": "TBNH"}],
    ids=["causal", "layout"],
)
def test_equals_the_emulation(options):
    order = ["BTNH".index(d) for d in options.get("layout", "BTNH")]
    given = [jnp.transpose(a, order) for a in arrays(AT, BF16)[:4]]
    got, want = (
        both(*given, implementation=i, record=True, **options)
        for i in ("cudnn", "reference")
    )
    close_fp8(got, want)
    shown = [0, 1, 2, 5]  # q, k, v and do; the kernel shows the amaxes of the others
    got, want = (np.asarray(numbers) for *_, numbers in (got, want))
    np.testing.assert_array_equal(got[shown], want[shown])
    np.testing.assert_allclose(got[:, :2], want[:, :2], rtol=0.02)
    unseen = np.delete(np.arange(10), shown)
    assert np.isnan(got[unseen, 2:4]).all()
    assert not np.isnan(want).any()
    assert not got[:, 4].any()


def test_small_probabilities():
    """Their scale would have the exponentials saturate, which the kernel rounds."""
    given, amaxes = arrays(AT, BF16)[:4], (6.0, 6.0, 6.0, 0.5, 6.0)
    got, want = (
        both(*given, implementation=i, amaxes=amaxes, record=True)
        for i in ("cudnn", "reference")
    )
    assert np.asarray(want[1])[3, 0] < 0.5
    close_fp8(got, want)
    scale = np.asarray([numbers[3, 1] for *_, numbers in (got, want)])
    np.testing.assert_allclose(scale, [448, 896], rtol=2.0**-22)


@pytest.mark.parametrize("kind", [A, E], ids=str)
def test_mesh(kind):
    """Amaxes are those of all devices."""
    given = arrays(AT._replace(b=4, n=4, k=2), BF16)[:4]
    want = both(*given, implementation="cudnn", record=True)
    on = mesh(kind, kind)
    spec = P("dp", None, "tp")
    with jax.set_mesh(on):
        placed = [
            jax.device_put(a, jax.sharding.NamedSharding(on, spec)) for a in given
        ]
        got = both(*placed, implementation="cudnn", record=True)
    close_fp8(got, want)
    np.testing.assert_allclose(got[2], want[2], rtol=0.02)


def test_default():
    q, k, v, _, _ = arrays(AT, BF16)
    config = te.AttentionConfig()
    text = str(
        jax.make_jaxpr(lambda *a: te.dot_product_attention(*a, fp8=config))(q, k, v)
    )
    assert "cudnn" not in text  # scales to be measured
