"""Gradient transforms that carry amax(dy) into the model's FP8 state."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from te_flax.errors import message
from te_flax.quantize.mailbox import push_letter
from te_flax.quantize.statistics import decode_statistics
from te_flax.recipe.arguments import Argnum, check_arguments, positional_arguments
from te_flax.recipe.record import record_cotangent
from te_flax.recipe.state import Fp8Mailbox, Fp8Stat, Fp8Statistics


def diff_filter(wrt: Any = nnx.Param) -> Any:
    """The filter of what a hand-written loop must differentiate.

    Args:
        wrt: filter of the variables that get gradients.

    Returns:
        A filter of these and of the mailboxes, for ``nnx.split``.

    Example:
        >>> from flax import nnx
        >>> import te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> graphdef, diff, rest = nnx.split(model, te.diff_filter(nnx.Param), ...)
    """
    return nnx.Any(wrt, Fp8Mailbox)


@contextlib.contextmanager
def track_gradients(*models: Any, graph: bool | None = None) -> Iterator[None]:
    """Makes dy use delayed scaling in the layers of `models` called inside.

    ``te.value_and_grad`` enters this by itself. A hand-written loop enters it inside
    the loss, around the calls of the model that it differentiates with respect to
    ``te.diff_filter`` and passes to ``te.absorb``. Without it dy uses current
    scaling, which is right for any model whose dy history nobody fills.

    Args:
        *models: modules, or pytrees that hold them.
        graph: as in ``nnx.split``.

    Yields:
        Nothing.

    Example:
        >>> from flax import nnx
        >>> import te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> with te.track_gradients(model):
        ...     model.fp8.tracked
        True
    """
    found = nnx.iter_graph(models, graph=graph)
    states = [module for _, module in found if isinstance(module, Fp8Statistics)]
    before = [state.track_gradients for state in states]
    for state in states:
        state.track_gradients = True
    try:
        yield
    finally:
        for state, value in zip(states, before, strict=True):
            state.track_gradients = value


def absorb(model: Any, grads: Any) -> Any:
    """Empties the mailboxes of a gradient into the model's FP8 state.

    Each layer gets one push of amax(dy): exact if the gradient holds one
    contribution of this layer, else the power of two at or above the largest (a
    layer used twice, a sum or mean over microbatches). Call it once a step, before
    the gradients are scaled or clipped.

    Args:
        model: the module, or a pytree of modules; updated in place.
        grads: its gradients, differentiated with respect to ``te.diff_filter(wrt)``;
            a state, or the nested dicts of one.

    Returns:
        The gradients of `wrt` only.

    Raises:
        ValueError: the gradients lack the mailbox of an FP8 layer; the state is
            then left as it was.

    Example:
        >>> from flax import nnx
        >>> import jax, te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> diff = nnx.state(model, te.diff_filter(nnx.Param))
        >>> sorted(te.absorb(model, diff))
        ['bias', 'kernel']
    """
    named, treedef = jax.tree.flatten_with_path(model, is_leaf=_is_node)
    nodes = [node for _, node in named]
    parts = treedef.flatten_up_to(grads)
    mailboxes = nnx.to_flat_state(nnx.state(nodes, Fp8Mailbox))
    found = {
        (i, *path)
        for i, part in enumerate(parts)
        if isinstance(part, Mapping)
        for path, _ in nnx.to_flat_state(_as_state(part))
    }
    missing = [path for path, _ in mailboxes if path not in found]
    if missing:
        places: dict[Any, str] = {
            i: jax.tree_util.keystr(path) for i, (path, _) in enumerate(named)
        }
        names = ["/".join([places[p[0]], *map(str, p[1:])]) for p in missing]
        rule = "hold the cotangent of each FP8 layer's mailbox"
        remedy = "differentiate with respect to te.diff_filter(wrt)"
        got = f"none for {', '.join(names).strip('/')}"
        raise ValueError(message("absorb", "grads", rule, got, remedy))
    pairs = zip(nodes, parts, strict=True)
    return treedef.unflatten([_deliver(n, g, None) for n, g in pairs])


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """``nnx.value_and_grad`` for models with FP8 layers.

    Besides what nnx's does, each call pushes one amax(dy) into the state of every
    layer of the differentiated models that took part. Works in all three graph
    modes of nnx; gradients are an ``nnx.State`` of the `wrt` variables in each.

    Args:
        f: function of the model and other arguments; returns the loss, a scalar.
        argnums: position, or sequence of positions, of the arguments to
            differentiate; ``nnx.DiffState(i, filter)`` gives one its own `wrt`.
            Modules may sit anywhere in these arguments.
        has_aux: f returns (loss, anything).
        wrt: filter of the variables that get gradients.
        holomorphic: as in ``jax.grad``.
        allow_int: as in ``jax.grad``.
        graph: as in ``nnx.value_and_grad``; None reads ``nnx.set_graph_mode``.
        graph_updates: as there; None reads ``nnx.set_graph_updates``.

    Returns:
        A function of f's arguments that returns (loss, gradients), or
        ((loss, aux), gradients). Without f, a decorator.

    Raises:
        TypeError: f is no function, or argnums hold something else than positions.
        ValueError: argnums do not fit the arguments, or f is a bound method.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> loss = lambda model, x: (model(x) ** 2).mean()
        >>> with te.autocast(te.DelayedScaling()):
        ...     value, grads = te.value_and_grad(loss)(model, jnp.ones((2, 4)))
        >>> sorted(grads)
        ['bias', 'kernel']
    """
    options = {
        "argnums": argnums,
        "has_aux": has_aux,
        "wrt": wrt,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
        "graph": graph,
        "graph_updates": graph_updates,
    }
    check_arguments("value_and_grad", f, argnums)
    if f is None:
        return functools.partial(value_and_grad, **options)
    if inspect.ismethod(f) and isinstance(f.__self__, nnx.Pytree):
        rule, remedy = "be a function of the model", "pass the model as an argument"
        got = f"the bound method {f.__qualname__}"
        raise ValueError(message("value_and_grad", "f", rule, got, remedy))

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        use_graph, updates = graph, graph_updates
        if use_graph is None:
            use_graph = nnx.set_graph_mode.current_value()
        if updates is None:
            updates = nnx.set_graph_updates.current_value()
        positional, kwargs = positional_arguments(f, args, kwargs)
        filters = _filters(argnums, wrt, len(positional))
        run = _run_graph if use_graph and updates else _run_split
        how = {"holomorphic": holomorphic, "allow_int": allow_int}
        out, grads = run(f, positional, kwargs, filters, has_aux, use_graph, how)
        grads = tuple(
            _deliver_all(positional[i], g, use_graph)
            for i, g in zip(filters, grads, strict=True)
        )
        return out, grads[0] if isinstance(argnums, int | nnx.DiffState) else grads

    return wrapped


def grad(f: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """``nnx.grad`` for models with FP8 layers.

    Args:
        f: as in :func:`value_and_grad`.
        **options: the keywords of :func:`value_and_grad`.

    Returns:
        A function of f's arguments that returns the gradients, or
        (gradients, aux). Without f, a decorator.

    Raises:
        TypeError: as :func:`value_and_grad`, or an option that it does not have.
        ValueError: as :func:`value_and_grad`.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, te_flax as te
        >>> model = te.DenseGeneral(4, 4, rngs=nnx.Rngs(0))
        >>> grads = te.grad(lambda model, x: model(x).sum())(model, jnp.ones((2, 4)))
        >>> grads["bias"][...].tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    known = list(inspect.signature(value_and_grad).parameters)[1:]
    for name in options:
        if name not in known:
            rule, remedy = f"be among {', '.join(known)}", "correct its spelling"
            raise TypeError(message("grad", "options", rule, repr(name), remedy))
    check_arguments("grad", f, options.get("argnums", 0))
    if f is None:
        return functools.partial(grad, **options)
    transformed = value_and_grad(f, **options)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out, grads = transformed(*args, **kwargs)
        return (grads, out[1]) if options.get("has_aux") else grads

    return wrapped


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _filters(
    argnums: Argnum | Sequence[Argnum], wrt: Any, count: int
) -> dict[int, Any]:
    """Maps each differentiated position to the filter of its gradients."""
    entries = [argnums] if isinstance(argnums, int | nnx.DiffState) else list(argnums)
    filters: dict[int, Any] = {}
    for entry in entries:
        own = isinstance(entry, nnx.DiffState)
        index, wanted = (entry.argnum, entry.filter) if own else (entry, wrt)
        if not -count <= index < count or index % count in filters:
            rule = f"be distinct positions of the {count} positional arguments"
            remedy = "count from 0"
            raise ValueError(
                message("value_and_grad", "argnums", rule, argnums, remedy)
            )
        filters[index % count] = diff_filter(wanted)
    return filters


