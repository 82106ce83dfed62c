"""Every KernelOp through one contract: sizes, jit, vmap, meshes, errors.

Where an op has a handler, whatever runs by default equals the reference bit for bit;
the GEMMs, which have none here, are held to float64. Of the fused ops a few variants
stand for all (tests/ops/test_fused.py has the others): their h is held to float64, the
rest to the quantizers applied to that h.
"""

import functools
import importlib
import itertools
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _meshes import FAST, MESHES, SOME, A, E, P, collectives, gathered, mesh, placed
from _operands import (
    PLATFORM,
    attributes,
    compiled,
    gemm_oracle,
    groups,
    main_operand,
    operands,
    reductions,
    reference,
    same,
)
from _variants import CONTRACT, HANDLERS, check
from jax.sharding import AxisType

import te_flax.ops
from te_flax.ops._choice import kernels
from te_flax.ops._lowering import why_reference
from te_flax.ops._op import KernelOp
from te_flax.ops.gemm import GEMMS
from te_flax.testing.numerics import close_to, gemm_bound

for module in pkgutil.iter_modules(te_flax.ops.__path__):
    importlib.import_module(f"te_flax.ops.{module.name}")

OPS = {
    n: op
    for n, op in sorted(KernelOp.registry.items())
    if n[:5] != "test_" and (op.handler not in HANDLERS or n in CONTRACT)
}
VARIANT = {op.name: variant for variant, op in GEMMS.items()}
SIZES = (1, 19, 111, 1024)
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
each = pytest.mark.parametrize("name", OPS)


def agree(op, attrs, arrays, got):
    """Compares with the reference bit for bit, or with float64."""
    if op.name in CONTRACT:
        check(op, attrs, arrays, got)
    elif op.name in VARIANT:
        orientation, scaling, bias = VARIANT[op.name]
        k_ndim = attrs["k_ndim"]
        exact, size = gemm_oracle(
            orientation, arrays, k_ndim=k_ndim, scaling=scaling, bias=bias
        )
        lhs = arrays[0]
        ks = lhs.shape[-k_ndim:] if orientation[0] == "n" else lhs.shape[:k_ndim]
        k = int(np.prod(ks))
        close_to(got[0], exact, gemm_bound(size, k, exact, got[0].dtype, terms=3))
    else:
        same(got, reference(op, tuple(sorted(attrs.items())))(*arrays))


@each
def test_dtypes_and_sizes(name):
    """Every dtype with every odd size along each group, and an empty batch."""
    op = OPS[name]
    dtypes = op.dtypes[op.dims.ins[main_operand(op)].name]
    pairs = [*zip(SIZES, (1024, 111, 19, 1), strict=True), (0, 33)]
    if op.handler is None and name not in VARIANT:  # the reference against itself
        pairs = pairs[::2]
    for i, dtype in enumerate(t for t in dtypes if t != jnp.float64):
        attrs = attributes(op, i)
        calls = [operands(op, groups((m,), (k,), (5,)), dtype, attrs) for m, k in pairs]
        call = functools.partial(op, **attrs)
        got = compiled(lambda calls, call=call: [call(*c) for c in calls])(calls)
        if name in VARIANT or name in CONTRACT:
            wants = [None] * len(calls)
        else:
            plain = functools.partial(op.reference, **attrs)
            with jax.default_device(jax.devices("cpu")[0]):
                wants = compiled(lambda calls, f=plain: [f(*c) for c in calls])(calls)
        for arrays, result, want in zip(calls, got, wants, strict=True):
            if want is None:
                agree(op, attrs, arrays, result)
            else:
                same(result, want)


@each
def test_native_by_name(name):
    """A handler that was asked for runs, eagerly too; otherwise an error says so."""
    op, attrs = OPS[name], attributes(OPS[name])
    arrays = operands(op, groups((3, 5), (40,)), None, attrs)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    with kernels(f"{name}=native"):
        if why_reference(op, PLATFORM, avals, attrs, "native"):
            with pytest.raises(NotImplementedError, match=f"{name}=native was asked"):
                op(*arrays, **attrs)
            return
        text = jax.jit(functools.partial(op, **attrs)).lower(*arrays).as_text()
        assert f"te_flax.{op.handler}" in text
        agree(op, attrs, arrays, op(*arrays, **attrs))
    with kernels(f"{name}=reference"):
        text = jax.jit(functools.partial(op, **attrs)).lower(*arrays).as_text()
        assert "te_flax." not in text


