"""A kernel generated at run time as one more lowering of an op's bare primitive."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from te_flax.backends import disk, registry
from te_flax.config import CONFIG
from te_flax.ops._plan import NO_MESH

if TYPE_CHECKING:
    from te_flax.ops._op import KernelOp


def wanted(impl: str) -> bool:
    """Whether the rules, or TE_FLAX_JIT, ask for generated kernels."""
    return impl == "jit" or (impl == "auto" and CONFIG.jit == "1")


def find(
    op: "KernelOp", platform: str, ctx, types, attrs, impl: str
) -> registry.Kernel | str | None:
    """Finds the generated kernel of one call.

    Args:
        op: the op.
        platform: "cpu" or "cuda".
        ctx: of the lowering.
        types: of the operands, without vmap levels.
        attrs: the static attributes.
        impl: what the rules say.

    Returns:
        The kernel; why there is none; None where none is wanted.
    """
    if not wanted(impl):
        return None
    if impl == "auto" and ctx.module_context.lowering_parameters.for_export:
        found = f"an exported program has them by name only: {op.name}=jit"
    elif any(0 in t.shape for t in types):
        found = "there are no elements"
    else:
        shapes = op._cached_results(
            tuple(t.shape for t in types), tuple(t.dtype for t in types), attrs
        )
        results = tuple(jax.ShapeDtypeStruct(*result) for result in shapes)
        given = {**op.handler_attrs, **dict(attrs)}
        kinds, shared = tuple(types), _is_shared(ctx)
        found = registry.resolve(op.name, platform, kinds, results, given, shared)
    if isinstance(found, str) and impl == "auto" and CONFIG.jit_warn == "1":
        disk.warn(f"{op.name}: no kernel is generated at run time: {found}")
    return found


_shared: ContextVar[bool | None] = ContextVar("shared", default=None)


@contextlib.contextmanager
def program(ctx) -> Iterator[None]:
    """Keeps what is known of a program outside of the shard_maps that it lowers to.

    Inside of one over an abstract mesh nothing says which devices it runs on.
    """
    token = _shared.set(_is_shared(ctx))
    try:
        yield
    finally:
        _shared.reset(token)


def _is_shared(ctx) -> bool:
    """Whether other processes run the program too; they must lower the same."""
    if jax.process_count() == 1:
        return False
    known = _shared.get()
    if known is not None:
        return known
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.is_multi_process
    devices = getattr(context, "device_assignment", None)
    mine = jax.process_index()
    return not devices or any(d.process_index != mine for d in devices)


def lower(op: "KernelOp", kernel: registry.Kernel, ctx, *args):
    """Lowers to a call of the kernel, on the shapes that it sees."""
    view = kernel.backend.view(kernel.call)
    results = kernel.call.results
    names = [a.name for a in op.dims.ins], [a.name for a in op.dims.outs]
    aliases = {names[0].index(i): names[1].index(o) for i, o in op.aliases.items()}
    types = [
        jax.ShapeDtypeStruct(shape, t.dtype)
        for shape, t in zip(view.results, results, strict=True)
    ]
    if view.workspace:
        types.append(jax.ShapeDtypeStruct((view.workspace,), np.uint8))

    def call(*arrays):
        # Else XLA may pass a slice as an address inside its operand, at any alignment.
        arrays = jax.lax.optimization_barrier(arrays)
        seen = [x.reshape(s) for x, s in zip(arrays, view.operands, strict=True)]
        made = jax.ffi.ffi_call(kernel.name, types, input_output_aliases=aliases)(*seen)
        pairs = zip(made, results, strict=False)  # the workspace is left out
        return tuple(r.reshape(t.shape) for r, t in pairs)

    bare = ctx.replace(
        avals_in=[ShapedArray(t.shape, t.dtype) for t in kernel.call.operands],
        avals_out=[ShapedArray(t.shape, t.dtype) for t in results],
    )
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return mlir.lower_fun(call, multiple_results=True)(bare, *args)
