"""Bad input to DenseGeneral and its functional core."""

import jax.numpy as jnp
import pytest
from _dense import wide
from flax import nnx

import te_flax as te

BAD = [
    (
        lambda: te.DenseGeneral(0, 4, rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: in_features must be a positive int .* got 0; ",
    ),
    (
        lambda: te.DenseGeneral((2, 3), 4, rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: axis must name 2 axes, one for each of in_features, got -1; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, precision="exact", rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: precision must be None, .* got 'exact'; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, kernel_axes=("embed",), rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: kernel_axes must name each of the 2 dims of \(3, 4\), got ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 5))),
        ValueError,
        r"DenseGeneral: x must hold in_features \(3,\) at axis \(-1,\), got \(5,\) in ",
    ),
    (
        lambda: te.DenseGeneral((3, 4), 4, axis=(-2, -1), rngs=nnx.Rngs(0))(
            jnp.ones(3)
        ),
        ValueError,
        r"DenseGeneral: x must have the axes \(-2, -1\), got rank 1, shape \(3,\); ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 3), jnp.int32)),
        TypeError,
        r"DenseGeneral: x must be a float32, bfloat16 or float16 array, got int32; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, rngs=nnx.Rngs(0))(wide((2, 3))),
        TypeError,
        r"DenseGeneral: x must be float32, .* jax_enable_x64 is off, got float64; ",
    ),
    (
        lambda: te.dense(jnp.ones((2, 3)), jnp.ones((4, 5))),
        ValueError,
        r"dense: x must end in \(4,\) like kernel \(4, 5\), got shape \(2, 3\); ",
    ),
    (
        lambda: te.dense(jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones(4)),
        ValueError,
        r"dense: bias must have shape \(5,\), got shape \(4,\); ",
    ),
    (
        lambda: te.dense(jnp.ones((2, 3)), jnp.ones(3)),
        ValueError,
        r"dense: kernel must have 1 input dims and at least one output dim",
    ),
    (
        lambda: te.logical_axis_rules(dp="a", tp="a"),
        ValueError,
        r"logical_axis_rules: dp, fsdp and tp must name different mesh axes",
    ),
    (
        lambda: te.DenseGeneral(True, 4, rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: in_features must be a positive int .* got True; ",
    ),
    (
        lambda: te.DenseGeneral(3, "4", rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: out_features must be a positive int .* got '4'; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, axis=1.0, rngs=nnx.Rngs(0)),
        ValueError,
        r"DenseGeneral: axis must name 1 axes, .* got 1.0; ",
    ),
    (
        lambda: te.DenseGeneral((3, 3), 4, axis=(-1, 1), rngs=nnx.Rngs(0))(
            jnp.ones((3, 3))
        ),
        ValueError,
        r"DenseGeneral: axis must name different axes of x of rank 2, got \(-1, 1\); ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, recipe="mxfp8", rngs=nnx.Rngs(0)),
        TypeError,
        r"DenseGeneral: recipe must be .* got 'mxfp8'; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, recipe=te.DelayedScaling, rngs=nnx.Rngs(0)),
        TypeError,
        r"DenseGeneral: recipe must be ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, param_dtype=jnp.int32, rngs=nnx.Rngs(0)),
        TypeError,
        r"DenseGeneral: param_dtype must be None or one of float32, .* got .*int32",
    ),
    (
        lambda: te.DenseGeneral(3, 4, preferred_element_type="foo", rngs=nnx.Rngs(0)),
        TypeError,
        r"DenseGeneral: preferred_element_type must be None or .* got 'foo'; ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, input_axes=("a",), rngs=nnx.Rngs(0))(
            jnp.ones((2, 3))
        ),
        ValueError,
        r"DenseGeneral: input_axes must name each of the 2 dims of x, got \('a',\); ",
    ),
    (
        lambda: te.DenseGeneral(3, 4, rngs=nnx.Rngs(0))(None),
        TypeError,
        r"DenseGeneral: x must be a float32, .* array, got NoneType; ",
    ),
    (
        lambda: te.TensorQuantizer(format="e3m4"),
        ValueError,
        r"TensorQuantizer: format must be e4m3 or e5m2, got 'e3m4'; ",
    ),
    (
        lambda: te.TensorQuantizer(margin=-1),
        ValueError,
        r"TensorQuantizer: margin must be >= 0 and <= 126, got -1; ",
    ),
    (
        lambda: te.logical_axis_rules(dp=3),
        TypeError,
        r"logical_axis_rules: dp must be a mesh axis or a tuple of them, got 3; ",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_bad_input_names_the_argument_the_value_and_the_remedy(call, error, text):
    with pytest.raises(error, match=text):
        call()
