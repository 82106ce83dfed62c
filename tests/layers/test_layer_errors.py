"""Bad input to the norms, the fused layers and their functionals."""

import jax.numpy as jnp
import pytest
from flax import nnx

import te_flax as te

KINDS = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}
FUSED = {
    "LayerNormDenseGeneral": te.LayerNormDenseGeneral,
    "LayerNormMLP": te.LayerNormMLP,
}


def norm(kind, n=4, **kwargs):
    return KINDS[kind](n, rngs=nnx.Rngs(0), **kwargs)


def fused(name, *sizes, **kwargs):
    return FUSED[name](*(sizes or (4, 6)), rngs=nnx.Rngs(0), **kwargs)


def raises(error, text, call):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"n": 0}, ValueError, "num_features must be a positive int.* got 0; give"),
        ({"epsilon": -1e-6}, ValueError, r"epsilon must be .* >= 0, got -1e-06; use"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must be .* got nan; use 1e-6"),
        ({"epsilon": float("inf")}, ValueError, "epsilon must be .* got inf; use 1e-6"),
        ({"epsilon": "0"}, ValueError, "epsilon must be .* got '0'; use 1e-6"),
        ({"dtype": jnp.int8}, TypeError, "dtype must be None or one of .* got .*int8"),
        (
            {"scale_axes": ("a", "b")},
            ValueError,
            r"scale_axes must name each of the 1 dims of \(4,\), got \('a', 'b'\); use",
        ),
    ],
)
def test_arguments_of_the_norms(kind, kwargs, error, text):
    raises(error, f"^{kind}: {text}", lambda: norm(kind, **kwargs))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_the_norms(kind):
    layer = norm(kind)
    text = rf"^{kind}: x must hold num_features 4 in its last axis, got shape \(2, 5\);"
    raises(ValueError, text, lambda: layer(jnp.ones((2, 5))))
    text = rf"^{kind}: x must be a float32, .* array, got int32; cast it first"
    raises(TypeError, text, lambda: layer(jnp.ones((2, 4), jnp.int32)))
    text = rf"^{kind}: input_axes must name each of the 2 dims of x, got \('a',\); use"
    raises(ValueError, text, lambda: norm(kind, input_axes=("a",))(jnp.ones((2, 4))))


def test_an_unknown_keyword_is_named():
    raises(TypeError, "unexpected .*'eps'", lambda: norm("LayerNorm", eps=1.0))
    for name in FUSED:
        text = f"^{name}: eps must be an argument of this layer, got a keyword; furth"
        raises(TypeError, text, lambda name=name: fused(name, eps=1.0))


CLAMPED = ("clamped_silu", "clamped_linear")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"epsilon": -1.0}, ValueError, "epsilon must be .* >= 0, got -1.0; use 1e-6"),
        (
            {"layernorm_type": "batchnorm"},
            ValueError,
            "layernorm_type must be one of 'layernorm', 'rmsnorm', got 'batchnorm'; ch",
        ),
        ({"recipe": "mxfp8"}, TypeError, "recipe must be a recipe, .* got 'mxfp8'; "),
        (
            {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 0},
            ValueError,
            "low_rank_adaptation_dim must be a positive int.* got 0; ",
        ),
        ({"low_rank_adaptation_dim": -2}, ValueError, "low_rank_adaptation_dim .* -2;"),
        (
            {"low_rank_adaptation_alpha": float("nan")},
            ValueError,
            "low_rank_adaptation_alpha must be a finite number >= 0, got nan; ",
        ),
        ({"param_dtype": jnp.int32}, TypeError, "param_dtype must be None or one of"),
        ({"precision": "exact"}, ValueError, "precision must be None, .* got 'exact';"),
        ({"scale_axes": ("a", "b")}, ValueError, r"scale_axes must name each of the 1"),
    ],
)
def test_arguments_of_the_fused_layers(name, kwargs, error, text):
    raises(error, text, lambda: fused(name, **kwargs))


