"""Lowering: the kernel of one shard per platform, and the mesh modes around it."""

import functools
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding

from te_flax.backends.registry import Kernel
from te_flax.ops import _extension, _jit, _sizes
from te_flax.ops._partition import partitioned
from te_flax.ops._plan import axes_of, bare_types, mesh_of

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp

PLATFORMS = ("cpu", "cuda")
_TYPED = {float: np.float32, int: np.int64, bool: np.bool_, str: str}


def make_leaf(op: "KernelOp") -> Primitive:
    """Makes the primitive of the kernel on one shard: platforms only, no sharding."""
    leaf = Primitive(f"te_{op.name}_shard")
    leaf.multiple_results = True

    @leaf.def_abstract_eval
    def _(*avals, maps, attrs, impl):
        return op.abstract(avals, maps, attrs)

    mlir.register_lowering(leaf, functools.partial(_reference, op, "this platform"))
    for platform in PLATFORMS:
        rule = functools.partial(_native, op, platform)
        mlir.register_lowering(leaf, rule, platform=platform)
    return leaf


def why_reference(op: "KernelOp", platform: str, avals, attrs, impl: str) -> str | None:
    """Returns why the handler does not run here, or None if it does.

    Args:
        op: the op.
        platform: "cpu" or "cuda".
        avals: types of the operands; None asks what holds for all.
        attrs: the static attributes.
        impl: "auto" also asks what is faster.
    """
    if impl == "auto" and op.prefers_reference is not None:
        why = op.prefers_reference(platform, *(avals or ()), **dict(attrs))
        if why:
            return why
    if impl == "auto" and avals and (why := _sizes.why(op.name, platform, avals)):
        return why
    if op.handler is None:
        return "the op has no handler"
    if not _extension.has(op.handler, platform):
        return _extension.why_not(op.handler, platform)
    if op.supports is not None and avals is not None:
        return op.supports(*avals, **dict(attrs))
    return None


def _reference(op, platform, ctx, *args, maps, attrs, impl, why=None):
    if impl in ("native", "jit"):
        why = why or f"none is built for {platform}"
        raise NotImplementedError(
            f"{op.name}: {op.name}={impl} was asked for, but {why}; "
            f"use te.kernels('{op.name}=auto') or reference"
        )
    fn = functools.partial(op.reference, **dict(attrs))
    for level in reversed(maps):  # the outermost level comes first
        fn = jax.vmap(fn, in_axes=tuple(0 if m else None for m in level))
    # Lowering can run inside jax.set_mesh(<Explicit mesh>): arrays that jnp code makes
    # would carry that mesh. Trace in the operands' own.
    with jax.sharding.use_abstract_mesh(mesh_of(ctx.avals_in)):
        call = mlir.lower_fun(lambda *a: tuple(fn(*a)), multiple_results=True)
        return call(ctx, *args)


def _native(op, platform, ctx, *args, maps, attrs, impl):
    types = bare_types(ctx.avals_in, maps)
    kernel = _jit.find(op, platform, ctx, types, attrs, impl)
    if kernel is None or isinstance(kernel, str):
        why = (
            kernel if impl == "jit" else why_reference(op, platform, types, attrs, impl)
        )
        if why or impl == "reference":
            params = {"maps": maps, "attrs": attrs, "impl": impl, "why": why}
            return _reference(op, platform, ctx, *args, **params)
    if maps:
        call = mlir.lower_fun(
            functools.partial(_loop, op, maps, attrs, impl), multiple_results=True
        )
        return call(ctx, *args)
    if isinstance(kernel, Kernel):
        return _jit.lower(op, kernel, ctx, *args)
    typed = {k: _typed(v) for k, v in (*attrs, *op.handler_attrs.items())}
    operands = [a.name for a in op.dims.ins]
    results = [a.name for a in op.dims.outs]
    aliases = {operands.index(i): results.index(o) for i, o in op.aliases.items()}
    rule = jax.ffi.ffi_lowering(
        f"te_flax.{op.handler}", operand_output_aliases=aliases or None
    )
    outs = list(ctx.avals_out)
    if platform == "cuda" and op.workspace is not None:
        size = op.workspace(*ctx.avals_in, **dict(attrs))
        outs.append(ShapedArray((size,), np.dtype(np.uint8)))
    if op.unit_dims:
        ctx, args = _without_unit_dims(op, ctx, args, attrs)
    return rule(ctx.replace(avals_out=outs), *args, **typed)[: len(op.dims.outs)]


def _without_unit_dims(op, ctx, args, attrs):
    layout = op.dims.layout(tuple(a.shape for a in ctx.avals_in), (), attrs)

    def squeeze(*arrays):
        found = []
        for array, dims, x in zip(op.dims.ins, layout.ins, arrays, strict=True):
            dim = op.unit_dims.get(array.name)
            unit = dim is not None and layout.sizes[dim] == 1
            found.append(lax.squeeze(x, (dims.index(dim),)) if unit else x)
        return tuple(found)

    avals = [
        ShapedArray(a.shape, a.dtype)
        for a in jax.eval_shape(squeeze, *bare_types(ctx.avals_in, ()))
    ]
    args = mlir.lower_fun(squeeze, multiple_results=True)(ctx, *args)
    return ctx.replace(avals_in=avals), args


def _typed(value):
    if isinstance(value, tuple):
        return np.asarray(value, np.int64)
    return _TYPED[type(value)](value)


