"""KernelOp: one declaration per fused op.

From the signature and the reference follow the shape errors, the abstract evaluation,
the lowering per platform, vmap, and the sharding in every mesh mode: Auto meshes
through custom_partitioning, Explicit ones through jax.shard_map inside the lowering,
manual axes run the bare kernel. One :class:`~te_flax.ops._plan.Plan` serves them all.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

# The one private import: without it an eager call of a partitioned op fails.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, ManualAxisType, NamedSharding, PartitionSpec

from te_flax.errors import check_float64, message
from te_flax.ops import _batching, _choice, _lowering
from te_flax.ops._dims import Layout, Signature
from te_flax.ops._plan import (
    NO_MESH,
    Plan,
    axes_of,
    bare_types,
    mesh_of,
    per_dim,
    to_spec,
)

Attrs = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A named example call, for the contract test and the benchmarks.

    Attributes:
        name: short and unique within the op.
        shapes: of the operands.
        dtypes: of the operands.
        attrs: static attributes.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KernelOp:
    """A fused op, called ``op(*arrays, impl=None, out_sharding=None, **attrs)``.

    Attributes:
        name: of the op, as in :func:`te_flax.kernels`.
        signature: named dims of operands and results, see :mod:`te_flax.ops._dims`.
        reference: ``(*arrays, **attrs) -> tuple`` in pure JAX. It defines the meaning,
            shapes and dtypes, is the lowering without a handler, and the oracle.
        attrs: name -> type of the static attributes.
        groups: group -> name of the attribute that counts its dims.
        dtypes: operand -> allowed dtypes; others take any.
        reduce: per result None, "sum" or "max": the reduction over mesh axes that cut
            dims which the result lacks.
        replicated: dims or groups that the kernel must see whole.
        batch_group: group that a vmapped axis may join.
        batch: ``(call, arrays with the batch first, batched, attrs) -> (results,
            dims)``, or None for the default rule.
        partition: ``(plan) -> {dim: mesh axes}`` that pins some dims.
        localize: ``(plan, arrays, attrs) -> (arrays, attrs)`` inside a shard.
        handler: FFI target ``te_flax.<handler>``; None has only the reference.
        handler_attrs: fixed attributes added for the handler.
        aliases: operand -> result whose buffer it may share.
        unit_dims: operand -> a dim that it loses for the handler where its size is
            1: XLA may place such a dim anywhere in a layout, and copies the array if
            that is not where the handler has it.
        workspace: ``(*avals, **attrs) -> bytes`` of scratch memory that the CUDA
            handler gets as its last result; None for handlers without it.
        supports: ``(*avals, **attrs) -> None``, or why the handler cannot serve them.
        prefers_reference: ``(platform, *avals, **attrs) -> None``, or why ``auto`` runs
            the reference though a handler may exist: a measured default. ``native``
            does not ask. The kernel report calls it with the platform alone, for what
            holds of all operands.
        listed: whether :func:`te_flax.kernels` and the report know it; an op without a
            choice of implementations is not.
        cases: example calls.
    """

    name: str
    signature: str
    reference: Callable[..., tuple]
    attrs: Mapping[str, type] = dataclasses.field(default_factory=dict)
    groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtypes: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    reduce: tuple[str | None, ...] = ()
    replicated: tuple[str, ...] = ()
    batch_group: str | None = None
    batch: Callable | None = None
    partition: Callable[[Plan], Mapping[str, tuple[str, ...]]] | None = None
    localize: Callable | None = None
    handler: str | None = None
    handler_attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unit_dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace: Callable[..., int] | None = None
    supports: Callable[..., str | None] | None = None
    prefers_reference: Callable[..., str | None] | None = None
    listed: bool = True
    cases: tuple[Case, ...] = ()
    dims: Signature = dataclasses.field(init=False)
    leaf: Primitive = dataclasses.field(init=False)
    primitive: Primitive = dataclasses.field(init=False)
    _cached_results: Callable[..., tuple] = dataclasses.field(init=False)

    registry = _choice.REGISTRY

    def __post_init__(self):
        dims = Signature(self.name, self.signature, self.groups)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "reduce", self.reduce or (None,) * len(dims.outs))
        operands = {e.name for a in dims.ins for e in a.entries if e.literal is None}
        for array, how in zip(dims.outs, self.reduce, strict=True):
            kept = {n for e in array.entries for n in (e.name, e.before)}
            lost = operands - kept - set(self.replicated)
            if lost and not how:
                raise TypeError(
                    f"{self.name}: result {array.name} lacks {sorted(lost)}; declare "
                    "them replicated or give reduce="
                )
        if self.name in self.registry:
            raise TypeError(f"{self.name}: an op of this name is declared already")
        results = functools.lru_cache(1024)(self._results)
        object.__setattr__(self, "_cached_results", results)
        object.__setattr__(self, "leaf", _lowering.make_leaf(self))
        object.__setattr__(self, "primitive", _make_primitive(self))
        if self.listed:
            self.registry[self.name] = self

    def __call__(self, *arrays, impl=None, out_sharding=None, **attrs) -> tuple:
        """Runs the op.

        Args:
            *arrays: the operands, in the order of the signature.
            impl: kernel rules of ``_choice.current()``; None reads the context.
            out_sharding: PartitionSpec wanted of the first result, or a tuple of one
                per result. Manual axes, and Auto ones beside Explicit ones, do not
                count; without a mesh nothing does.
            **attrs: static attributes, all of them.

        Returns:
            The results, in the order of the signature.

        Raises:
            ValueError: a shape does not fit the signature, or out_sharding the results
                and the mesh.
            TypeError: an operand is no array, a dtype or the set of arguments is wrong.
            NotImplementedError: an implementation asked for by name does not exist.
        """
        operands = [a.name for a in self.dims.ins]
        if len(arrays) != len(operands) or set(attrs) != set(self.attrs):
            takes = f"({', '.join(operands)}, *, {', '.join(self.attrs)})"
            got = f"{len(arrays)} arrays and {sorted(attrs)}"
            remedy = "pass every operand and every attribute"
            raise TypeError(message(self.name, "call", f"be {takes}", got, remedy))
        check_arrays(self.name, **dict(zip(operands, arrays, strict=True)))
        static = tuple(sorted((k, self._attr(k, v)) for k, v in attrs.items()))
        avals = [jax.typeof(a) for a in arrays]
        self.check(avals, static)
        # The choice becomes a parameter of the equation: lowering may run after the
        # `with` block, and the jaxpr shows what will run.
        rules = _choice.current() if impl is None else impl
        chosen = _choice.how(self.name, rules)
        meshes = mesh_of(avals), jax.sharding.get_abstract_mesh()
        explicit = axes_of(meshes[0], AxisType.Explicit)
        axes = explicit or axes_of(meshes[1], AxisType.Auto)
        known = {name for mesh in meshes for name in mesh.axis_names}
        shapes = tuple(a.shape for a in avals)
        outs = self.dims.layout(shapes, (), static).outs
        want = self._wanted(out_sharding, [len(dims) for dims in outs], axes, known)
        results = self.primitive.bind(
            *arrays,
            attrs=static,
            impl=chosen,
            maps=(),
            want=want if explicit else (None,) * len(want),
        )
        # On an Auto mesh the partitioner then proposes it to partition().
        place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
        return tuple(
            r if w is None or not axes else place(r, w)
            for r, w in zip(results, want, strict=True)
        )

    def _attr(self, name: str, value: Any) -> Any:
        kind = self.attrs[name]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            got = f"{value!r} of {type(value).__name__}"
            rule = f"be of type {kind.__name__}"
            raise TypeError(message(self.name, name, rule, got, "convert it first"))
        return value

    def _wanted(
        self, out_sharding, ndims, axes, known
    ) -> tuple[PartitionSpec | None, ...]:
        """Per result; manual axes, and Auto ones of a mixed mesh, are dropped."""
        one = type(out_sharding) is not tuple
        given = (out_sharding,) if one else out_sharding
        if len(given) > len(ndims):
            rule = f"have at most {len(ndims)} specs, one per result"
            self._refuse(rule, given, "drop the others")
        specs = [getattr(w, "spec", w) for w in given]
        specs += [None] * (len(ndims) - len(specs))
        wanted: list[PartitionSpec | None] = []
        for array, ndim, spec in zip(self.dims.outs, ndims, specs, strict=True):
            if spec is None:
                wanted.append(None)
                continue
            if not isinstance(spec, PartitionSpec):
                got = f"{spec!r} of {type(spec).__name__}"
                rule, remedy = "be PartitionSpecs or None", "write PartitionSpec(...)"
                raise TypeError(message(self.name, "out_sharding", rule, got, remedy))
            dims = per_dim(spec)
            if len(dims) > ndim:
                rule = f"have at most {ndim} dims for {array.name} {array}"
                self._refuse(rule, spec, "name the mesh axes of its own dims")
            if strange := [a for dim in dims for a in dim if known and a not in known]:
                rule = f"name axes of the mesh ({', '.join(sorted(known))})"
                self._refuse(rule, f"{strange[0]!r} in {spec}", "correct the name")
            wanted.append(to_spec(tuple(a for a in d if a in axes) for d in dims))
        return tuple(wanted)

    def _refuse(self, rule: str, got: object, remedy: str):
        raise ValueError(message(self.name, "out_sharding", rule, got, remedy))

    def check(self, avals, attrs: Attrs) -> None:
        """Raises TypeError or ValueError when the operands do not fit the signature."""
        for array, aval in zip(self.dims.ins, avals, strict=True):
            if array.name in self.dtypes:
                check_dtype(self.name, array.name, aval, self.dtypes[array.name])
        self.dims.check([a.shape for a in avals], dict(attrs))

    def concrete(self, wanted: Iterable[str], layout: Layout) -> tuple[str, ...]:
        """Spells declared dims and groups as the dims of one call."""
        groups = {e.name for a in self.dims.ins for e in a.entries if e.group}
        return tuple(
            d
            for name in wanted
            for d in layout.sizes
            if d == name or (name in groups and d.rstrip("0123456789") == name)
        )

    def plan(self, shapes, maps, attrs, specs, want, mesh_shape, ones=False) -> Plan:
        """Decides how the operands and results of one call are cut."""
        layout = self.dims.layout(shapes, maps, attrs)
        plan = Plan.make(
            layout, dict(attrs), self.reduce, mesh_shape, specs, want, ones
        )
        pinned = self.partition(plan) if self.partition else {}
        return plan.assign(self.concrete(self.replicated, layout), pinned)

    def _results(self, shapes, dtypes, attrs: Attrs) -> tuple:
        """Shapes and dtypes of the results, from the reference."""
        bare = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]
        with jax.sharding.use_abstract_mesh(NO_MESH):
            found = jax.eval_shape(
                functools.partial(self.reference, **dict(attrs)), *bare
            )
        layout = self.dims.layout(shapes, (), attrs)
        expected = tuple(layout.shape(dims) for dims in layout.outs)
        if expected != tuple(r.shape for r in found):
            raise TypeError(
                f"{self.name}: the reference returns {[r.shape for r in found]}, the "
                f"signature says {list(expected)}"
            )
        return tuple((r.shape, r.dtype) for r in found)

    def abstract(self, avals, maps, attrs: Attrs, specs=None) -> list:
        """Types of the results: shapes, sharding, manual axes they vary over."""
        bare = bare_types(avals, maps)
        self.check(bare, attrs)
        shapes = tuple(a.shape for a in avals)
        sizes = self.dims.layout(shapes, maps, attrs).sizes
        levels = tuple(sizes[f"map{k}"] for k in range(len(maps)))
        dtypes = tuple(t.dtype for t in bare)
        results = self._cached_results(tuple(t.shape for t in bare), dtypes, attrs)
        # check_vma: results vary wherever an operand does.
        varying = frozenset().union(*(a.mat.varying for a in avals))
        mesh = mesh_of(avals)
        types = []
        for j, (shape, dtype) in enumerate(results):
            whole = PartitionSpec(*[None] * (len(levels) + len(shape)))
            types.append(
                ShapedArray(
                    (*levels, *shape),
                    dtype,
                    sharding=NamedSharding(mesh, specs[j] if specs else whole),
                    manual_axis_type=ManualAxisType(varying=varying),
                )
            )
        return types


def check_dtype(where: str, name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises TypeError for an array, or its type, of no allowed dtype."""
    names = [np.dtype(t).name for t in allowed]
    if value.dtype.name not in names:
        rule = f"be {' or '.join(names)}"
        raise TypeError(message(where, name, rule, value.dtype, "cast it first"))


