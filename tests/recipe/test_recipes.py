"""Recipes and presets: every field, every error."""

import dataclasses
import inspect
import pathlib
import re

import pytest

import te_flax as te
from te_flax.recipe import presets

RECIPES = (
    te.DelayedScaling,
    te.Float8CurrentScaling,
    te.MXFP8BlockScaling,
    te.MXFP6BlockScaling,
    te.Float8BlockScaling,
    te.NVFP4BlockScaling,
)


def test_defaults():
    assert dataclasses.asdict(te.DelayedScaling()) == {
        "margin": 0,
        "fp8_format": "hybrid",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "fp8_attention": False,
        "split_accumulator": (False, True, True),
    }
    assert dataclasses.asdict(te.Float8CurrentScaling()) == {
        "fp8_format": "hybrid",
        "use_power_2_scales": False,
        "amax_epsilon": 0.0,
        "split_accumulator": (False, True, True),
    }
    assert dataclasses.asdict(te.MXFP8BlockScaling()) == {"fp8_format": "e4m3"}
    assert dataclasses.asdict(te.MXFP6BlockScaling()) == {"fp6_format": "e2m3"}
    assert dataclasses.asdict(te.Float8BlockScaling()) == {
        "fp8_format": "e4m3",
        "use_f32_scales": False,
        "amax_epsilon": 0.0,
    }
    assert dataclasses.asdict(te.NVFP4BlockScaling()) == {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
    }
    for cls in RECIPES[2:]:
        assert cls().split_accumulator == (True, True, True)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (
            te.DelayedScaling,
            "margin fp8_format amax_history_len amax_compute_algo fp8_attention "
            "split_accumulator",
        ),
        (
            te.Float8CurrentScaling,
            "fp8_format use_power_2_scales amax_epsilon split_accumulator",
        ),
        (te.MXFP8BlockScaling, "fp8_format"),
        (te.MXFP6BlockScaling, "fp6_format"),
        (te.Float8BlockScaling, "fp8_format use_f32_scales amax_epsilon"),
        (
            te.NVFP4BlockScaling,
            "disable_rht disable_stochastic_rounding disable_2d_quantization",
        ),
    ],
)
def test_order_of_positional_fields(cls, names):
    assert list(inspect.signature(cls).parameters) == names.split()
    assert [field.name for field in dataclasses.fields(cls)] == names.split()


@pytest.mark.parametrize("cls", RECIPES)
def test_frozen_hashable_and_equal_by_value(cls):
    assert hash(cls()) == hash(cls())
    assert cls() == cls()
    if cls is te.NVFP4BlockScaling:
        field, values = "disable_rht", (True, False)
    elif cls is te.MXFP6BlockScaling:
        field, values = "fp6_format", ("e2m3", "e3m2")
    else:
        field, values = "fp8_format", ("e4m3", "hybrid")
    first, second = (cls(**{field: value}) for value in values)
    assert first != second
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), field, values[0])


def test_formats_and_quantizers():
    assert te.DelayedScaling().formats == ("e4m3", "e4m3", "e5m2")
    assert te.DelayedScaling(fp8_format="e4m3").formats == ("e4m3",) * 3
    assert te.MXFP8BlockScaling().formats == ("e4m3",) * 3
    found = te.DelayedScaling(margin=3).quantizers()
    assert found.dy == te.TensorQuantizer(format="e5m2", margin=3)
    found = te.Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=1)
    expected = te.TensorQuantizer(format="e4m3", power_of_2=True, epsilon=1.0)
    assert found.quantizers().x == expected
    found = te.MXFP8BlockScaling(fp8_format="hybrid").quantizers()
    assert found.kernel == te.MXFP8Quantizer(format="e4m3")
    assert found.dy == te.MXFP8Quantizer(format="e5m2")


def test_quantizers_of_mxfp6():
    assert te.MXFP6BlockScaling().formats == ("e2m3",) * 3
    assert te.MXFP6BlockScaling("e3m2").formats == ("e3m2",) * 3
    found = te.MXFP6BlockScaling("hybrid").quantizers()
    assert found.x == found.kernel == te.MXFP6Quantizer(format="e2m3")
    assert found.dy == te.MXFP6Quantizer(format="e3m2")


def test_quantizers_of_block_scaling():
    found = te.Float8BlockScaling().quantizers()
    assert found.x == found.dy == te.BlockQuantizer()
    assert found.kernel == te.BlockQuantizer(two_dimensional=True)
    recipe = te.Float8BlockScaling("hybrid", use_f32_scales=True, amax_epsilon=1)
    found, options = recipe.quantizers(), {"power_of_2": False, "epsilon": 1.0}
    assert found.x == te.BlockQuantizer(**options)
    assert found.kernel == te.BlockQuantizer(two_dimensional=True, **options)
    assert found.dy == te.BlockQuantizer(format="e5m2", **options)


