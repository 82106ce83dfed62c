"""FP8 attention around the emulated kernels equals the emulation in plain JAX."""

import jax
import jax.numpy as jnp
import pytest
from _cudnn import Sizes, arrays, emulated, on_gpu
from _fp8 import both, close_fp8
from _meshes import A, E, P, mesh

import te_flax as te

__all__ = ["emulated", "on_gpu"]
pytestmark = pytest.mark.usefixtures("emulated")
BF16 = jnp.dtype(jnp.bfloat16)
AT = Sizes(b=2, t=128, s=128, n=2, k=1, h=128, v=128)


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_equals_the_emulation(mask_type):
    given = arrays(AT, BF16)
    got, want = (both(*given[:4], i, mask_type) for i in ("cudnn", "reference"))
    close_fp8(got, want)


def test_layout_and_negative_scale():
    q, k, v, do, _ = arrays(AT, BF16)
    got = both(q, k, v, do, "cudnn", "causal", scale=-0.1)
    close_fp8(got, both(q, k, v, do, "reference", "causal", scale=-0.1))
    other = [jnp.swapaxes(a, 1, 2) for a in (q, k, v, do)]
    turned = both(*other, "cudnn", "causal", scale=-0.1, layout="BNTH")
    back = [jnp.swapaxes(a, 1, 2) for a in turned[0]]
    close_fp8((back, turned[1]), got)


@pytest.mark.parametrize("kind", [A, E], ids=str)
def test_mesh(kind):
    """Amaxes are those of all devices."""
    given = arrays(AT._replace(b=4, n=4, k=2), BF16)[:4]
    want = both(*given, "cudnn", "causal")
    on = mesh(kind, kind)
    spec = P("dp", None, "tp")
    with jax.set_mesh(on):
        placed = [
            jax.device_put(a, jax.sharding.NamedSharding(on, spec)) for a in given
        ]
        got = both(*placed, "cudnn", "causal")
    close_fp8(got, want)


def test_default():
    q, k, v, _, _ = arrays(AT, BF16)
    config = te.AttentionConfig()
    text = str(
        jax.make_jaxpr(lambda *a: te.dot_product_attention(*a, fp8=config))(q, k, v)
    )
    assert "cudnn" not in text  # scales to be measured
