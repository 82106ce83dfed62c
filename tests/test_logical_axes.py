"""The presets of te.logical_axis_rules, as docs/sharding.md lists them."""

import pytest

import te_flax as te

NAMES = {"batch", "seqlen", "embed", "mlp", "heads", "kv_heads", "vocab", "layers"}
TENSOR = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), "t")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"dp": "d"}, {"batch": ("d",)}),
        ({"fsdp": "f"}, {"batch": ("f",), "embed": "f"}),
        ({"tp": "t"}, TENSOR),
        ({"tp": "t", "sp": "t"}, {**TENSOR, "seqlen": "t"}),
        ({"dp": ("a", "b"), "fsdp": "f"}, {"batch": ("a", "b", "f"), "embed": "f"}),
    ],
)
def test_rules(given, expected):
    rules = dict(te.logical_axis_rules(**given))
    assert rules.keys() == NAMES
    assert {name: axes for name, axes in rules.items() if axes} == expected