def test_quantizers_of_nvfp4():
    recipe = te.NVFP4BlockScaling()
    assert recipe.formats == ("e2m1",) * 3
    found = recipe.quantizers()
    assert found.x == te.NVFP4Quantizer(hadamard=True)
    assert found.kernel == te.NVFP4Quantizer(two_dimensional=True)
    assert found.dy == te.NVFP4Quantizer(hadamard=True, stochastic=True)
    found = te.NVFP4BlockScaling(disable_rht=True).quantizers()
    assert found.x == te.NVFP4Quantizer()
    assert found.dy == te.NVFP4Quantizer(stochastic=True)
    found = te.NVFP4BlockScaling(disable_stochastic_rounding=True).quantizers()
    assert found.dy == te.NVFP4Quantizer(hadamard=True)
    found = te.NVFP4BlockScaling(disable_2d_quantization=True).quantizers()
    assert found.kernel == te.NVFP4Quantizer()


@pytest.mark.parametrize(
    ("cls", "field", "value", "rule"),
    [
        (te.DelayedScaling, "margin", -1, "be an integer >= 0 and <= 126, got -1"),
        (te.DelayedScaling, "margin", 127, "be an integer >= 0 and <= 126, got 127"),
        (te.DelayedScaling, "margin", 1.0, "be an integer >= 0 and <= 126, got 1.0"),
        (te.DelayedScaling, "margin", True, "be an integer >= 0 and <= 126, got True"),
        (te.DelayedScaling, "amax_history_len", 0, "be an integer >= 1, got 0"),
        (te.DelayedScaling, "amax_history_len", "9", "be an integer >= 1, got '9'"),
        (te.DelayedScaling, "amax_compute_algo", "min", "be one of 'max', 'most_rec"),
        (te.DelayedScaling, "fp8_format", "e5m2", "be one of 'hybrid', 'e4m3', got"),
        (te.DelayedScaling, "fp8_format", ["e4m3"], "be one of 'hybrid', 'e4m3', got"),
        (te.DelayedScaling, "fp8_attention", 1, "be True or False, got 1"),
        (te.DelayedScaling, "split_accumulator", True, "be a tuple of three booleans"),
        (te.DelayedScaling, "split_accumulator", (1, 0, 1), "be a tuple of three bool"),
        (te.Float8CurrentScaling, "fp8_format", "x", "be one of 'hybrid', 'e4m3', got"),
        (te.Float8CurrentScaling, "use_power_2_scales", 0, "be True or False, got 0"),
        (te.Float8CurrentScaling, "amax_epsilon", -1.0, "be a finite number >= 0, got"),
        (te.Float8CurrentScaling, "amax_epsilon", float("nan"), "be a finite number"),
        (te.Float8CurrentScaling, "amax_epsilon", float("inf"), "be a finite number"),
        (te.Float8CurrentScaling, "amax_epsilon", "0", "be a finite number >= 0, got"),
        (te.Float8CurrentScaling, "split_accumulator", (True,), "be a tuple of three"),
        (te.MXFP8BlockScaling, "fp8_format", "e5m2", "be one of 'e4m3', 'hybrid', got"),
        (te.Float8CurrentScaling, "amax_epsilon", 1e39, "be <= 3.4028234663852886e+38"),
        (te.Float8BlockScaling, "fp8_format", "e5m2", "be one of 'e4m3', 'hybrid', go"),
        (te.Float8BlockScaling, "use_f32_scales", 1, "be True or False, got 1"),
        (te.Float8BlockScaling, "amax_epsilon", -1.0, "be a finite number >= 0, got"),
        (te.Float8BlockScaling, "amax_epsilon", True, "be a finite number >= 0, got"),
        (te.Float8BlockScaling, "amax_epsilon", 1e39, "be <= 3.4028234663852886e+38"),
        (te.MXFP6BlockScaling, "fp6_format", "e4m3", "be one of 'e2m3', 'e3m2', 'hyb"),
        (te.NVFP4BlockScaling, "disable_rht", 0, "be True or False, got 0"),
        (te.NVFP4BlockScaling, "disable_stochastic_rounding", None, "be True or False"),
        (te.NVFP4BlockScaling, "disable_2d_quantization", "no", "be True or False, go"),
    ],
)
def test_bad_values(cls, field, value, rule):
    match = re.escape(f"{cls.__name__}: {field} must {rule}") + ".*; "
    with pytest.raises(ValueError, match=match):
        cls(**{field: value})


