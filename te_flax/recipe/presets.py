"""Named recipes, kept as TOML files."""

import dataclasses
import functools
import os
import pathlib
import tomllib
from typing import Any

from te_flax.errors import message
from te_flax.recipe.base import HighPrecision, Recipe
from te_flax.recipe.block import Float8BlockScaling
from te_flax.recipe.current import Float8CurrentScaling
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.mxfp6 import MXFP6BlockScaling
from te_flax.recipe.mxfp8 import MXFP8BlockScaling
from te_flax.recipe.nvfp4 import NVFP4BlockScaling

_CLASSES: dict[str, type[Recipe]] = {
    cls.__name__: cls
    for cls in (
        DelayedScaling,
        Float8CurrentScaling,
        MXFP8BlockScaling,
        MXFP6BlockScaling,
        Float8BlockScaling,
        NVFP4BlockScaling,
        HighPrecision,
    )
}


def load_recipe(source: str | os.PathLike[str]) -> Recipe:
    """Reads a recipe from a preset or from a TOML file.

    A file holds ``recipe = "DelayedScaling"`` (the class) and any of its fields;
    fields left out keep their defaults. ``te.autocast(te.load_recipe(name))`` works
    for every preset: ``"none"`` gives ``te.HIGH_PRECISION``.

    Args:
        source: a path (a string that ends in ``.toml`` or holds a path separator,
            or any ``os.PathLike``), else the name of a preset.

    Returns:
        The recipe.

    Raises:
        ValueError: unknown preset, recipe or key, a value of the wrong type or out
            of range, or a file that is not UTF-8 TOML. The message lists what is
            allowed.
        FileNotFoundError: `source` is a path and there is no such file.

    Example:
        >>> load_recipe("mxfp8")
        MXFP8BlockScaling(fp8_format='e4m3')
    """
    if isinstance(source, os.PathLike) or (
        isinstance(source, str) and _is_path(source)
    ):
        path = pathlib.Path(source)
        if not path.is_file():
            remedy = f"check the path, or use a preset: {', '.join(presets())}"
            rule = "be an existing TOML file"
            raise FileNotFoundError(
                message("load_recipe", "path", rule, f"'{path}'", remedy)
            )
        return _parse(path, str(path))
    if source not in presets():
        rule = f"be one of {', '.join(presets())}"
        remedy = "choose one of these, or pass a path that ends in .toml"
        raise ValueError(message("load_recipe", "preset", rule, repr(source), remedy))
    return _parse(_folder() / f"{source}.toml", str(source))


@functools.cache
def presets() -> tuple[str, ...]:
    """The names that :func:`load_recipe` knows, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


@functools.cache
def _folder() -> pathlib.Path:
    """The folder of presets: in the package of a wheel, beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def _is_path(source: str) -> bool:
    separators = [os.sep, "/"] + ([os.altsep] if os.altsep else [])
    return source.endswith(".toml") or any(sep in source for sep in separators)


def _parse(path: pathlib.Path, where: str) -> Recipe:
    """Builds the recipe that a TOML file describes."""
    where = f"load_recipe({where})"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        remedy = "see docs/recipes.md for the format"
        raise ValueError(
            message(where, "file", "be valid UTF-8 TOML", f"an error ({error})", remedy)
        ) from error
    name = table.pop("recipe", None)
    if not isinstance(name, str) or name not in _CLASSES:
        rule = f"be one of {', '.join(_CLASSES)}"
        remedy = 'write recipe = "DelayedScaling" or another of these'
        raise ValueError(message(where, "recipe", rule, repr(name), remedy))
    return _build(_CLASSES[name], table, where)


def _build(cls: type[Recipe], table: dict[str, Any], where: str) -> Recipe:
    """Fills the fields of a recipe class from a table."""
    allowed = [field.name for field in dataclasses.fields(cls)]
    for key, value in table.items():
        if key not in allowed:
            keys = ", ".join(["recipe", *allowed])
            remedy = "remove it or correct its spelling"
            raise ValueError(
                message(where, "key", f"be one of {keys}", repr(key), remedy)
            )
        if isinstance(value, list):
            table[key] = tuple(value)
    try:
        return cls(**table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
