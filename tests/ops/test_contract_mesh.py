"""The contract on meshes of every kind: one device's results, and no more collectives.

Of the fused ops a few variants stand for all, as in tests/ops/test_contract.py.
"""

import functools
import itertools

import jax
import pytest
from _contract import OPS, VARIANT, agree
from _meshes import FAST, MESHES, SOME, A, E, P, collectives, gathered, mesh, placed
from _operands import attributes, main_operand, operands, reductions
from jax.sharding import AxisType

FULL = (  # one of each family on every mesh; the others take turns
    "act_bwd_mxfp8_rowcol_h_dbias",
    "amax",
    "dequantize",
    "dequantize_mxfp8_row",
    "gemm_nn_bias",
    "gemm_tn_mxfp8",
    "norm_bwd_layernorm_mxfp8_rowcol_h",
    "quantize_mxfp8_rowcol",
    "quantize_rowcol",
)
TURN = {name: i for i, name in enumerate(OPS)}  # a variant's noop is the next one


def _cut(op, spec):
    """Groups and mesh axes of a sharded call: the first dims of the first groups."""
    first = [e.name for e in op.dims.ins[main_operand(op)].entries]
    if op.name in VARIANT:
        return {"B": ((8, 16), spec[0]), "K": ((64,), ()), "N": ((32,), spec[1])}
    if first[0] == "B":  # histories
        return {"B": ((8, 16), spec[0]), "H": ((40,), ())}
    if len(first) == 1:
        return {first[0]: ((8, 128, 256), spec[0])}
    return {"M": ((8, 128), spec[0]), "K": ((512,), spec[1])}


def _sharded(op, on, spec, empty=False):
    """The call's operands, attributes and the plan for operands cut by ``spec``."""
    attrs, cut = attributes(op), _cut(op, spec)
    if empty:
        first = next(iter(cut))
        cut[first] = ((0, *cut[first][0][1:]), cut[first][1])
    arrays = operands(op, {g: size for g, (size, _) in cut.items()}, None, attrs)
    static = tuple(sorted(attrs.items()))
    layout = op.dims.layout(tuple(a.shape for a in arrays), (), static)
    given = {f"{g}0": axes for g, (_, axes) in cut.items()}
    specs = [
        P(*[given.get(d, ()) or None if isinstance(d, str) else None for d in dims])
        for dims in layout.ins
    ]
    shapes = tuple(a.shape for a in arrays)
    bare = (None,) * len(layout.outs)
    return arrays, attrs, op.plan(shapes, (), static, specs, bare, on.shape)


def _compiled(f, on, specs, arrays, context=True):
    with jax.set_mesh(on):
        args = placed(on, specs, arrays)
        executable = jax.jit(f).lower(*args).compile(FAST)
        return executable(*args), collectives(executable), gathered(executable)


def meshes(name):
    """All of them, or Auto and another one in turn: the sharding is the family's."""
    return MESHES if name in FULL else ("auto", SOME[TURN[name] % len(SOME)])


def manual(name, partly):
    """Whether it is this variant's turn to run inside a shard_map that is (partly)."""
    return (TURN[name] + TURN[name] // 2) % 2 == partly


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in OPS for k in meshes(n)],
)
def test_sharded(name, kind):
    check_sharded(name, MESHES[kind])


def check_sharded(name, on):
    """Equal to one device; the only collective is the reduction of a result."""
    op = OPS[name]
    arrays, attrs, plan = _sharded(op, on, (("dp",), ("tp",)))
    call = functools.partial(op, **attrs)
    got, found, _ = _compiled(call, on, plan.in_specs(), arrays)
    agree(op, attrs, arrays, got)
    reduces = reductions(op, plan)
    mixed = len(set(on.axis_types)) > 1  # axis by axis
    steps = sum(len(axes) if mixed else 1 for _, axes in reduces)
    assert found == ({"all-reduce": steps} if reduces else {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (n, k)
        for n, k in itertools.product(FULL, ("auto", "explicit"))
        if (n[:4], k) != ("act_", "explicit")
    ],
)
def test_empty_on_a_mesh(name, kind):
    """An operand without elements, cut along the dim of size 0.

    Only there: JAX cannot read an empty result of any program that is cut elsewhere.
    Nor does it compile a shard_map, as of an Explicit mesh, of two empty operands only.
    """
    op, on = OPS[name], MESHES[kind]
    arrays, attrs, plan = _sharded(op, on, (("dp",), ()), empty=True)
    call = functools.partial(op, **attrs)
    got, *_ = _compiled(call, on, plan.in_specs(), arrays)
    agree(op, attrs, arrays, got)


def _inside(op, attrs, plan):
    """The op inside a shard_map, reduced as the op itself would be."""

    def f(*arrays):
        results = op(*arrays, **attrs)
        return tuple(plan.finish(results, [r.dtype for r in results]))

    return f


@pytest.mark.parametrize(
    ("name", "kind", "vma"),
    [
        (n, k, v)
        for n, k, v in itertools.product(OPS, (A, E), (True, False))
        if n in FULL or ((k, v) == (A, True) and manual(n, False))
    ],
)
def test_manual(name, kind, vma):
    check_manual(name, mesh(kind, kind), vma)


def check_manual(name, on, vma):
    """Inside shard_map the bare kernel runs on the shard."""
    op = OPS[name]
    arrays, attrs, plan = _sharded(op, on, (("dp",), ("tp",)))
    f = jax.shard_map(
        _inside(op, attrs, plan),
        mesh=on,
        in_specs=plan.in_specs(),
        out_specs=plan.out_specs(),
        check_vma=vma,
    )
    got, found, _ = _compiled(f, on, plan.in_specs(), arrays)
    agree(op, attrs, arrays, got)
    reduces = len(reductions(op, plan))
    assert found == ({"all-reduce": reduces} if reduces else {})


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        (n, k, s)
        for n, k, s in itertools.product(OPS, (A, E), ((4, 2), (8, 1), (1, 8)))
        if n in FULL or ((k, s) == (A, (4, 2)) and manual(n, True))
    ],
)
def test_partly_manual(name, kind, shape):
    """dp is manual, tp is left to the op.

    An Explicit tp costs what it costs any program: JAX may gather what enters and
    leaves such a shard_map (``lambda x: 2 * x`` too), each array of a dp shard once.
    """
    op, on = OPS[name], mesh(kind, kind, shape=shape)
    arrays, attrs, plan = _sharded(op, on, (("dp",), ()))
    f = jax.shard_map(
        _inside(op, attrs, plan),
        mesh=on,
        in_specs=plan.in_specs(),
        out_specs=plan.out_specs(),
        axis_names={"dp"},
        check_vma=kind == AxisType.Explicit,
    )
    _, _, both = _sharded(op, on, (("dp",), ("tp",)))
    got, found, sizes = _compiled(f, on, both.in_specs(), arrays)
    agree(op, attrs, arrays, got)
    border = [s for s in (*both.in_specs(), *both.out_specs()) if "tp" in str(s)]
    most = len(border) if kind == AxisType.Explicit and 1 not in shape else 0
    assert found.pop("all-gather", 0) <= most  # all of them up to jax 0.10
    reduces = sum(len(axes) for _, axes in reductions(op, both))  # dp here, tp in op
    assert found == ({"all-reduce": reduces} if reduces else {})
    assert max(sizes, default=0) <= max(a.size for a in arrays) // shape[0]