@pytest.mark.parametrize("name", FUSED)
def test_inputs_of_the_fused_layers(name):
    layer = fused(name)
    text = rf"^{name}: x must hold in_features 4 in its last axis, got shape \(2, 5\);"
    raises(ValueError, text, lambda: layer(jnp.ones((2, 5))))
    text = rf"^{name}: x must be a float32, .* array, got int32; cast it first"
    raises(TypeError, text, lambda: layer(jnp.ones((2, 4), jnp.int32)))
    raises(ValueError, f"^{name}: x must hold", lambda: layer(jnp.ones(())))
    for axes in ("layernorm_input_axes", AXES[name]):
        text = rf"^{name}: {axes} must name each of the 2 dims of x, got \('a',\); use"
        bad = fused(name, **{axes: ("a",)})
        raises(ValueError, text, lambda bad=bad: bad(jnp.ones((2, 4))))


AXES = {"LayerNormDenseGeneral": "dot_input_axes", "LayerNormMLP": "dot_1_input_axes"}


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        (
            {"activations": ("gelu", "swish")},
            ValueError,
            r"activations must be names of gelu, .* got \('gelu', 'swish'\); write",
        ),
        ({"activations": "GELU"}, ValueError, "activations must .* got 'GELU'; write"),
        ({"activations": ()}, ValueError, r"activations must .* got \(\); write"),
        ({"activations": None}, ValueError, "activations must .* got None; write"),
        (
            {"intermediate_dropout_rate": 1.0},
            ValueError,
            "intermediate_dropout_rate must be a finite number >= 0 and < 1, got 1.0; ",
        ),
        (
            {"intermediate_dropout_rate": -0.1},
            ValueError,
            "intermediate_dropout_rate must be .* got -0.1; use 0.0 for none",
        ),
        (
            {"activations": CLAMPED, "activation_params": {"slope": 1.0}},
            ValueError,
            "activation_params must be one of 'limit', 'alpha', 'offset', got 'slope';",
        ),
        (
            {"activations": CLAMPED, "activation_params": {"limit": float("inf")}},
            ValueError,
            "limit must be .* got inf; give a finite number",
        ),
        (
            {"kernel_axes_1": ("embed",)},
            ValueError,
            r"must name each of the 2 dims of \(4, 6\), got \('embed',\); use",
        ),
        ({"kernel_axes_2": ("mlp",)}, ValueError, "must name each of the 2 dims of"),
    ],
)
def test_arguments_of_the_block(kwargs, error, text):
    raises(error, text, lambda: fused("LayerNormMLP", **kwargs))


def test_sizes_of_the_block():
    text = "^LayerNormMLP: intermediate_dim must be a positive int.* got 0;"
    raises(ValueError, text, lambda: fused("LayerNormMLP", 4, 0))
    text = "^LayerNormMLP: out_features must be a positive int.* got -1;"
    raises(ValueError, text, lambda: fused("LayerNormMLP", 4, 6, out_features=-1))
    text = r"^LayerNormMLP: intermediate_dim must be a positive int, got \(2, 6\); give"
    raises(ValueError, text, lambda: fused("LayerNormMLP", 4, (2, 6)))
    text = (
        r"^LayerNormDenseGeneral: in_features must be a positive int, got \(4,\); give"
    )
    raises(ValueError, text, lambda: fused("LayerNormDenseGeneral", (4,), 6))
    raises(
        ValueError, "must be a positive int, got True", lambda: norm("RMSNorm", True)
    )
    dropping = {
        "intermediate_dropout_rate": 0.5,
        "intermediate_hidden_dropout_dims": (5,),
    }
    layer = fused("LayerNormMLP", **dropping)
    text = (
        r"_dropout_dims must be dims of x, which has 2, got \(5,\); count them from 0"
    )
    raises(ValueError, text, lambda: layer(jnp.ones((2, 4))))
    text = "^LayerNormDenseGeneral: depth_scaling must be .* got 0.0; use None"
    call = lambda: fused("LayerNormDenseGeneral", depth_scaling=0.0)
    raises(ValueError, text, call)
    text = "^LayerNormDenseGeneral: input_axes must be an argument of this layer, got"
    call = lambda: fused("LayerNormDenseGeneral", input_axes=("a", "b"))
    raises(TypeError, text, call)