def _run_graph(f, args, kwargs, filters, has_aux, graph, how):
    """Dynamic graph mode: nnx's own transform over the wider filter."""

    @functools.wraps(f)
    def marked(*inner, **kw):
        with track_gradients(*(inner[i] for i in filters), graph=graph):
            return f(*inner, **kw)

    return nnx.value_and_grad(
        marked,
        argnums=tuple(nnx.DiffState(i, own) for i, own in filters.items()),
        has_aux=has_aux,
        graph=True,
        graph_updates=True,
        **how,
    )(*args, **kwargs)


def _run_split(f, args, kwargs, filters, has_aux, graph, how):
    """Simple graph and tree mode: split every module, differentiate the parts.

    nnx's transform differentiates all of a module here, integers included, so the
    arguments are split by hand and the values that f changed are written back.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    owner = _owners(args, kwargs)
    nodes = {k: leaf for k, leaf in enumerate(leaves) if _is_node(leaf)}
    arrays = {
        k: leaf
        for k, leaf in enumerate(leaves)
        if owner[k] in filters and k not in nodes
    }

    def differentiated(path, variable):
        own, node = filters.get(owner[path[0]]), nodes[path[0]]
        if own is None or not isinstance(variable, nnx.Variable):
            return False
        return node is variable or nnx.filterlib.to_predicate(own)(path[1:], variable)

    graphdef, diff, rest = nnx.split(nodes, differentiated, ..., graph=graph)

    def pure(diff, arrays):
        inner = nnx.merge(graphdef, diff, rest, copy=True)
        before = {p: v.get_raw_value() for p, v in _variables(inner, graph).items()}
        merged = [inner.get(k, arrays.get(k, leaf)) for k, leaf in enumerate(leaves)]
        call_args, call_kwargs = treedef.unflatten(merged)
        with track_gradients(*(call_args[i] for i in filters), graph=graph):
            out = f(*call_args, **call_kwargs)
        loss, aux = out if has_aux else (out, None)
        after = {p: v.get_raw_value() for p, v in _variables(inner, graph).items()}
        changed = {p: v for p, v in after.items() if v is not before.get(p, v)}
        return loss, (aux, changed)

    transform = jax.value_and_grad(pure, argnums=(0, 1), has_aux=True, **how)
    (loss, (aux, changed)), (node_grads, array_grads) = transform(diff, arrays)
    variables = _variables(nodes, graph)
    for path, value in changed.items():
        variables[path].set_raw_value(value)
    out = (loss, aux) if has_aux else loss
    grads = [
        node_grads.get(k, nnx.State({})) if k in nodes else array_grads.get(k)
        for k in range(len(leaves))
    ]
    arg_grads = treedef.unflatten(grads)[0]
    return out, [arg_grads[i] for i in filters]


def _owners(args: tuple, kwargs: dict) -> list[int]:
    """For each leaf the position of its argument; -1 for keywords."""
    owner = []
    for index, arg in (*enumerate(args), (-1, kwargs)):
        owner += [index] * len(jax.tree.leaves(arg, is_leaf=_is_node))
    return owner


def _variables(nodes: dict[int, Any], graph: bool) -> dict[tuple, nnx.Variable]:
    flat = nnx.to_flat_state(nnx.state(nodes, graph=graph))
    return {path: v for path, v in flat if isinstance(v, nnx.Variable)}


def _deliver_all(arg: Any, grads: Any, graph: bool | None) -> Any:
    nodes, treedef = jax.tree.flatten(arg, is_leaf=_is_node)
    parts = treedef.flatten_up_to(grads)
    pairs = zip(nodes, parts, strict=True)
    return treedef.unflatten([_deliver(n, g, graph) for n, g in pairs])


def _as_state(grads: Mapping) -> nnx.State:
    return grads if isinstance(grads, nnx.State) else nnx.State(dict(grads))


def _deliver(node: Any, grads: Any, graph: bool | None) -> Any:
    """Delivers the mail of one module; returns the other gradients."""
    if not isinstance(node, nnx.Pytree) or not isinstance(grads, Mapping):
        return grads
    stats = dict(nnx.to_flat_state(nnx.state(node, Fp8Stat, graph=graph)))
    kept = []
    for path, leaf in nnx.to_flat_state(_as_state(grads)):
        *at, name = path
        if name == "mailbox" and (*at, "dy") in stats:
            dy, nonfinite = stats[(*at, "dy")], stats[(*at, "nonfinite")]
            pushed = push_letter(leaf[...], dy[...], nonfinite[...])
            dy.set_value(pushed[0])
            nonfinite.set_value(pushed[1])
        elif name == "record_mailbox" and (*at, "record") in stats:
            numbers, record = decode_statistics(leaf[...]), stats[(*at, "record")]
            record.set_value(record_cotangent(record[...], numbers))
        else:
            kept.append((path, leaf))
    if isinstance(grads, nnx.State):
        return nnx.from_flat_state(kept)
    return nnx.traversals.unflatten_mapping(dict(kept))
