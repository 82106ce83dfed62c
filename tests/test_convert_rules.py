"""Which layers te.convert replaces: rules, refusals, errors; what te.report says."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from tests._models import DENSE, at, data, model

FP8, MX = te.Float8CurrentScaling(), te.MXFP8BlockScaling()


def _converted(net):
    return {path for path in DENSE if type(at(net, path)) is te.DenseGeneral}


@pytest.mark.parametrize(
    ("rules", "paths"),
    [
        ([("*", None)], set(DENSE)),
        ([("blocks/*", None)], {p for p in DENSE if p.startswith("blocks")}),
        ([("blocks/0/w?", FP8)], {"blocks/0/wi", "blocks/0/wo"}),
        ([("*", None), ("attention/*", "skip")], set(DENSE) - set(DENSE[8:12])),
        ([("*", "skip"), ("head", FP8)], {"head"}),
        ([("again", FP8)], {"up"}),  # the second path of a shared layer
        ((("up", None), ["seq/layers/0", FP8]), {"up", "seq/layers/0"}),
    ],
)
def test_patterns(rules, paths):
    assert _converted(te.convert(model(), rules)) == paths


def test_the_last_match_decides():
    rules = [("*", FP8), ("blocks/*", MX), ("blocks/1/*", te.HIGH_PRECISION)]
    net = te.convert(model(), rules)
    assert net.up.recipe == FP8
    assert net.blocks[0].wi.recipe == MX
    assert net.blocks[1].wi.recipe == te.HIGH_PRECISION
    assert te.convert(model(), list(reversed(rules))).blocks[1].wi.recipe == FP8


def test_first_and_last_layers_stay():
    net = te.convert(model(), FP8, skip_first=2, skip_last=1)
    assert _converted(net) == set(DENSE) - {"up", "blocks/0/wi", "head"}
    assert _converted(te.convert(model(), FP8, skip_first=99)) == set()
    again = te.convert(te.revert(net), FP8, skip_first=1, skip_last=1)
    assert _converted(again) == set(DENSE) - {"up", "head"}  # the order is kept


def test_converting_in_steps():
    net = te.convert(te.convert(model(), [("up", FP8)]), [("head", MX)])
    assert (net.up.recipe, net.head.recipe) == (FP8, MX)
    assert nnx.graphdef(te.revert(net)) == nnx.graphdef(model())


def test_the_root_and_pytrees_of_models():
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert type(te.convert(layer)) is te.DenseGeneral
    pair = te.convert({"actor": layer, "critic": [layer]}, [("critic/0", None)])
    assert type(pair["actor"]) is te.DenseGeneral
    assert pair["actor"] is pair["critic"][0]


class Mine(nnx.Linear):
    """Its call may do anything."""


def _with(name, value):
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    setattr(layer, name, value)
    return layer


def _kernel(value):
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(value)
    return layer


def _general(**options):
    return nnx.LinearGeneral(4, 4, **options, rngs=nnx.Rngs(0))


def _dot(*args, **options):
    return jax.lax.dot_general(*args, **options)


REFUSED = {
    "its dot_general is not jax.lax.dot_general": lambda: _with("dot_general", _dot),
    "its dot_general is not": lambda: _general(dot_general=_dot),
    "its dot_general_cls is not": lambda: _general(dot_general_cls=lambda: _dot),
    "it has a batch_axis": lambda: _general(batch_axis={0: 2}, axis=-1),
    "nnx.LoRALinear may compute something else": lambda: nnx.LoRALinear(
        4, 4, lora_rank=2, rngs=nnx.Rngs(0)
    ),
    "Mine may compute something else": lambda: Mine(4, 4, rngs=nnx.Rngs(0)),
    "its kernel is int8, not": lambda: _kernel(jnp.ones((4, 4), jnp.int8)),
    "its kernel is float8_e4m3fn, not": lambda: _kernel(
        jnp.ones((4, 4), jnp.float8_e4m3fn)
    ),
    "its kernel is dict, not": lambda: _kernel({"q": jnp.ones((4, 4))}),
    "its kernel has shape (4, 5), which": lambda: _kernel(jnp.ones((4, 5))),
    "it holds more than its parameters: extra": lambda: _with(
        "extra", nnx.Param(jnp.ones(3))
    ),
    "precision must be None": lambda: _with("precision", "bf16_bf16_f32_x3"),
    "preferred_element_type must be None": lambda: _with(
        "preferred_element_type", jnp.int32
    ),
    "it is inside nnx.WeightNorm": lambda: nnx.WeightNorm(
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    ),
    "te_flax has no layer for nnx.BatchNorm": lambda: nnx.BatchNorm(
        4, rngs=nnx.Rngs(0)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_honoured_is_left_alone_and_listed(reason):
    net = nnx.List([REFUSED[reason](), nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
    converted = te.convert(net, FP8)
    assert type(converted[0]) is type(net[0])
    assert nnx.graphdef(converted[0]) == nnx.graphdef(net[0])
    assert type(converted[1]) is te.DenseGeneral
    rows = te.report(converted, file=io.StringIO()).rows
    assert rows[0].runs == "high precision"
    assert f"not converted: {reason}" in rows[0].why.replace("DenseGeneral: ", "")


class Promotes:
    """A promote_dtype of the user's own is honoured."""

    @staticmethod
    def promote(arrays, *, dtype=None):
        return tuple(None if a is None else a.astype(jnp.bfloat16) for a in arrays)

    @staticmethod
    def doubled(arrays, *, dtype=None):
        x, kernel, *others = arrays
        return x, 2 * kernel, *others


