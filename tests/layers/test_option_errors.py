"""Options of another type: every layer names itself, the option, value and remedy."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax.errors import message, part_of

LAYERS = {
    te.DenseGeneral: (4, 6),
    te.LayerNorm: (4,),
    te.RMSNorm: (4,),
    te.LayerNormDenseGeneral: (4, 6),
    te.LayerNormMLP: (4, 6),
    te.Einsum: ("bd,dh->bh", (4, 6)),
    te.DotProductAttention: (2, 4),
    te.MultiHeadAttention: (2, 4),
    te.TransformerLayer: (4, 8, 2),
    te.RelativePositionBiases: (8, 16, 2),
}
# Names with a rule of their own.
CHECKED = {"layernorm_type", "layer_type", "attention_type", "softmax_type"}
CHECKED |= {"attn_mask_type", "self_attn_mask_type", "low_rank_adaptation_scope"}
CHECKED |= {"rotary_pos_emb_group_method"}


# Arguments of DenseGeneral that do not go on under their names.
PROJECTIONS = {"axis", "enable_low_rank_adaptation", "kernel_axes", "bias_axes"}
INPUTS = {"input_axes", "dot_input_axes"}
REFUSED = {
    te.LayerNormDenseGeneral: {"axis", "input_axes"},
    te.LayerNormMLP: {"axis", "kernel_axes", "bias_axes", *INPUTS},
    te.Einsum: {"axis", "use_bias"},
    te.MultiHeadAttention: PROJECTIONS,
    te.TransformerLayer: PROJECTIONS,
}


def _parameters(layer):
    """All keywords of a layer, those that it hands on included."""
    of = lambda layer: dict(inspect.signature(layer.__init__).parameters)
    own = of(layer)
    if "attention" in own:
        axes = {n: p for n, p in of(te.MultiHeadAttention).items() if "_axes" in n}
        own = axes | own
    if layer in REFUSED:
        dense = of(te.DenseGeneral)
        own = {n: p for n, p in dense.items() if n not in REFUSED[layer]} | own
    return own


def _cases():
    """Every flag, name and axes option there is, with a value of another type."""
    for layer in LAYERS:
        for name, parameter in _parameters(layer).items():
            if "_axes" in name:
                for value in ("embed", (1,), 3):
                    yield layer, name, value, "None or a tuple with a logical axis, or"
            elif isinstance(parameter.default, bool):
                for value in ("no", 1, None):
                    yield layer, name, value, "True or False"
            elif name == "quantization_checkpoint_name":
                yield layer, name, 3, "a str or None"
            elif isinstance(parameter.default, str) and name not in CHECKED:
                for value in (3, None):
                    yield layer, name, value, "a str"


@pytest.mark.parametrize(
    ("layer", "name", "value", "rule"),
    [pytest.param(*c, id=f"{c[0].__name__}-{c[1]}-{c[2]}") for c in _cases()],
)
def test_options_of_another_type(layer, name, value, rule):
    with pytest.raises(TypeError) as error:
        layer(*LAYERS[layer], **{name: value}, rngs=nnx.Rngs(0))
    text = str(error.value)
    assert text.startswith(f"{layer.__name__}: {name} must be {rule}")
    assert f", got {value!r}; " in text
    assert text.rsplit("; ", 1)[1] in (
        "pass a bool",
        "give it a name",
        "use None for the usual name",
        'write ("embed",) for one dim',
    )


def test_what_is_no_python_bool_or_tuple_but_serves():
    spec = nnx.Rngs(0), jnp.ones((2, 4))
    layer = te.DenseGeneral(
        4,
        6,
        use_bias=np.bool_(False),
        kernel_axes=[None, ("a", "b")],
        bias_axes=None,
        rngs=spec[0],
    )
    assert layer(spec[1]).shape == (2, 6)


PARTS = [
    (
        {"kernel_axes_1": ("embed",)},
        "kernel_axes_1 must name each of the 2 dims",
    ),
    ({"kernel_axes_2": ("mlp",)}, "kernel_axes_2 must name each of the 2 dims"),
    ({"bias_axes_1": ("a", "b")}, "bias_axes_1 must name each of the 1 dims"),
    ({"bias_axes_2": ("a", "b")}, "bias_axes_2 must name each of the 1 dims"),
    ({"scale_axes": ("a", "b")}, "scale_axes must name each of the 1 dims"),
    ({"ln_bias_axes": ("a", "b")}, "ln_bias_axes must name each of the 1 dims"),
    ({"recipe": "mxfp8"}, "recipe must be a recipe"),
    ({"precision": "exact"}, "precision must be None"),
    ({"amax_history_len": 0}, "amax_history_len must be an integer >= 1"),
    ({"low_rank_adaptation_dim": 0}, "low_rank_adaptation_dim must be a positive int"),
    ({"low_rank_adaptation_alpha": -1}, "low_rank_adaptation_alpha must be a finite"),
    ({"param_dtype": jnp.int8}, "param_dtype must be None or one of"),
    ({"dtype": jnp.int8}, "dtype must be None or one of"),
    ({"preferred_element_type": 3}, "preferred_element_type must be None or one of"),
    ({"activations": "swish"}, "activations must be names of"),
]


@pytest.mark.parametrize(("options", "text"), PARTS)
def test_errors_of_the_parts_name_the_block_and_its_argument(options, text):
    with pytest.raises((ValueError, TypeError), match=f"^LayerNormMLP: {text}"):
        te.LayerNormMLP(4, 6, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel_axes": ("embed",)}, "kernel_axes must name each of the 2 dims"),
        ({"ln_bias_axes": ("a", "b")}, "ln_bias_axes must name each of the 1 dims"),
        ({"precision": "exact"}, "precision must be None"),
        ({"amax_history_len": True}, "amax_history_len must be an integer >= 1"),
        ({"low_rank_adaptation_dim": 0}, "low_rank_adaptation_dim must be a positive"),
    ],
)
def test_errors_of_the_fused_dense_layer_name_it(options, text):
    expected = f"^LayerNormDenseGeneral: {text}"
    with pytest.raises((ValueError, TypeError), match=expected):
        te.LayerNormDenseGeneral(4, 6, **options, rngs=nnx.Rngs(0))


def test_parts_of_parts_and_what_comes_after():
    with part_of("Block", kernel="wi"), part_of("MLP", axes="kernel"):
        assert message("Dense", "axes", "be 1", 2, "do") == (
            "Block: wi must be 1, got 2; do"
        )
        with pytest.raises(RuntimeError), part_of("Inner"):
            raise RuntimeError
        assert message("Dense", "x", "be 1", 2, "do").startswith("Block: x must")
    assert message("Dense", "axes", "be 1", 2, "do").startswith("Dense: axes must")


CALLS = {"convert": te.convert, "report": te.report, "inspect": te.inspect}


@pytest.mark.parametrize("model", [3, "model", None, np.ones(2), jnp.tanh])
@pytest.mark.parametrize("name", [*CALLS, "revert", "record"])
def test_what_is_no_model(name, model, tmp_path):
    calls = CALLS | {
        "revert": te.revert,
        "record": lambda model: te.Recorder(tmp_path / "a.csv", model),
    }
    got = "None" if model is None else f"a {type(model).__name__}"
    text = f"^{name}: model must be a module or a pytree of modules, got {got}; pass"
    with pytest.raises(TypeError, match=text):
        calls[name](model)


@pytest.mark.parametrize("rules", [[], (), iter([])])
def test_no_rules_convert_nothing(rules):
    text = (
        r"^convert: rules must hold a \(pattern, action\) pair, got .*; pass None for"
    )
    with pytest.raises(ValueError, match=text):
        te.convert(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rules)