def _loop(op, maps, attrs, impl, *args):
    """The handler once per entry of every vmap level that joined no group."""
    if not maps:
        return op.leaf.bind(*args, maps=(), attrs=attrs, impl=impl)
    level = maps[0]

    def one(mapped):
        entry = iter(mapped)
        picked = [next(entry) if m else a for m, a in zip(level, args, strict=True)]
        return tuple(_loop(op, maps[1:], attrs, impl, *picked))

    return lax.map(one, [a for m, a in zip(level, args, strict=True) if m])


def lower(op: "KernelOp", ctx, *args, maps, attrs, impl, want):
    """Lowers ``op.primitive``: the mesh of the operands decides how it is cut."""
    avals, mesh = ctx.avals_in, mesh_of(ctx.avals_in)
    explicit, manual = (axes_of(mesh, k) for k in (AxisType.Explicit, AxisType.Manual))
    auto = tuple(a for a in axes_of(mesh, AxisType.Auto) if mesh.shape[a] > 1)
    impl = _partly_manual(op, mesh, explicit, auto, manual, impl)
    shapes = tuple(a.shape for a in avals)
    dtypes = tuple(a.dtype for a in ctx.avals_out)

    def shard(plan, *arrays):
        """The kernel on one shard; without a plan, on the whole operands."""
        local = attrs
        if plan is not None:
            arrays = tuple(plan.enter(arrays))
            if op.localize:
                arrays, changed = op.localize(plan, arrays, dict(attrs))
                local = tuple(sorted(changed.items()))
        return op.leaf.bind(*arrays, maps=maps, attrs=local, impl=impl)

    if explicit:
        specs = [a.sharding.spec for a in avals]
        plan = op.plan(shapes, maps, attrs, specs, want, mesh.shape)
        inner = None
        if auto:  # once more, for the axes that are left
            bare = (None,) * len(want)
            inner = functools.partial(
                op.primitive.bind, maps=maps, attrs=attrs, impl=impl, want=bare
            )
        fn = _in_shard_map(op, mesh, auto, plan, shard, inner, attrs, dtypes)
    elif impl == "reference" or (mesh.axis_names and not auto) or 0 in sum(shapes, ()):
        fn = functools.partial(shard, None)
    else:
        ctx, full = _auto_view(op, ctx, mesh, auto, manual)
        sizes = [mesh.shape[a] for a in auto]
        fn = partitioned(op, shapes, maps, attrs, shard, dtypes, sizes, full)
    with _jit.program(ctx):
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *args)


def _partly_manual(op, mesh, explicit, auto, manual, impl: str) -> str:
    """Returns the implementation that a partly manual mesh leaves, or refuses it."""
    order = mesh.axis_names.index
    if manual and explicit and auto and order(explicit[0]) < order(manual[-1]):
        raise NotImplementedError(
            f"{op.name}: manual axes {manual}, Explicit {explicit}, Auto {auto}: "
            "nesting shard_map against the mesh order aborts the process in XLA (plain "
            "JAX too); make the Auto axes Explicit"
        )
    # With two Auto axes the partitioner renames them (an operand split by c arrives as
    # split by a) and a collective would sum over the wrong devices: XLA partitions the
    # reference. One Auto axis cannot be confused.
    if manual and not explicit and len(auto) > 1:
        if impl in ("native", "jit"):
            raise NotImplementedError(
                f"{op.name}: {op.name}={impl} inside a shard_map that leaves the axes "
                f"{auto} Auto; make all but one of them manual or Explicit"
            )
        return "reference"
    return impl


def _in_shard_map(op, mesh, auto, plan, shard, inner, attrs, dtypes):
    """Explicit axes, and Auto ones of size 1: our own shard_map inside the lowering."""
    manual_here = {
        a
        for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual and a not in auto
    }

    def body(*arrays):
        if inner is None:
            return tuple(plan.finish(shard(plan, *arrays), dtypes))
        arrays = tuple(plan.enter(arrays))
        call = inner
        if op.localize:
            arrays, changed = op.localize(plan, arrays, dict(attrs))
            call = functools.partial(inner, attrs=tuple(sorted(changed.items())))
        return tuple(plan.finish(call(*arrays), dtypes))

    def fn(*arrays):  # shard_map wants operands of exactly in_specs; reshard cuts
        placed = [
            jax.sharding.reshard(x, NamedSharding(mesh, s))
            for x, s in zip(arrays, plan.in_specs(), strict=True)
        ]
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=plan.in_specs(),
            out_specs=plan.out_specs(),
            axis_names=manual_here,
            check_vma=False,
        )(*placed)

    return fn


def _auto_view(op, ctx, mesh, auto, manual):
    """The lowering context for custom_partitioning, and the whole mesh or None."""
    context = ctx.module_context.axis_context
    full = context.mesh if manual else None
    devices = full.size if full else getattr(context, "num_devices", 1)
    if ctx.module_context.lowering_parameters.for_export and devices > 1:
        raise NotImplementedError(
            f"{op.name}: a partitioned op cannot be exported from an Auto mesh; "
            "export it under an Explicit mesh (AxisType.Explicit), inside "
            f"jax.shard_map, or with te.kernels('{op.name}=reference')"
        )
    if full is not None:
        # The partitioner shows shardings over the Auto axes only, as a mesh of its own;
        # without this view it hands out GSPMDShardings.
        pick = tuple(slice(None) if n in auto else 0 for n in full.axis_names)
        sub = Mesh(full.devices[pick], auto)
        view = mlir.ShardingContext(
            sub.size, tuple(sub.devices.flat), sub.abstract_mesh
        )
        module = ctx.module_context.replace(axis_context=view)
        ctx = ctx.replace(module_context=module)
    return ctx, full
