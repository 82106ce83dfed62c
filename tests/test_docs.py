"""Documentation is run: doctests, README's example, links, tables of arguments."""

import doctest
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path

import jax
import pytest
from flax import nnx

import te_flax as te

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.walk_packages(te.__path__, "te_flax.")]
MODULES = [m for m in MODULES if not m.endswith(("._C", "._cuda"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PUBLIC = [
    name
    for name, value in vars(te).items()
    if name[0] != "_" and not isinstance(value, types.ModuleType)
]


KERNELS = re.compile(r"te_flax\.backends\.cutedsl_(functions|launch|ptx|quantize)")


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    if KERNELS.fullmatch(name):
        pytest.importorskip("cutlass", reason="needs te_flax[cutedsl]")
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


# Values and protocols that an example would not explain.
NO_EXAMPLE = {"HIGH_PRECISION", "Quantizer", "Quantized", "Fp8Stat", "Fp8Mailbox"}
NO_EXAMPLE |= {"Fp8Record", "Fp8Rounding", "OperandRow"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_is_documented(name):
    value = getattr(te, name)
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    first = text.splitlines()[0]
    assert first.endswith("."), f"{name}: the first line is no sentence: {first}"
    assert "Example:" in text or name in NO_EXAMPLE, f"{name} has no example"
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        assert not signature.parameters or "Args:" in text, f"{name} lacks Args"
        gives = signature.return_annotation not in (None, "None")
        found = "Returns:" in text or "Yields:" in text
        assert found or not gives, f"{name} lacks Returns"
    elif inspect.isclass(value) and inspect.signature(value).parameters:
        fields = "Args:" in text or "Attributes:" in text
        assert fields or name in NO_EXAMPLE, f"{name} lacks Args or Attributes"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_is_on_a_page(name):
    pages = "\n".join(page.read_text() for page in PAGES)
    assert re.search(rf"\b{name}\b", pages), f"no page mentions te.{name}"


def test_kernel_rules_on_the_pages_are_accepted():
    rules = [
        rule
        for page in PAGES
        for rule in re.findall(r'te\.kernels\("([^"]+)"\)', page.read_text())
    ]
    assert rules
    for rule in rules:
        with te.kernels(rule):
            pass


RUN = ["README.md", "docs/api.md", "docs/convert.md", "docs/inspect.md"]
RUN += ["docs/collectives.md", "docs/attention.md", "docs/layers.md", "docs/recipes.md"]


@pytest.mark.parametrize("page", RUN)
def test_examples_on_the_pages_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    names = {}  # shared: a block may use what the one before it made
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, page, "exec"), names)


def test_readme_commands_are_one_line_each():
    text = (ROOT / "README.md").read_text()
    for title in ("## Run it", "## Test it"):
        section = text.split(title + "\n")[1].split("\n## ")[0]
        (block,) = re.findall(r"```bash\n(.*?)```", section, re.S)
        assert len(block.strip().splitlines()) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


LORA = "enable_low_rank_adaptation low_rank_adaptation_dim low_rank_adaptation_alpha "
NORM = "epsilon layernorm_type zero_centered_gamma scale_init scale_axes "
FUSED_NORM = f"enable_layernorm {NORM} ln_bias_init ln_bias_axes "
DENSE = f"kernel_init use_bias bias_init axis dtype transpose_batch_sequence {LORA}"
DENSE += "quantization_checkpoint_name "
# Constructor arguments of Transformer Engine's layers.
TRANSFORMER_ENGINE = {
    "LayerNorm": NORM + "bias_init bias_axes dtype",
    "DenseGeneral": DENSE + "features kernel_axes bias_axes input_axes",
    "LayerNormDenseGeneral": FUSED_NORM
    + DENSE
    + "features kernel_axes bias_axes return_layernorm_output layernorm_input_axes "
    + "dot_input_axes depth_scaling",
    "LayerNormMLP": FUSED_NORM
    + DENSE
    + "intermediate_dim kernel_axes_1 kernel_axes_2 bias_axes_1 bias_axes_2 "
    + "return_layernorm_output activations activation_params "
    + "intermediate_dropout_rng_name intermediate_dropout_rate "
    + "intermediate_hidden_dropout_dims layernorm_input_axes dot_1_input_axes "
    + "dot_2_input_axes ffn1_ckpt_name ffn2_ckpt_name",
}
HEADS = "head_dim num_attention_heads num_gqa_groups "
SCORES = "window_size softmax_type score_mod score_mod_bprop "
ROTARY = "enable_rotary_pos_emb rotary_pos_emb_windows rotary_pos_emb_group_method "
PROJECTIONS = "low_rank_adaptation_scope low_rank_adaptation_dim "
PROJECTIONS += "low_rank_adaptation_alpha use_bias bias_init dtype fuse_qkv_params "
PROJECTIONS += "transpose_batch_sequence enable_sequence_parallel scale_attn_logits "
PROJECTIONS += "scaled_query_init layernorm_type layernorm_epsilon zero_centered_gamma "
TRANSFORMER_ENGINE |= {
    "DotProductAttention": HEADS
    + SCORES
    + "attention_dropout attn_mask_type attn_bias_type dtype dropout_rng_name "
    + "float32_logits qkv_layout scale_factor transpose_batch_sequence "
    + "max_segments_per_seq context_parallel_causal_load_balanced "
    + "context_parallel_axis context_parallel_strategy context_checkpoint_name",
    "MultiHeadAttention": HEADS
    + SCORES
    + ROTARY
    + PROJECTIONS
    + "attention_dropout dropout_rng_name input_layernorm return_layernorm_output "
    + "kernel_init attn_mask_type attn_bias_type float32_logits",
    "RelativePositionBiases": "num_buckets max_distance num_attention_heads "
    + "embedding_init embedding_axes dtype",
    "TransformerLayer": SCORES
    + ROTARY
    + PROJECTIONS
    + "hidden_size mlp_hidden_size num_attention_heads num_gqa_groups hidden_dropout "
    + "hidden_dropout_dims attention_dropout intermediate_dropout "
    + "intermediate_dropout_dims dropout_rng_name mha_kernel_init mlp_kernel_init "
    + "mlp_activations mlp_activation_params layer_type self_attn_mask_type "
    + "apply_residual_connection_post_layernorm output_layernorm "
    + "float32_attention_logits self_attn_bias_type enable_relative_embedding "
    + "relative_embedding drop_path",
}


def accepted(layer):
    """Names of our arguments, those that ``**dense`` hands on included."""
    own = inspect.signature(getattr(te, layer).__init__).parameters
    if "dense" not in own:
        return set(own)
    dense = set(inspect.signature(te.DenseGeneral.__init__).parameters)
    return {*own, *dense} - {"axis", "input_axes"}


@pytest.mark.parametrize("layer", TRANSFORMER_ENGINE)
def test_each_transformer_engine_argument_has_a_row(layer):
    page = (ROOT / "docs" / "from_transformer_engine.md").read_text()
    page = page.split(f"## {layer}, argument by argument")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    assert sorted(rows) == sorted(TRANSFORMER_ENGINE[layer].split())
    for argument, row in rows.items():
        named = re.match(r"`(\w+)`", row)
        left_out = row.startswith("left out: ") and argument not in accepted(layer)
        assert left_out or (named and named[1] in accepted(layer)), (argument, row)


@pytest.mark.parametrize("layer", ["LayerNormDenseGeneral", "LayerNormMLP"])
def test_named_arguments_of_the_fused_layers_are_taken(layer):
    """``**dense`` takes any name; the layer must really take those of the page."""
    taken = {"transpose_batch_sequence": True, "quantization_checkpoint_name": "own"}
    made = getattr(te, layer)(8, 8, rngs=nnx.Rngs(0), param_dtype="bfloat16", **taken)
    assert made.transpose_batch_sequence
    gemm = getattr(made, "wo", made)
    assert gemm.quantization_checkpoint_name == "own"
    assert gemm.kernel.dtype == made.norm.scale.dtype == "bfloat16"
    for other in ({"axis": 0}, {"input_axes": (None, None)}, {"no_such": 1}):
        with pytest.raises(TypeError, match=next(iter(other))):
            getattr(te, layer)(8, 8, rngs=nnx.Rngs(0), **other)
