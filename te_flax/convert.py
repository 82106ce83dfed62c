"""Replaces layers of flax.nnx inside a model by layers that share their variables."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from flax import nnx

from te_flax.adapters import (
    Options,
    adapter,
    children,
    original,
    refusal,
    replacement,
)
from te_flax.errors import message
from te_flax.fusion import Fuse, Passthrough, fused_pair, fusion_places, norm_of
from te_flax.paths import Place, check_model, places
from te_flax.recipe.base import Recipe

SKIP = "skip"
Action = Recipe | None | str | Fuse
Rules = Recipe | None | Sequence[tuple[str, Action]]


def convert(
    model: Any,
    rules: Rules = None,
    *,
    skip_first: int = 0,
    skip_last: int = 0,
    amax_history_len: int | None = None,
) -> Any:
    """Returns the model with layers of flax.nnx replaced by layers of te_flax.

    ``nnx.Linear`` and ``nnx.LinearGeneral`` become :class:`te_flax.DenseGeneral`,
    ``nnx.LayerNorm``, ``nnx.RMSNorm``, ``nnx.Einsum`` and ``nnx.MultiHeadAttention``,
    whose projections count as layers too, the te_flax layers of the same names. As with
    ``nnx.view`` the argument does not change; the result has new modules around the
    *same* variables, so parameters keep their values, paths, metadata and sharding,
    training one model trains the other, and a shared layer stays shared.

    A layer with an option that te_flax cannot honour is left alone;
    :func:`te_flax.report` lists it with the reason.

    Args:
        model: a module, or a pytree that holds modules.
        rules: a recipe, or None, for every layer; or (pattern, action) pairs of which
            the last match decides. A pattern is a glob for the layer's path, as
            ``"blocks/*/mlp/wi"``; ``*`` matches ``/`` too; that of an attention names
            its projections with it. An action is a recipe
            (None: the layer follows ``te.autocast``; ``te.HIGH_PRECISION``: never
            quantized), ``"skip"`` (not replaced) or a :class:`te_flax.Fuse`, whose
            pattern names the module that holds both layers. A layer that no pattern
            matches is not replaced.
        skip_first: how many of the first layers with a GEMM stay as they are,
            whatever the rules say.
        skip_last: how many of the last ones. Layers count in the order in which the
            model's attributes were first assigned.
        amax_history_len: of the new layers, as in :class:`te_flax.DenseGeneral`.

    Returns:
        The converted model.

    Raises:
        ValueError: a pattern matches no layer, there is no rule, the model holds no
            layer, or a count is no int >= 0.
        TypeError: the rules have another form, or the model is none.

    Example:
        >>> import te_flax as te
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.relu,
        ...                        nnx.Linear(8, 2, rngs=rngs))
        >>> fp8 = te.convert(model, te.DelayedScaling(), skip_last=1)
        >>> [type(fp8.layers[i]).__name__ for i in (0, 2)]
        ['DenseGeneral', 'Linear']
        >>> fp8.layers[0].kernel is model.layers[0].kernel
        True
    """
    check_model("convert", model)
    pairs = _pairs(rules)
    for name, count in (("skip_first", skip_first), ("skip_last", skip_last)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            rule, remedy = "be an int >= 0", "use 0 to leave out none"
            raise ValueError(message("convert", name, rule, repr(count), remedy))
    found = places(model)
    layers = [p for p in found if adapter(p.module) is not None]
    if not layers:
        rule = "hold a linear layer or a norm of flax.nnx"
        got = f"a {type(model).__name__} without one"
        remedy = "te.report(model) lists its layers"
        raise ValueError(message("convert", "model", rule, got, remedy))
    actions, norms = _chosen(pairs, layers, found)
    order = list(dict.fromkeys(id(p.module) for p in layers if _has_gemm(p.module)))
    for layer in (*order[:skip_first], *order[len(order) - skip_last :]):
        actions[layer] = SKIP
    new: dict[int, nnx.Module] = {}
    for place in layers:
        action = actions.get(id(place.module), SKIP)
        if isinstance(action, str) or id(place.module) in new:
            continue
        if isinstance(action, Fuse):
            norm = norms[id(place.module)]
            options = Options(action.recipe, amax_history_len, len(new))
            new |= fused_pair(place, norm, action, options, new.get(id(norm.module)))
        elif refusal(place.module, place.ancestors) is None:
            options = Options(action, amax_history_len, len(new))
            new[id(place.module)] = replacement(place.module, options)
    return _with(model, new)


def revert(model: Any) -> Any:
    """Returns the model with the layers that it had before :func:`convert`.

    The classes and all options are the original ones and the variables the same
    objects, so outputs are bit-equal to the original model's with the same
    parameters. The FP8 state is dropped. The argument does not change.

    Args:
        model: a model that ``te.convert`` returned, or one rebuilt from its
            ``nnx.split``, or a part of one.

    Returns:
        The original model around the same variables; layers that were built as
        te_flax layers remain.

    Raises:
        ValueError: nothing in it was converted, or the model holds a norm that was
            fused into a layer outside of it.
        TypeError: the model is none.

    Example:
        >>> import te_flax as te
        >>> model = te.convert(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
        >>> type(te.revert(model)).__name__
        'Linear'
    """
    check_model("revert", model)
    found = places(model)
    modules = {place.path: place.module for place in found}
    new: dict[int, nnx.Module] = {}
    for place in found:
        if isinstance(place.module, Passthrough):
            new[id(place.module)] = original(norm_of(place, modules))
        elif hasattr(place.module, "converted_from"):
            new[id(place.module)] = original(place.module)
    if not new:
        rule, remedy = "hold a layer that te.convert replaced", "pass its result"
        got = f"a {type(model).__name__} without one"
        raise ValueError(message("revert", "model", rule, got, remedy))
    return _with(model, new)


def _pairs(rules: Any) -> list[tuple[str, Action]]:
    """Checks the form of the rules; a single action is one for every layer."""
    if rules is None or isinstance(rules, Recipe):
        return [("*", rules)]
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        rule = "be a recipe, None or a sequence of (pattern, action) pairs"
        remedy = 'pass te.load_recipe("mxfp8") for a preset'
        raise TypeError(message("convert", "rules", rule, repr(rules), remedy))
    pairs = list(rules)
    if not pairs:
        rule, remedy = "hold a (pattern, action) pair", "pass None for every layer"
        raise ValueError(message("convert", "rules", rule, repr(rules), remedy))
    for pair in pairs:
        ok = isinstance(pair, tuple | list) and len(pair) == 2
        if not ok or not isinstance(pair[0], str):
            rule = "hold (pattern, action) pairs, the pattern a str"
            remedy = 'write [("blocks/*", te.MXFP8BlockScaling())]'
            raise TypeError(message("convert", "rules", rule, repr(pair), remedy))
        action = pair[1]
        if action != SKIP and not isinstance(action, Recipe | Fuse | None):
            rule = f"map {pair[0]!r} to a recipe, None, 'skip' or a te.Fuse"
            remedy = "None follows te.autocast, te.HIGH_PRECISION never quantizes"
            raise TypeError(message("convert", "rules", rule, repr(action), remedy))
    return pairs


def _chosen(
    pairs: Sequence[tuple[str, Action]], layers: list[Place], found: list[Place]
) -> tuple[dict[int, Action], dict[int, Place]]:
    """The last matching action of each layer, and the norm of each fused one."""
    actions: dict[int, Action] = {}
    norms: dict[int, Place] = {}
    for pattern, action in pairs:
        if isinstance(action, Fuse):
            parents = [p for p in found if fnmatch.fnmatchcase(p.name, pattern)]
            both = fusion_places(action, parents, found)
            norms |= {id(linear.module): norm for norm, linear in both}
            matched = [linear for _, linear in both]
            names = [p.name for p in found if adapter(p.module) is None]
            rule = f"name a module that holds {action.norm} and {action.linear}"
        else:
            matched = [p for p in layers if _matches(p, pattern)]
            names = [p.name for p in layers]
            rule = "match the path of a layer"
        if not matched:
            close = difflib.get_close_matches(pattern, names, 5, 0.3) or names[:5]
            remedy = f"near paths: {', '.join(map(repr, close))}"
            raise ValueError(message("convert", "rules", rule, repr(pattern), remedy))
        actions |= {id(place.module): action for place in matched}
    return actions, norms


def _matches(place: Place, pattern: str) -> bool:
    """Whether a pattern names a layer, or the attention that it is a part of."""
    names = [place.name]
    if place.ancestors and place.path[-1] in children(place.ancestors[-1]):
        names.append("/".join(map(str, place.path[:-1])))
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _has_gemm(module: Any) -> bool:
    kind = adapter(module)
    return kind is not None and kind.gemm


def _with(model: Any, new: dict[int, nnx.Module]) -> Any:
    """A copy of the modules, not of their variables, with some modules replaced."""
    copy = nnx.clone(model, variables=False, graph=True)
    copies = {place.path: place.module for place in places(copy)}
    for place in places(model):
        module = copies[place.path]
        if id(place.module) in new:
            # The object stays: it may sit in a tuple, or in several places.
            layer = new.pop(id(place.module))
            object.__setattr__(module, "__class__", type(layer))
            # Parts that are layers themselves have their own turn.
            kept = children(place.module)
            held = {n: vars(module)[n] for n in vars(place.module) if n in kept}
            held |= {n: v for n, v in vars(layer).items() if n not in kept}
        elif type(module) is type(place.module):
            # Cloning sorts attributes; their first order is that of the layers.
            held = {name: vars(module)[name] for name in vars(place.module)}
        else:
            continue
        vars(module).clear()
        vars(module).update(held)
    return copy
