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


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
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


@pytest.mark.parametrize("page", RUN)
def test_examples_on_the_pages_run(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert blocks
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, page, "exec"), {})


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


DENSE_GENERAL = [
    "features",
    "kernel_init",
    "kernel_axes",
    "use_bias",
    "bias_init",
    "bias_axes",
    "enable_low_rank_adaptation",
    "low_rank_adaptation_dim",
    "low_rank_adaptation_alpha",
    "axis",
    "dtype",
    "input_axes",
    "transpose_batch_sequence",
    "quantization_checkpoint_name",
]


@pytest.mark.parametrize("argument", DENSE_GENERAL)
def test_each_transformer_engine_argument_has_a_row(argument):
    page = (ROOT / "docs" / "from_transformer_engine.md").read_text()
    page = page.split("## DenseGeneral, argument by argument")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| `{argument}` \| (.*) \|$", page, re.M)
    named = re.findall(r"`(\w+)`", row)
    accepted = inspect.signature(te.DenseGeneral.__init__).parameters
    assert row.startswith("left out so far") or named[0] in accepted, row