def test_bounds_are_allowed():
    assert te.DelayedScaling(margin=126, amax_history_len=1).margin == 126


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", te.HIGH_PRECISION),
        ("delayed_scaling", te.DelayedScaling()),
        ("current_scaling", te.Float8CurrentScaling()),
        ("mxfp8", te.MXFP8BlockScaling()),
        ("float8_block_scaling", te.Float8BlockScaling()),
        ("mxfp6", te.MXFP6BlockScaling()),
        ("nvfp4", te.NVFP4BlockScaling()),
    ],
)
def test_presets(name, expected):
    assert te.load_recipe(name) == expected
    assert te.is_recipe_supported(name)[0]
    with te.autocast(te.load_recipe(name)):
        found = te.current_recipe()
    assert found == (None if name == "none" else expected)


def test_presets_are_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch):
    """A wheel keeps the folder inside the package, a checkout beside it."""
    package = tmp_path / "te_flax"
    (package / "recipe").mkdir(parents=True)
    monkeypatch.setattr(presets, "__file__", str(package / "recipe" / "presets.py"))
    presets._folder.cache_clear()
    try:
        assert presets._folder() == tmp_path / "recipes"
        (package / "recipes").mkdir()
        presets._folder.cache_clear()
        assert presets._folder() == package / "recipes"
    finally:
        presets._folder.cache_clear()


def test_every_preset_names_all_fields():
    folder = pathlib.Path(presets._folder())
    for name in presets.presets():
        text = (folder / f"{name}.toml").read_text()
        for field in dataclasses.fields(te.load_recipe(name)):
            assert f"{field.name} = " in text


def test_a_path_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        'recipe = "DelayedScaling"\nmargin = 2\nsplit_accumulator = [true, true, true]'
    )
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "mxfp8").write_text(text)
    expected = te.DelayedScaling(margin=2, split_accumulator=(True, True, True))
    for source in ("mine.toml", str(tmp_path / "mine.toml"), pathlib.Path("mine.toml")):
        assert te.load_recipe(source) == expected
    assert te.load_recipe("./mxfp8") == expected
    assert te.load_recipe("mxfp8") == te.MXFP8BlockScaling()


@pytest.mark.parametrize("source", ["gone.toml", "./mxfp8", "mxfp8.toml"])
def test_missing_file(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    match = "load_recipe: path must be an existing TOML file, got .*; check the path"
    with pytest.raises(FileNotFoundError, match=match):
        te.load_recipe(source)


@pytest.mark.parametrize("source", ["fp8", "", "MXFP8", None, 3])
def test_unknown_preset(source):
    match = (
        "load_recipe: preset must be one of current_scaling, delayed_scaling, "
        f"float8_block_scaling, mxfp6, mxfp8, none, nvfp4, got {source!r}; "
    )
    with pytest.raises(ValueError, match=re.escape(match)):
        te.load_recipe(source)


def test_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'recipe = "HighPrecision" # \xe9')
    with pytest.raises(
        ValueError, match=r"latin.toml.*: file must be valid UTF-8 TOML"
    ):
        te.load_recipe(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            'recipe = "Delayed"',
            "recipe must be one of DelayedScaling, Float8CurrentScaling, "
            "MXFP8BlockScaling, MXFP6BlockScaling, Float8BlockScaling, "
            "NVFP4BlockScaling, HighPrecision, got 'Delayed'; ",
        ),
        ("margin = 1", "recipe must be one of DelayedScaling, .*, got None; "),
        ("recipe = 3", "recipe must be one of DelayedScaling, .*, got 3; "),
        (
            'recipe = "MXFP8BlockScaling"\nmargin = 1',
            "key must be one of recipe, fp8_format, got 'margin'; ",
        ),
        (
            'recipe = "DelayedScaling"\n[margin]\nx = 1',
            "DelayedScaling: margin must be an integer",
        ),
        (
            'recipe = "DelayedScaling"\nmargin = "1"',
            "DelayedScaling: margin must be an integer >= 0 and <= 126, got '1'; ",
        ),
        (
            'recipe = "DelayedScaling"\nsplit_accumulator = [0, 1, 1]',
            r"split_accumulator must be a tuple of three booleans .*, got \(0, 1, 1\)",
        ),
        ("recipe = ", "file must be valid UTF-8 TOML, got an error"),
    ],
)
def test_bad_files(text, match, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"load_recipe.*bad.toml.*{match}"):
        te.load_recipe(path)


def test_is_recipe_supported():
    for name in ("none", te.HIGH_PRECISION):
        expected = (True, "runs unquantized on every platform")
        assert te.is_recipe_supported(name) == expected
    for name in set(presets.presets()) - {"none"}:
        supported, reason = te.is_recipe_supported(name)
        assert supported
        assert "compiled kernels" in reason
    assert te.is_recipe_supported(te.DelayedScaling())[0]
    supported, reason = te.is_recipe_supported("fp9")
    assert not supported
    assert "no such recipe: 'fp9'; presets are current_scaling, " in reason