ONES = jnp.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: te.activation(
                jnp.ones((3, 3, 4)), config=te.ActivationConfig(name="silu,linear")
            ),
            ValueError,
            "x must have size 2 at axis 1, one slice per activation, got shape",
        ),
        (
            lambda: te.activation(
                jnp.ones((3, 1, 4)), config=te.ActivationConfig(name="swish")
            ),
            ValueError,
            "activation must be one of gelu .* got 'swish'; compose others from jax.nn",
        ),
        (
            lambda: te.norm(jnp.ones((3, 0)), jnp.ones(0), config=RMS),
            ValueError,
            r"^norm: x must have a last axis of size >= 1, got shape \(3, 0\); there",
        ),
        (
            lambda: te.norm(
                jnp.ones((3, 4)), ONES, config=te.NormConfig(kind="rmsnorm", epsilon=-1)
            ),
            ValueError,
            "^norm: epsilon must be finite and >= 0, got -1; use 1e-6",
        ),
        (
            lambda: te.norm(
                jnp.ones((3, 4)), ONES, config=te.NormConfig(kind="batchnorm")
            ),
            ValueError,
            "^norm: kind must be 'layernorm' or 'rmsnorm', got 'batchnorm'; choose one",
        ),
        (
            lambda: te.norm(jnp.ones((3, 4)), ONES, config=te.NormConfig()),
            ValueError,
            "^norm: norm_bias must be given for a layernorm and None for an rmsnorm,",
        ),
        (
            lambda: te.norm(jnp.ones((3, 4)), jnp.ones(5), config=RMS),
            ValueError,
            r"^norm: scale must have shape \(4,\), got shape \(5,\); one entry",
        ),
        (
            lambda: te.norm(jnp.ones((3, 4), jnp.int32), ONES, config=RMS),
            TypeError,
            "^norm: x must be float32, bfloat16 or float16, got int32; cast it first",
        ),
        (
            lambda: te.layernorm_mlp(jnp.ones((3, 4)), params((4, 3, 6))),
            ValueError,
            r"wi must be \[in, 1, mid\] for 'gelu', got shape \(4, 3, 6\); one slice",
        ),
        (
            lambda: te.layernorm_mlp(jnp.ones((3, 4)), params((4, 12)), config=GATED),
            ValueError,
            r"wi must be \[in, 2, mid\] for 'silu,linear', got shape \(4, 12\); one",
        ),
        (
            lambda: te.layernorm_mlp(jnp.ones((3, 4)), params((4, 1, 5))),
            ValueError,
            r"wo must start with mid = 5 like wi \(4, 1, 5\), got shape \(6, 4\);",
        ),
        (
            lambda: te.layernorm_mlp(
                jnp.ones((3, 4)), params((4, 1, 6))._replace(wo_bias=jnp.ones(3))
            ),
            ValueError,
            r"wo_bias must have shape \(4,\), got shape \(3,\); one entry per output",
        ),
        (
            lambda: te.layernorm_mlp(
                jnp.ones((3, 4)),
                params((4, 1, 6)),
                config=te.MLPConfig(dropout_rate=1.0),
            ),
            ValueError,
            r"dropout_rate must be in \[0, 1\), got 1.0; use 0.0 for none",
        ),
    ],
)
def test_the_functionals(call, error, text):
    raises(error, text, call)


RMS = te.NormConfig(kind="rmsnorm")
GATED = te.MLPConfig(activation=te.ActivationConfig(name="silu,linear"))


def params(wi):
    return te.MLPParams(ONES, 0 * ONES, jnp.ones(wi), None, jnp.ones((6, 4)))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"kernel_axes": ("a", "b")}, TypeError, "kernel_axes must be an argument of"),
        ({"bias": 1}, TypeError, "bias must be an argument of this layer, got a keyw"),
        ({"axis": 0}, TypeError, "axis must be an argument of this layer, got a keyw"),
        ({"activations": ("clamped_silu",)}, ValueError, "activations must be .'clamp"),
        ({"activation_params": {"limit": 1.0}}, ValueError, "activation_params must b"),
        (
            {
                "activations": CLAMPED,
                "activation_params": {"limit": -1.0},
            },
            ValueError,
            "limit must be a finite number >= 0, got -1.0",
        ),
        (
            {"intermediate_hidden_dropout_dims": 1},
            ValueError,
            "intermediate_hidden_dropout_dims must be a tuple of ints, got 1",
        ),
        (
            {
                "intermediate_dropout_rate": 0.5,
                "intermediate_dropout_rng_name": "other",
                "rngs": nnx.Rngs(params=0),
            },
            ValueError,
            "rngs must hold the stream 'other'",
        ),
    ],
)
def test_options_of_the_block(options, error, text):
    options = {"rngs": nnx.Rngs(0), **options}
    with pytest.raises(error, match=f"^LayerNormMLP: {text}"):
        te.LayerNormMLP(8, 16, **options)
