"""The presets of te.logical_axis_rules, as docs/sharding.md lists them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_flax as te
from te_flax.sharding import Placement, constrain, placement

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


def test_names_without_a_mesh_axis():
    """Those with a rule ask for what is not sharded, others for nothing."""
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))
    rules = nnx.logical_axis_rules(te.logical_axis_rules(tp="t", sp="t"))
    with jax.set_mesh(mesh):
        assert placement(("batch", None), 2) == Placement()
        with rules:
            assert placement(("batch", "seqlen"), 2).auto == P(None, ("t",))
            assert placement(("batch", None), 2) == Placement(auto=P(None, None))
            assert placement(("batch", "own"), 2) == Placement()
            assert placement((None, None), 2) == Placement()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_name_with_a_rule_asks_for_a_whole_dim(kind):
    """Names that no rule knows ask for nothing, those that stand for None do."""
    mesh = jax.make_mesh((2,), ("t",), axis_types=(kind,))
    cut = NamedSharding(mesh, P("t"))
    x = jax.device_put(jnp.zeros((4, 8)), cut)
    with jax.set_mesh(mesh):
        assert constrain(x, ("unknown", None)).sharding.is_equivalent_to(cut, 2)
        with nnx.logical_axis_rules(te.logical_axis_rules(tp="t", sp="t")):
            assert constrain(x, ("seqlen", None)).sharding.is_equivalent_to(cut, 2)
            assert constrain(x, ("batch", None)).sharding.is_fully_replicated
