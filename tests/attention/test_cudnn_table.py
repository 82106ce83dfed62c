"""What the cuDNN implementation refuses, and why; and when it is the default."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from _cudnn import on_gpu

import te_flax as te
from te_flax.functional.attention import capabilities, cudnn

__all__ = ["on_gpu"]
pytestmark = pytest.mark.usefixtures("on_gpu")
B, T, N, H = 2, 16, 4, 8
BF16 = jnp.bfloat16
IDS = jnp.ones((B, T), jnp.int32)
PACKED = {"q_seqlen": IDS[:, :3], "kv_seqlen": IDS[:, :3]}
REFUSED = {
    "bfloat16 and float16": {"dtype": jnp.float32},
    "a multiple of 8": {"dim": 12},
    "<= 256": {"dim": 264},
    "must be even to train with a bias": {"keys": 15, "bias": jnp.ones(15, BF16)},
    "has the dtype of q": {"bias": jnp.ones(T, jnp.float32)},
    "aligns a causal mask with the first query": {
        "mask_type": "causal_bottom_right",
        "keys": 24,
    },
    "its window is": {"window": (3, 2)},
    "pass them as a bias": {"alibi_slopes": True},
    "segments in one piece": {"segment_ids": IDS},
    "numbers the tokens of a segment itself": {"positions": IDS},
    "adds nothing to the scores of packed": {**PACKED, "bias": jnp.ones(T, BF16)},
    "head_dim of q, or 128 where q has 192": {"v_dim": 16},
    "one seed for all steps": {
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
    },
    "no further term": {"softmax_type": "off_by_one"},
    "no function of the scores": {"score_mod": lambda scores, *_: scores},
    "pages in the forward pass only": {
        "page_table": (IDS[:, :1], IDS[:, :1]),
        "kv_seqlen": jnp.array([3, 4]),
    },
    "no empty arrays": {"keys": 0},
}


def call(implementation="cudnn", dtype=BF16, dim=H, v_dim=None, **options):
    keys = options.pop("keys", T)
    q = jnp.ones((B, T, N, dim), dtype)
    k, v = (jnp.ones((B, keys, N, d), dtype) for d in (dim, v_dim or dim))

    def attend(q, k, v):
        return te.dot_product_attention(
            q, k, v, implementation=implementation, **options
        )

    return jax.eval_shape(attend, q, k, v)


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    options = REFUSED[reason]
    with pytest.raises(NotImplementedError, match=f"'cudnn': .*{reason}"):
        call(**options)
    if reason != "no empty arrays":
        call(None, **options)


def used(monkeypatch, **options):
    """Whether cuDNN is what a call without a choice runs on."""
    seen = []
    attend = cudnn.attend
    monkeypatch.setattr(cudnn, "attend", lambda *a: seen.append(a) or attend(*a))
    call(None, **options)
    return bool(seen)


def test_default(monkeypatch):
    assert used(monkeypatch, mask_type="causal", bias=jnp.ones(T, BF16))
    assert used(monkeypatch, mask_type="causal_bottom_right")
    assert used(monkeypatch, **PACKED)
    assert not used(monkeypatch, dtype=jnp.float32)


@pytest.mark.parametrize("value", ["", "1"])
def test_the_environment_asks_for_determinism(value):
    code = (
        "from te_flax.functional.attention.capabilities import Call\n"
        "print(Call.__dataclass_fields__['deterministic'].default)"
    )
    env = os.environ | {"TE_FLAX_DETERMINISTIC": value}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(value == "1")


def test_deterministic(monkeypatch):
    """XLA repeats its sums only where its flags say so."""
    init = capabilities.Call.__init__

    def deterministic(self, *args, **options):
        init(self, *args, **options | {"deterministic": True})

    monkeypatch.setattr(capabilities.Call, "__init__", deterministic)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(NotImplementedError, match="xla_gpu_exclude_nondeterministic"):
        call()
    assert not used(monkeypatch)
    for flag in ("", "=true"):
        monkeypatch.setenv(
            "XLA_FLAGS", f"--a=b --xla_gpu_exclude_nondeterministic_ops{flag} --c"
        )
        assert used(monkeypatch)