@each
def test_vmap(name):
    """A batch of every single operand, and of all of them."""
    op, attrs, n = OPS[name], attributes(OPS[name]), 2
    arrays = operands(op, groups((4,), (40,)), None, attributes(op))
    count = len(arrays)
    masks = [tuple(i == j for i in range(count)) for j in range(count)]
    masks = list(dict.fromkeys([*masks, (True,) * count]))

    def batched(mask):
        more = operands(op, groups((4,), (40,)), None, attrs, seed=1)
        pairs = zip(arrays, more, mask, strict=True)
        return [np.stack([a, b]) if on else a for a, b, on in pairs]

    def apply(f, every):
        axes = [tuple(0 if on else None for on in mask) for mask in masks]
        return [jax.vmap(f, ax)(*a) for a, ax in zip(every, axes, strict=True)]

    every = [batched(mask) for mask in masks]
    got = compiled(lambda e: apply(functools.partial(op, **attrs), e))(every)
    plain = functools.partial(op.reference, **attrs)
    with jax.default_device(jax.devices("cpu")[0]):
        wants = compiled(lambda e: apply(plain, e))(every)
    for mask, call, results, want in zip(masks, every, got, wants, strict=True):
        entries = [
            [a[i] if on else a for a, on in zip(call, mask, strict=True)]
            for i in range(n)
        ]
        if name in VARIANT or name in CONTRACT:
            for i in range(n):
                agree(op, attrs, entries[i], [r[i] for r in results])
            continue
        if op.batch and op.batch(lambda *_: (), call, mask, attrs):
            # One scale for the whole batch is one statistic.
            *rest, amax = want
            want = (*rest, np.broadcast_to(np.max(amax, 0), amax.shape))
        same(results, want)


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
    """Equal to one device; the only collective is the reduction of a result."""
    op, on = OPS[name], MESHES[kind]
    arrays, attrs, plan = _sharded(op, on, (("dp",), ("tp",)))
    call = functools.partial(op, **attrs)
    got, found, _ = _compiled(call, on, plan.in_specs(), arrays)
    agree(op, attrs, arrays, got)
    reduces = reductions(op, plan)
    # A mixed mesh: axis by axis.
    steps = sum(len(axes) if "mixed" in kind else 1 for _, axes in reduces)
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
    """Inside shard_map the bare kernel runs on the shard."""
    op, on = OPS[name], mesh(kind, kind)
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


@each
def test_wrong_dtype(name):
    op = OPS[name]
    for i, array in enumerate(op.dims.ins):
        if array.name not in op.dtypes:
            continue
        arrays = operands(op, groups((4,), (40,)), None, attributes(op))
        arrays[i] = np.ones(arrays[i].shape, np.int16)
        allowed = " or ".join(np.dtype(t).name for t in op.dtypes[array.name])
        text = f"{name}: {array.name} must be {allowed}, got int16; cast it first"
        with pytest.raises(TypeError, match=re.escape(text)):
            op(*arrays, **attributes(op))


@each
def test_wrong_shape(name):
    """Every dim that an operand shares with an earlier one, and every literal."""
    op, seen = OPS[name], set()
    for i, array in enumerate(op.dims.ins):
        arrays = operands(op, groups((4,), (40,)), None, attributes(op))
        for at, e in enumerate(array.entries):
            if e.literal is None and e.name not in seen:
                continue
            shape = list(arrays[i].shape)
            shape[at] += 1
            wrong = [*arrays[:i], np.ones(shape, arrays[i].dtype), *arrays[i + 1 :]]
            text = f"{name}: {array.name} must have {e} = "
            with pytest.raises(ValueError, match=re.escape(text)):
                op(*wrong, **attributes(op))
        seen |= {e.name for e in array.entries}


@each
def test_wrong_call(name):
    op, attrs = OPS[name], attributes(OPS[name])
    arrays = operands(op, groups((4,), (40,)), None, attributes(op))
    with pytest.raises(TypeError, match=f"{name}: call must be "):
        op(*arrays[:-1], **attrs)
    with pytest.raises(TypeError, match=f"{name}: call must be "):
        op(*arrays, **attrs, surprise=1)
    for key in attrs:
        with pytest.raises(TypeError, match=f"{name}: {key} must be of type"):
            op(*arrays, **{**attrs, key: object()})
    if "k_ndim" in attrs:
        with pytest.raises(ValueError, match=f"{name}: .* must have"):
            op(*arrays, **{**attrs, "k_ndim": 9})
        with pytest.raises(ValueError, match=f"{name}: k_ndim must be >= 0, got -1"):
            op(*arrays, **{**attrs, "k_ndim": -1})
        for value in (True, np.int64(1)):
            with pytest.raises(TypeError, match=f"{name}: k_ndim must be of type int"):
                op(*arrays, **{**attrs, "k_ndim": value})
    for i, array in enumerate(op.dims.ins):
        for value in ([1.0, 2.0], None, "text"):
            wrong = [*arrays[:i], value, *arrays[i + 1 :]]
            text = f"{name}: {array.name} must be an array, got .* of "
            text += f"{type(value).__name__}; convert it with jnp.asarray"
            with pytest.raises(TypeError, match=text):
                op(*wrong, **attrs)
    if arrays[0].dtype == np.float32:
        with pytest.raises(TypeError, match="jax_enable_x64 is off, got float64"):
            op(arrays[0].astype(np.float64), *arrays[1:], **attrs)
        with pytest.raises(TypeError, match=f"{name}: an op has no derivative"):
            jax.jvp(
                lambda x: op(x, *arrays[1:], **attrs)[0], (arrays[0],), (arrays[0],)
            )


@each
def test_cases(name):
    """The named cases fit the signature."""
    op = OPS[name]
    assert op.cases
    for case in op.cases:
        types = map(jax.ShapeDtypeStruct, case.shapes, case.dtypes)
        results = jax.eval_shape(functools.partial(op, **case.attrs), *types)
        assert len(results) == len(op.dims.outs)
