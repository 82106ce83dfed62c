"""What a step calls on a GPU, lowered here with every CUDA handler pretended."""

import collections
import re

import pytest
from _delayed_step import delayed_step

from te_flax.ops import _extension

SMALL = {"history_to_scale": 1, "push_amaxes": 1, "push_letter": 1}
QUANTIZERS = {
    False: {"quantize_tensor": 3},
    True: {"quantize_tensor": 2, "quantize_dbias": 1},
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_delayed_step_calls_few_kernels(bias, monkeypatch):
    """No amax and no scale of its own; the letter of dy is the fourth small kernel."""
    monkeypatch.setattr(_extension, "has", lambda handler, platform: True)
    monkeypatch.setattr(_extension, "cublaslt", lambda: (130100, ""))
    monkeypatch.setattr(_extension, "compute_capability", lambda: 90)
    step, arrays = delayed_step(bias, 64, 128)
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    found = collections.Counter(re.findall(r"@te_flax\.(\w+)", text))
    assert found == {"gemm": 3} | SMALL | QUANTIZERS[bias]
    assert len(re.findall(r"stablehlo\.concatenate", text)) == 1
