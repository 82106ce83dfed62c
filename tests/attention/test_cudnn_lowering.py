"""What is lowered for a GPU equals what jax.nn's cuDNN implementation lowers to."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from _cudnn import Sizes, arrays, on_gpu

import te_flax as te
from te_flax.ops import attention_fp8

__all__ = ["on_gpu"]
BF16, E4M3 = jnp.dtype(jnp.bfloat16), jnp.float8_e4m3fn
AT = Sizes(t=32, s=48, h=64, v=64)
BIAS = jnp.ones((1, AT.n, AT.t, AT.s), BF16)
MASK = jnp.ones((AT.b, 1, AT.t, AT.s), bool)
LENGTHS = jnp.array([3, 7, 9], jnp.int32)
EMPTY = (False, "", "0", [], "PRIMITIVE_TYPE_INVALID")
CASES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "causal": ({"mask_type": "causal"}, {"is_causal": True}),
    "window": (
        {"mask_type": "causal", "window": (4, 0)},
        {"is_causal": True, "local_window_size": (4, 0)},
    ),
    "lengths": (
        {"q_seqlen": LENGTHS, "kv_seqlen": LENGTHS},
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    ),
    "bias": ({"bias": BIAS}, {"bias": BIAS}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
}
CALL = re.compile(
    r'custom_call @(__cudnn\S+?)\(.*?\) \{.*?backend_config = "(.*?)", '
    r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\]\} : (.*)"
)


def without_defaults(tree):
    """Drops what a message has by default, as its reader does."""
    if not isinstance(tree, dict):
        return tree
    kept = {k: without_defaults(a) for k, a in tree.items() if k != "algo_id"}
    return {k: a for k, a in kept.items() if a not in EMPTY}


def calls(f, *given):
    """Target, configuration, layouts and types of every call of cuDNN."""
    text = jax.jit(f).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    made = []
    for name, config, *rest in CALL.findall(text):
        config = json.loads(config.replace("\\22", '"'))
        made.append((name, without_defaults(config), *rest))
    return made


def both_passes(attend, options):
    bias = {n: options[n] for n in ("bias",) if n in options}

    def f(q, k, v, do, bias):
        def call(q, k, v, bias):
            return attend(q, k, v, **(options | bias))

        o, pull = jax.vjp(call, q, k, v, bias)
        return o, pull(do)

    return f, bias


@pytest.fixture
def cudnn_of_jax(monkeypatch):
    """Lets jax.nn lower without a GPU: it asks for versions first."""
    q = jnp.ones((1, 2, 1, 8), BF16)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.nn.dot_product_attention(q, q, q, implementation="cudnn")
    module = sys.modules["jax._src.cudnn.fused_attention_stablehlo"]
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91900)
    return module


@pytest.mark.usefixtures("on_gpu", "cudnn_of_jax")
@pytest.mark.parametrize("case", CASES)
def test_equals_jax_nn(case):
    ours, theirs = CASES[case]
    q, k, v, do, _ = arrays(AT, BF16)
    found = []
    for attend, options in (
        (te.dot_product_attention, ours),
        (jax.nn.dot_product_attention, theirs | {"implementation": "cudnn"}),
    ):
        f, bias = both_passes(attend, options)
        found.append(calls(f, q, k, v, do, bias))
    # Before 0.11 JAX asked for the gradient of a mask too.
    same = 1 if case == "mask" and jax.__version_info__ < (0, 11) else 2
    assert len(found[0]) == 2
    assert found[0][:same] == found[1][:same]
    results = found[0][1][-1].split("->")[1].count("tensor<")
    assert results == (5 if case == "bias" else 4)  # gradients and the workspace


@pytest.mark.parametrize("causal", [False, True])
def test_fp8_equals_jax(causal, cudnn_of_jax):
    """Calls of JAX's own function, which has no public name."""
    at = Sizes(t=128, s=256, h=128, v=128)
    q, k, v, do, _ = (a.astype(E4M3) for a in arrays(at, BF16))
    one = jnp.ones((1, 1, 1, 1), jnp.float32)

    def theirs(q, k, v, do):
        def attend(q, k, v):
            return cudnn_of_jax.dot_product_attention(
                q,
                k,
                v,
                scale=0.3,
                mask_type=cudnn_of_jax.MaskType.CAUSAL
                if causal
                else cudnn_of_jax.MaskType.NO_MASK,
                use_fp8=True,
                fp8_params=dict.fromkeys(cudnn_of_jax.fp8_params_keys, one),
            )

        o, pull = jax.vjp(attend, q, k, v)
        return o, pull((do, one, one))

    def ours(q, k, v, do):
        q, do = (a.reshape(*a.shape[:2], at.k, -1, at.h) for a in (q, do))
        attrs = {"scale": 0.3, "causal": causal, "layout": "BTNH"}
        one = jnp.float32(1)
        o, stats, *_ = attention_fp8.forward()(q, k, v, *[one] * 6, **attrs)
        return attention_fp8.backward()(q, k, v, o, do, stats, *[one] * 12, **attrs)

    found = []
    for f in (ours, theirs):
        found.append(calls(f, q, k, v, do))
        for _, config, *_ in found[-1]:  # FP8 reads none of them
            for key in ("seed", "max_seg_per_batch"):
                config["cudnn_fmha_backend_config"].pop(key, None)
    assert len(found[0]) == 2
    assert found[0] == found[1]


MEMORY = {  # minor to major, of operands [B, T, N, H] and of results [B, N, T, H]
    "BTNH": ("3, 2, 1, 0", "3, 1, 2, 0"),
    "BNTH": ("3, 1, 2, 0", "3, 2, 1, 0"),
    "TBNH": ("3, 2, 0, 1", "3, 1, 0, 2"),
}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("layout", MEMORY)
def test_no_array_is_moved(layout):
    """Transpositions change the order of dims in the types, not in memory."""
    q, k, v, do, _ = arrays(AT, BF16)
    order = ["BTNH".index(d) for d in layout]
    given = [jnp.transpose(a, order) for a in (q, k, v, do)]
    f, bias = both_passes(te.dot_product_attention, {"layout": layout})
    forward, backward = calls(f, *given, bias)
    read, written = MEMORY[layout]
    assert forward[2].count(f"[{read}]") == 3
    assert f"[{written}]" in forward[3]
    assert backward[2].count(f"[{read}]") == 5
    assert backward[3].count(f"[{written}]") == 3