def check_arrays(where: str, **operands: Any) -> None:
    """Raises TypeError for operands that are no arrays, and for narrowed float64.

    Args:
        where: op or function that received them.
        **operands: by name.

    Raises:
        TypeError: JAX knows no type of an operand, or it is float64 without x64.
    """
    for name, value in operands.items():
        try:
            jax.typeof(value)
        except TypeError:
            got = f"{repr(value)[:60]} of {type(value).__name__}"
            remedy = "convert it with jnp.asarray(value, dtype)"
            raise TypeError(message(where, name, "be an array", got, remedy)) from None
    check_float64(where, **operands)


def _make_primitive(op: KernelOp) -> Primitive:
    """The op as users see it; at lowering the mesh decides how it is cut."""
    p = Primitive(f"te_{op.name}")
    p.multiple_results = True
    prim_requires_devices_during_lowering.add(p)

    @functools.lru_cache(None)  # a new jit per call would compile every eager call
    def jitted(**params):
        return jax.jit(functools.partial(p.bind, **params))

    p.def_impl(lambda *args, **params: jitted(**params)(*args))

    @p.def_abstract_eval
    def _(*avals, maps, attrs, impl, want):
        mesh, specs = mesh_of(avals), None
        if axes_of(mesh, AxisType.Explicit):
            shapes = tuple(a.shape for a in avals)
            given = [a.sharding.spec for a in avals]
            plan = op.plan(shapes, maps, attrs, given, want, mesh.shape, ones=True)
            specs = plan.out_specs()
        return op.abstract(avals, maps, attrs, specs)

    def no_derivative(*_, **__):
        raise TypeError(
            f"{op.name}: an op has no derivative; call the function whose custom_vjp "
            "pairs it with its backward op"
        )

    mlir.register_lowering(p, functools.partial(_lowering.lower, op))
    batching.primitive_batchers[p] = functools.partial(_batching.batch, op)
    ad.primitive_jvps[p] = no_derivative
    return p


def cotangent_like(ct, primal):
    """Gives a custom_vjp's cotangent the type of its primal.

    Args:
        ct: the cotangent.
        primal: the primal, or its type.

    Returns:
        ``ct`` summed over the manual axes on which the primal does not vary, in the
        primal's Explicit sharding and dtype.
    """
    have = jax.typeof(ct)
    need = primal if isinstance(primal, ShapedArray) else jax.typeof(primal)
    if extra := have.mat.varying - need.mat.varying:
        ct = lax.psum(ct, tuple(sorted(extra)))
    sharded = axes_of(need.sharding.mesh, AxisType.Explicit)
    if have.sharding != need.sharding and sharded:
        ct = jax.sharding.reshard(ct, need.sharding)
    return ct.astype(need.dtype)
