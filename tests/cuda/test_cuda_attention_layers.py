"""CUDA: attention layers in bfloat16 through cuDNN against the reference."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import decoded, forward, mha, program, step
from _dense import data
from _gpu import GPU
from flax import nnx

import te_flax as te

pytestmark = GPU
BF16 = jnp.dtype(jnp.bfloat16)
B, T, F, N = 2, 128, 256, 4
LENGTHS = {"q_seqlen": jnp.array([128, 57]), "kv_seqlen": jnp.array([128, 57])}
SEGMENTS = jnp.array([[50, 30, 40], [128, -1, -1]])
SEEN = jnp.asarray(np.random.default_rng(3).random((B, 1, T, T)) < 0.7)
CASES = {  # the layer's options and those of the call
    "plain": ({}, {}),
    "causal": ({"attn_mask_type": "causal"}, {}),
    "grouped": ({"num_kv_heads": 2, "attn_mask_type": "causal"}, {}),
    "lengths": ({"attn_mask_type": "padding"}, LENGTHS),
    "causal lengths": ({"attn_mask_type": "padding_causal"}, LENGTHS),
    "packed": (
        {"attn_mask_type": "padding_causal"},
        {"q_seqlen": SEGMENTS, "kv_seqlen": SEGMENTS},
    ),
    "window": ({"attn_mask_type": "causal", "window_size": (32, 0)}, {}),
    "mask": ({}, {"mask": SEEN}),
    "bias": ({}, {"bias": data((1, N, T, T), 4, BF16)}),
    "rope": ({"enable_rotary_pos_emb": True, "attn_mask_type": "causal"}, {}),
    "query norm": ({"normalize_qk": True}, {}),
    "sequence first": (
        {"transpose_batch_sequence": True, "attn_mask_type": "causal"},
        {},
    ),
}


class Called(nnx.Module):
    """A layer with the arrays of its call."""

    def __init__(self, layer, call):
        self.layer, self.call = layer, nnx.data(call)

    def __call__(self, *inputs):
        return self.layer(*inputs, **self.call)


def close(got, want):
    """Results in bfloat16 of a dozen roundings, each of at most 2^-9 of an element."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for a, b in pairs:
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error <= 12 * 2.0**-9, error


def both(make, inputs, dy):
    """y, the inputs' gradients and the parameters' by cuDNN, and by the reference."""
    with jax.default_matmul_precision("highest"):
        return [step(make(how), inputs, dy) for how in (None, "reference")]


@pytest.mark.parametrize("name", CASES)
def test_options(name):
    options, call = CASES[name]

    def make(implementation):
        common = {"dtype": BF16, "use_bias": False, "implementation": implementation}
        return Called(mha(N, F, **common, **options), call)

    shape = (T, B, F) if "transpose_batch_sequence" in options else (B, T, F)
    x, dy = data(shape, 0, BF16), data(shape, 1, BF16)
    for direction in ("fwd", "bwd"):
        assert f"te_cudnn_attention_{direction}" in program(make(None), x)
    close(*both(make, (x,), dy))


def test_a_decoder_layer():
    def make(implementation):
        return te.TransformerLayer(
            *(F, 2 * F, N),
            layer_type="decoder",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_bias=False,
            dtype=BF16,
            implementation=implementation,
            rngs=nnx.Rngs(0),
        )

    inputs = data((B, T, F), 0, BF16), data((B, 64, F), 2, BF16)
    text = program(make(None), *inputs)
    found = set(re.findall(r"te_cudnn_attention_(\w+)\[", text))
    kinds = ("", "_N_dbias")  # across, and with the biases of self attention
    assert found == {f"{way}{kind}" for way in ("fwd", "bwd") for kind in kinds}
    close(*both(make, inputs, data((B, T, F), 1, BF16)))


@pytest.mark.parametrize("options", [{}, {"enable_rotary_pos_emb": True}], ids=str)
def test_decoding(options):
    """Tokens in pieces, against a cache, give what all of them give at once."""
    common = {"dtype": BF16, "use_bias": False, "attn_mask_type": "causal"}
    layer, x = mha(N, F, **common, **options), data((B, T, F), 0, BF16)
    close(decoded(layer, x, chunks=(64, 32, 31, 1)), forward(layer, x))
