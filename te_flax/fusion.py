"""A norm and the linear layer behind it, replaced by one fused layer."""

import dataclasses
from typing import Any

from flax import nnx

from te_flax.adapters import (
    FUSED,
    Options,
    adopt,
    class_name,
    dense_keywords,
    refusal,
    replacement,
)
from te_flax.errors import message
from te_flax.paths import Place
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import check_recipe


@dataclasses.dataclass(frozen=True)
class Fuse:
    """The action of :func:`te_flax.convert` that fuses a norm and a linear layer.

    The module that the rule's pattern names must apply the two right after each
    other, ``self.linear(self.norm(x))``, and must use the norm's output nowhere else:
    te_flax cannot see that. The linear layer becomes a ``LayerNormDenseGeneral`` that
    holds both layers' variables, so that the norm's move to ``<linear>/norm``, and the
    norm returns its input. A norm in front of several linear layers needs a rule for
    each of them.

    Args:
        norm: path of the norm below the module that the pattern names.
        linear: path of the linear layer below it.
        recipe: of the fused layer; None follows ``te.autocast``.

    Raises:
        TypeError: a path is no str, or `recipe` is no recipe.

    Example:
        >>> import te_flax as te
        >>> rules = [("*", None), ("blocks/*/mlp", te.Fuse("norm", "wi"))]
    """

    norm: str
    linear: str
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in ("norm", "linear"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                rule, remedy = "be a path", 'write te.Fuse("norm", "wi")'
                raise TypeError(message("Fuse", name, rule, repr(value), remedy))
        check_recipe("Fuse", self.recipe)


class Passthrough(nnx.Module):
    """What is left of a norm that was fused into the layer behind it.

    Args:
        rule: how the two were found.
    """

    def __init__(self, rule: Fuse):
        self.rule = rule

    def __call__(self, x: Any) -> Any:
        """Returns x."""
        return x


def fusion_places(
    rule: Fuse, parents: list[Place], found: list[Place]
) -> list[tuple[Place, Place]]:
    """The (norm, linear) places of a rule below those parents that hold both."""
    by_path = {_split(place.name): place for place in found}
    pairs = []
    for parent in parents:
        norm, linear = (
            by_path.get((*_split(parent.name), *_split(name)))
            for name in (rule.norm, rule.linear)
        )
        if norm is not None and linear is not None:
            pairs.append((norm, linear))
    return pairs


def fused_pair(
    linear: Place, norm: Place, rule: Fuse, options: Options, before: Any = None
) -> dict[int, nnx.Module]:
    """Makes the fused layer and what remains of the norm.

    Args:
        linear: where the linear layer is.
        norm: where the norm is.
        rule: the user's.
        options: of the fused layer.
        before: what an earlier rule made of the norm.

    Returns:
        The new modules by the identity of the old ones.

    Raises:
        ValueError: the two cannot be fused.
    """
    reason = _refuse(linear, norm)
    if reason is not None:
        got = f"{norm.name} and {linear.name}: {reason}"
        rule_, remedy = "name layers that can be fused", "leave this rule out"
        raise ValueError(message("convert", "te.Fuse", rule_, got, remedy))
    rms = isinstance(norm.module, nnx.RMSNorm)
    module: Any = linear.module
    features = module.in_features
    layer = FUSED(
        features if isinstance(features, int) else features[0],
        module.out_features,
        layernorm_type="rmsnorm" if rms else "layernorm",
        epsilon=norm.module.epsilon,
        **dense_keywords(module, options),
    )
    layer.norm = replacement(norm.module, Options())
    adopt(layer, module)
    left = before if isinstance(before, Passthrough) else Passthrough(rule)
    return {id(module): layer, id(norm.module): left}


def norm_of(place: Place, modules: dict[tuple, Any]) -> Any:
    """The norm inside the layer into which the one at this place was fused."""
    rule: Fuse = place.module.rule
    up = len(_split(rule.norm))
    target = (*map(str, place.path[:-up]), *_split(rule.linear))
    by_name = {tuple(map(str, path)): module for path, module in modules.items()}
    layer: Any = by_name.get(target)
    if not hasattr(layer, "norm"):
        wanted = f"hold {rule.linear} beside {place.name}, fused by te.convert"
        remedy = "revert the whole model"
        raise ValueError(message("revert", "model", wanted, "none", remedy))
    return layer.norm


def _refuse(linear: Place, norm: Place) -> str | None:
    """Why a pair cannot be fused, or None."""
    for place, kinds in ((norm, _NORMS), (linear, _LINEARS)):
        if not isinstance(place.module, kinds):
            return f"{place.name} is a {class_name(type(place.module))}"
        reason = refusal(place.module, place.ancestors)
        if reason is not None:
            return f"{place.name} cannot be replaced: {reason}"
    if not norm.module.use_scale:
        return "the norm has no scale"
    if getattr(linear.module, "axis", (-1,)) != (-1,):
        return "the linear layer contracts other axes than the last"
    features = linear.module.in_features
    features = (features,) if isinstance(features, int) else features
    if features != (norm.module.num_features,):
        return "they differ in the number of features"
    if norm.module.dtype != linear.module.dtype:
        return "they differ in dtype"
    return None


_NORMS = (nnx.LayerNorm, nnx.RMSNorm)
_LINEARS = (nnx.Linear, nnx.LinearGeneral)


def _split(name: str) -> tuple[str, ...]:
    return tuple(name.split("/")) if name else ()
