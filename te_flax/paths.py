"""Where the modules of a model are: "/"-joined paths, in the order of definition."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from te_flax.errors import message


class Place(NamedTuple):
    """A module and one way to reach it.

    Attributes:
        path: keys from the root; attribute names, indices.
        module: the module.
        ancestors: the modules above it, the root first.
    """

    path: tuple[str | int, ...]
    module: Any  # its attributes are its class's, which callers know
    ancestors: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The keys joined by "/"; "" for the root."""
        return "/".join(map(str, self.path))


def places(model: Any) -> list[Place]:
    """Lists the modules of a model, each once for every path that leads to it.

    Args:
        model: a module, or a pytree that holds modules.

    Returns:
        Parents before children, attributes in the order in which they were first
        assigned. ``nnx.merge``, and with it ``nnx.clone``, sorts them by name.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
        >>> [place.name for place in places(model)]
        ['', 'layers', 'layers/0']
    """
    return list(_visit((), model, ()))


def check_model(where: str, model: Any) -> None:
    """Raises TypeError unless the model is a module or a pytree that may hold some."""
    if isinstance(model, nnx.Pytree):
        return
    if model is None or jax.tree_util.all_leaves([model]):
        rule, remedy = "be a module or a pytree of modules", "pass the model itself"
        got = repr(model) if model is None else f"a {type(model).__name__}"
        raise TypeError(message(where, "model", rule, got, remedy))


def variables(module: nnx.Pytree) -> dict[str, nnx.Variable]:
    """The variables that are attributes of the module itself."""
    return {k: v for k, v in vars(module).items() if isinstance(v, nnx.Variable)}


def _visit(
    path: tuple[str | int, ...], node: Any, above: tuple[nnx.Pytree, ...]
) -> Iterator[Place]:
    if not isinstance(node, nnx.Pytree):
        for keys, child in jax.tree.leaves_with_path(node, is_leaf=_is_leaf):
            if isinstance(child, nnx.Pytree):
                yield from _visit((*path, *map(_key, keys)), child, above)
        return
    if any(node is module for module in above):
        return
    yield Place(path, node, above)
    for name, child in vars(node).items():
        if isinstance(child, nnx.Variable) or name.startswith("_pytree__"):
            continue
        key = int(name) if isinstance(node, nnx.List) and name.isdigit() else name
        yield from _visit((*path, key), child, (*above, node))


def _is_leaf(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


def _key(entry: Any) -> str | int:
    for field in ("key", "idx", "name"):
        if hasattr(entry, field):
            return getattr(entry, field)
    return str(entry)
