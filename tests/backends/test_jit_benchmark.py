"""What ``python -m benchmarks.gpu --jit`` times, without a GPU."""

import jax
import pytest

from benchmarks import jit_gpu
from te_flax.backends import registry
from te_flax.ops._choice import parse


def test_sizes_are_read():
    assert [jit_gpu.size(f"{m}x{k}") for m, k in jit_gpu.SIZES] == [*jit_gpu.SIZES]
    for text in ("4104", "4104x", "axb", "1x2x3"):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            jit_gpu.size(text)


@pytest.fixture
def lower(monkeypatch):
    monkeypatch.setattr(registry, "why_not", lambda *_: None)
    monkeypatch.setattr(registry, "arch", lambda platform: ("sm_90a", ""))
    monkeypatch.setattr(registry, "_make", lambda *_: "")

    def lower(call, types):
        traced = jax.jit(call).trace(*types)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


def test_every_call_has_a_generated_kernel(lower):
    for _, call, types in jit_gpu.calls(8192, 4096, parse("*=jit")):
        assert "te_flax.jit." in lower(call, types)


def test_blocks_that_are_not_whole_are_left_to_the_compiled_kernel(lower):
    for name, call, types in jit_gpu.calls(4104, 4096, parse("*=jit")):
        if name == "quantize_mxfp8_row":
            assert "te_flax.jit." in lower(call, types)
        else:
            why = "cutedsl: M % 32 = 8 with a copy along the tokens"
            with pytest.raises(NotImplementedError, match=why):
                lower(call, types)
