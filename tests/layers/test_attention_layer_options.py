"""Every option of the attention layers reaches every part that it is for."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _attention import block, mha, projections
from flax import nnx

import te_flax as te
from te_flax.layers._projections import LOW_RANK_SCOPES

CORE = te.DotProductAttention
KINDS = {
    "packed": lambda **o: mha(**o),
    "grouped": lambda **o: mha(num_kv_heads=2, **o),
    "apart": lambda **o: mha(fuse_qkv_params=False, **o),
    "cross": lambda **o: mha(attention_type="cross", **o),
    "encoder": lambda **o: block(**o),
    "decoder": lambda **o: block(layer_type="decoder", num_gqa_groups=2, **o),
}
# Options of DenseGeneral that all take, each with a value that is no default.
OPTIONS = {
    "use_bias": False,
    "dtype": jnp.bfloat16,
    "param_dtype": jnp.bfloat16,
    "precision": "highest",
    "promote_dtype": lambda arrays, *, dtype=None: arrays,
    "preferred_element_type": jnp.float32,
    "transpose_batch_sequence": True,
    "quantization_checkpoint_name": "own",
    "recipe": te.MXFP8BlockScaling(),
    "amax_history_len": 3,
    "low_rank_adaptation_dim": 5,
    "low_rank_adaptation_alpha": 10.0,
    "bias_init": nnx.initializers.constant(3.0),
    "kernel_metadata": {"tag": 1},
    "bias_metadata": {"tag": 2},
}
ELSEWHERE = {"axis", "kernel_axes", "bias_axes", "input_axes", "kernel_init", "rngs"}
ELSEWHERE |= {"enable_low_rank_adaptation", "dot_input_axes"}


def test_the_options_are_all_that_dense_general_has():
    found = inspect.signature(te.DenseGeneral.__init__).parameters.values()
    names = {p.name for p in found if p.kind is p.KEYWORD_ONLY}
    assert names == {*OPTIONS} | ELSEWHERE


@pytest.mark.parametrize("kind", KINDS)
def test_options_reach_every_projection(kind):
    options = OPTIONS | {"use_bias": True}
    layer = KINDS[kind](low_rank_adaptation_scope="all", **options)
    names = ("dtype", "param_dtype", "precision", "promote_dtype", "recipe")
    names += ("preferred_element_type", "transpose_batch_sequence")
    names += ("quantization_checkpoint_name", "use_bias")
    found = projections(layer)
    assert len(found) == {"packed": 2, "grouped": 3, "apart": 4, "cross": 3}.get(
        kind, 4 if kind == "encoder" else 8
    )
    for path, gemm in found.items():
        for name in names:
            assert getattr(gemm, name) == options[name], (path, name)
        assert gemm.fp8.x.shape == (3,), path
        assert gemm.lora_a.shape[-1] == 5, path
        assert gemm.lora_scale == 2.0, path
        assert (gemm.bias[...] == 3.0).all(), path
        assert gemm.kernel.dtype == gemm.bias.dtype == jnp.bfloat16, path
        metadata = [v.get_metadata()["tag"] for v in (gemm.kernel, gemm.bias)]
        assert metadata == [1, 2], path
    cores = [m for _, m in nnx.iter_modules(layer) if isinstance(m, CORE)]
    assert len(cores) == (2 if kind == "decoder" else 1)
    for core in cores:
        assert core.recipe == options["recipe"]
        assert core.fp8.forward.shape == (5, 3)
        assert core.transpose_batch_sequence
    for gemm in projections(KINDS[kind](use_bias=False)).values():
        assert gemm.bias is None


def test_options_of_the_norms_reach_every_norm():
    layer = block(
        layer_type="decoder",
        output_layernorm=True,
        normalize_qk=True,
        layernorm_type="rmsnorm",
        layernorm_epsilon=0.5,
        zero_centered_gamma=True,
        scale_axes=("embed",),
    )
    norms = {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(layer)
        if isinstance(module, te.LayerNorm)
    }
    assert len(norms) == 2 + 2 + 3  # of queries and keys, of inputs, of the result
    for path, norm in norms.items():
        assert type(norm) is te.RMSNorm, path
        assert (norm.epsilon, norm.zero_centered_gamma) == (0.5, True), path
        if "_ln" not in path:
            assert norm.scale.get_metadata()["out_sharding"] == ("embed",), path


@pytest.mark.parametrize("scope", LOW_RANK_SCOPES)
def test_scopes_of_low_rank_adaptation(scope):
    parts = LOW_RANK_SCOPES[scope]
    assert scope != "all" or len(parts) == 3
    layer = block(layer_type="decoder", low_rank_adaptation_scope=scope)
    for path, gemm in projections(layer).items():
        part = "mlp" if path.startswith("mlp") else "qkv_proj"
        part = "output_proj" if path.endswith("/out") else part
        assert (gemm.lora_a is not None) == (part in parts), path
    layer = mha(low_rank_adaptation_scope=scope)
    assert (layer.qkv.lora_a is not None) == ("qkv_proj" in parts)


AXES = {
    "qkv_kernel_axes": ("embed", "heads", None),
    "kv_kernel_axes": ("embed", "kv_heads", None),
    "out_kernel_axes": ("heads", None, "embed"),
    "qkv_bias_axes": ("heads", None),
    "kv_bias_axes": ("kv_heads", None),
    "out_bias_axes": ("embed",),
}
NAMED = {
    "qkv": (("embed", None, "heads", None), (None, "heads", None)),
    "query": (("embed", "heads", None), ("heads", None)),
    "kv": (("embed", None, "kv_heads", None), (None, "kv_heads", None)),
    "key": (("embed", "kv_heads", None), ("kv_heads", None)),
    "value": (("embed", "kv_heads", None), ("kv_heads", None)),
    "out": (("heads", None, "embed"), ("embed",)),
}


@pytest.mark.parametrize("kind", ["packed", "grouped", "apart", "cross"])
def test_logical_axes_name_the_dims_of_each_kernel(kind):
    for path, gemm in projections(KINDS[kind](**AXES)).items():
        for variable, axes in zip((gemm.kernel, gemm.bias), NAMED[path], strict=True):
            assert variable.get_metadata()["out_sharding"] == axes, path
            assert len(axes) == variable.get_value().ndim


def test_logical_axes_of_a_transformer_layer():
    batch = ("batch", "seqlen", None)
    layer = block(
        layer_type="decoder",
        **AXES,
        mlp_kernel_axes_1=("embed", "mlp"),
        mlp_kernel_axes_2=("mlp", "embed"),
        mlp_bias_axes_1=("mlp",),
        mlp_bias_axes_2=(None,),
        input_axes=batch,
        dot_input_axes=("batch", None, None),
        attention_axes=("batch", None, "heads", None),
        mlp_axes=("batch", None, "mlp"),
    )
    for attention in (layer.self_attention, layer.cross_attention):
        assert attention.input_axes == batch
        assert attention.out.input_axes == ("batch", None, "heads", None)
    first = layer.self_attention.qkv
    assert first.layernorm_input_axes == batch
    assert first.dot_input_axes == ("batch", None, None)
    assert layer.cross_attention.kv.input_axes == batch
    assert layer.cross_attention.kv.dot_input_axes == ("batch", None, None)
    assert layer.mlp.input_axes == (
        batch,
        ("batch", None, None),
        ("batch", None, "mlp"),
    )
    metadata = layer.mlp.wi.kernel.get_metadata()
    assert metadata["out_sharding"] == ("embed", "mlp")


def test_parts_of_a_shared_kernel_start_as_if_alone():
    """Also with an initializer that looks at the number of columns."""
    init = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
    layer = mha(8, 64, kernel_init=init, scaled_query_init=True)
    kernel = np.asarray(layer.qkv.kernel)
    spread = kernel.std(axis=(0, 2, 3)) * 8  # sqrt of 64 columns each
    # 4096 draws: the deviation of their standard deviation is 1 / sqrt(8192).
    close = 5 / 8192**0.5
    assert np.abs(spread - [8**-0.5, 1, 1]).max() < close
    annotated = nnx.with_partitioning(init, ("embed", None), eager_sharding=False)
    made = mha(kernel_init=annotated, low_rank_adaptation_scope="all")
    assert made.qkv.kernel.shape == (32, 3, 4, 8)


def test_a_layer_holds_no_more_than_its_options_need():
    layer = mha()
    kinds = {type(v).__name__ for _, v in nnx.to_flat_state(nnx.state(layer))}
    assert kinds == {"Param", "Fp8Stat", "Fp8Mailbox", "Fp8Rounding"}
    dropping = nnx.state(mha(dropout_rate=0.1), nnx.RngState)
    assert len(jax.tree.leaves(dropping)) == 2