def test_a_promotion_of_the_users_own():
    layer = nnx.Linear(4, 4, promote_dtype=Promotes.promote, rngs=nnx.Rngs(0))
    assert te.convert(layer)(data(2, 4)).dtype == layer(data(2, 4)).dtype
    layer = nnx.Linear(4, 4, promote_dtype=Promotes.doubled, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(te.convert(layer)(data(2, 4)), layer(data(2, 4)), 1e-6)


PARTS = "convert: rules must"
RULES = "hold (pattern, action) pairs, the pattern a str, got"
ERRORS = [
    ([("nix/*", None)], {}, ValueError, f"{PARTS} match the path of a layer, got"),
    ("mxfp8", {}, TypeError, f"{PARTS} be a recipe, None or a sequence"),
    (3, {}, TypeError, f"{PARTS} be a recipe, None or a sequence"),
    (["up"], {}, TypeError, f"{PARTS} {RULES} 'up'"),
    ([(1, None)], {}, TypeError, f"{PARTS} {RULES} (1, None)"),
    ([("up", "mxfp8")], {}, TypeError, f"{PARTS} map 'up' to a recipe"),
    (None, {"skip_first": -1}, ValueError, "convert: skip_first must be an int >= 0"),
    (None, {"skip_last": True}, ValueError, "convert: skip_last must be an int >= 0"),
    (None, {"amax_history_len": 0}, ValueError, "amax_history_len must be an integer"),
    (
        [("blocks/*", te.Fuse("nix", "wi"))],
        {},
        ValueError,
        f"{PARTS} name a module that holds nix and wi, got 'blocks/*'",
    ),
]


@pytest.mark.parametrize(("rules", "options", "kind", "text"), ERRORS)
def test_errors(rules, options, kind, text):
    with pytest.raises(kind) as error:
        te.convert(model(), rules, **options)
    assert text in str(error.value)


def test_a_pattern_without_a_match_lists_near_paths():
    with pytest.raises(ValueError, match=r"near paths: 'blocks/0/wi'") as error:
        te.convert(model(), [("*", None), ("block/0/wi", FP8)])
    assert "got 'block/0/wi'" in str(error.value)


@pytest.mark.parametrize("net", [nnx.Conv(1, 1, 1, rngs=nnx.Rngs(0)), [len], []])
def test_a_model_without_layers(net):
    with pytest.raises(ValueError, match="convert: model must hold a linear layer"):
        te.convert(net)


@pytest.mark.parametrize(("norm", "linear"), [("", "wi"), ("norm", None)])
def test_fuse_names_two_layers(norm, linear):
    with pytest.raises(TypeError, match=r"Fuse: (norm|linear) must be a path"):
        te.Fuse(norm, linear)
    with pytest.raises(TypeError, match="Fuse: recipe must be a recipe"):
        te.Fuse("norm", "wi", "mxfp8")


def _why(net, path):
    return {r.path: (r.runs, r.why) for r in te.report(net, file=io.StringIO()).rows}[
        path
    ]


def test_the_report_says_what_decides():
    rules = [("blocks/*", None), ("up", FP8), ("head", te.HIGH_PRECISION)]
    net = te.convert(model(), rules)
    high = "high precision"
    assert _why(net, "up") == (repr(FP8), "its own recipe")
    assert _why(net, "head") == (high, "its own recipe is te.HIGH_PRECISION")
    assert _why(net, "blocks/0/wi") == (high, "no recipe in context")
    assert _why(net, "named/a") == (high, "not converted: no rule of te.convert "
                                    "chose it")  # fmt: skip
    with te.autocast(MX):
        assert _why(net, "blocks/0/wi") == (repr(MX), "autocast")
        assert _why(net, "up") == (repr(FP8), "its own recipe")
        with te.autocast(enabled=False):
            assert _why(net, "up") == (high, "autocast(enabled=False)")
            assert _why(net, "blocks/0/wi") == (high, "autocast(enabled=False)")


def test_the_report_is_printed_and_returned(capsys):
    net = te.convert(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    found = te.report(net)
    assert capsys.readouterr().out == f"{found}\n"
    assert "4x8" in str(found)
    other = te.report(nnx.Embed(3, 4, rngs=nnx.Rngs(0)), file=io.StringIO())
    assert other.rows[0].why == "not converted: te_flax has no layer for nnx.Embed"


def test_a_shared_layer_has_one_row():
    paths = [row.path for row in te.report(model(), file=io.StringIO()).rows]
    assert "up" in paths
    assert "again" not in paths
