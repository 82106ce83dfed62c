"""The table of capabilities: every row, both ways, and what a call is told."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import te_flax as te
from te_flax.functional.attention import capabilities
from te_flax.functional.attention.capabilities import IMPLEMENTATIONS, TABLE, Call
from te_flax.functional.attention.options import Operands, Options, sizes_of

LENGTHS = jnp.array([128, 128])
PACKED = {"q_seqlen": jnp.ones((2, 3)), "kv_seqlen": jnp.ones((2, 3))}
HUGE = jax.ShapeDtypeStruct((2**8, 2**12, 2**5, 2**6), jnp.bfloat16)
PAIR = (jnp.zeros((2, 128), jnp.int32),) * 2
Q = jax.ShapeDtypeStruct((2, 128, 4, 128), jnp.bfloat16)
# Row of the table -> a call that has the property and no other that counts.
PROPERTIES = {
    "another platform than an NVIDIA GPU": {"platform": "cpu"},
    "a GPU older than sm_90": {"capability": 80},
    "float32 or float64": {"q": jax.ShapeDtypeStruct(Q.shape, jnp.float32)},
    "head_dim above 256 or no multiple of 8": {
        "q": jax.ShapeDtypeStruct((2, 128, 4, 260), jnp.bfloat16)
    },
    "head_dims that differ, but not 192 and 128": {
        "v": jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    },
    "a dim of size 0": {"q": jax.ShapeDtypeStruct((0, 128, 4, 128), jnp.bfloat16)},
    "bias": {"bias": jnp.zeros((4, 128, 128))},
    "bias or mask of another dtype than q": {"mask": jnp.zeros(128)},
    "bias with odd T or S, training": {
        "bias": jnp.zeros((), jnp.bfloat16),
        "q": jax.ShapeDtypeStruct((2, 127, 4, 128), jnp.bfloat16),
    },
    "mask": {"mask": jnp.ones((128, 128), bool)},
    "a scale that is not positive": {"scale": -1.0},
    "causal mask": {"mask_type": "causal", "right": 0},
    "causal mask, bottom right": {
        "mask_type": "causal_bottom_right",
        "right": 0,
        "kv_seqlen": LENGTHS,
    },
    "window to the right": {"left": 3, "right": 2},
    "window": {"left": 3, "right": 0, "mask_type": "causal"},
    "alibi_slopes": {"alibi_slopes": jnp.ones(4)},
    "q_seqlen, kv_seqlen": {"kv_seqlen": LENGTHS},
    "segment_ids": {"segment_ids": PAIR},
    "positions": {"positions": PAIR},
    "offsets": {"offsets": PAIR},
    "packed lengths [B, M]": PACKED,
    "packed lengths, bias or mask": {"mask": jnp.ones(128, bool), **PACKED},
    "packed lengths, head_dim of v another than that of q": {
        "v": jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16),
        **PACKED,
    },
    "packed lengths, 2^31 elements or more": {"q": HUGE, **PACKED},
    "dropout": {"dropout_rate": 0.1},
    "softmax_type off_by_one": {"softmax_type": "off_by_one"},
    "softmax_type learnable": {"softmax_type": "learnable"},
    "score_mod": {"score_mod": lambda s, *_: s},
    "page_table": {"page_table": PAIR},
    "return_residual": {"return_residual": True},
    "fp8": {"fp8": True},
    "fp8, shapes": {
        "fp8": True,
        "q": jax.ShapeDtypeStruct((2, 8, 4, 128), jnp.bfloat16),
    },
    "fp8, masks": {"fp8": True, "mask_type": "padding"},
    "fp8, bias, mask, lengths or window": {"fp8": True, "kv_seqlen": LENGTHS},
    "fp8, another quantizer backwards, training": {"fp8": True, "uniform": False},
    "fp8, scales to be measured": {"fp8": True, "scaled": False},
    "fp8, return_residual": {"fp8": True, "return_residual": True},
    "fp8, page_table": {"fp8": True, "page_table": PAIR},
    "TE_FLAX_DETERMINISTIC=1": {"deterministic": True},
}
PLAIN = Options("BTNH", "no_mask", None, None, 1.0, "vanilla", 0.0, None, None, False)


def call(**changes) -> Call:
    operands = Operands(Q, Q, Q, *[None] * (len(Operands._fields) - 3))
    if "q" in changes:
        changes = {"k": changes["q"], "v": changes["q"]} | changes
    operands = operands._replace(
        **{k: changes.pop(k) for k in list(changes) if k in Operands._fields}
    )
    options = PLAIN._replace(
        **{k: changes.pop(k) for k in list(changes) if k in Options._fields}
    )
    base = {"platform": "gpu", "deterministic": False} | changes
    return Call(options, operands, sizes_of("BTNH", operands), **base)


def test_every_row_has_a_case():
    assert list(PROPERTIES) == [row.name for row in TABLE]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_row(row):
    """A call with the property is refused by exactly those that the row names."""
    assert not row.holds(call())
    having = call(**PROPERTIES[row.name])
    assert row.holds(having)
    for name in IMPLEMENTATIONS:
        told = capabilities.reasons(having, name)
        if name not in row.without:
            assert not any(text.startswith(f"{row.name}:") for text in told)
            continue
        assert f"{row.name}: {row.without[name]}" in told
        with pytest.raises(NotImplementedError, match="implementation must be able"):
            capabilities.choose(having, name)
    assert capabilities.choose(having, "reference") == "reference"


def test_the_page_shows_the_table():
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    lines = page.read_text().splitlines()
    for row in TABLE:
        reasons = "; ".join(f"`{name}`: {why}" for name, why in row.without.items())
        assert f"| {row.name} | {reasons or '-'} |" in lines


def test_order_of_preference():
    assert capabilities.choose(call(), None) == "cudnn"
    assert capabilities.choose(call(platform="cpu"), None) == "chunked"
    odd = call(**PROPERTIES["bias with odd T or S, training"])
    assert capabilities.choose(odd, None) == "chunked"
    served = dataclasses.replace(odd, training=False)
    assert capabilities.choose(served, None) == "cudnn"


def test_a_call_is_told_why():
    q = jnp.ones((2, 8, 4, 16))
    with pytest.raises(
        NotImplementedError, match=r"cudnn.*use None or one of \['chunk"
    ):
        te.dot_product_attention(q, q, q, implementation="cudnn")
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        te.dot_product_attention(q, q, q, implementation="flash")
