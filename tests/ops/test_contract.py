"""Every KernelOp through one contract: sizes, jit, vmap, errors.

Where an op has a handler, whatever runs by default equals the reference bit for bit;
the GEMMs, which have none here, are held to float64. Of the fused ops a few variants
stand for all (tests/ops/test_fused.py has the others): their h is held to float64, the
rest to the quantizers applied to that h.
"""

import functools
import re

import jax
import numpy as np
import pytest
from _contract import OPS, VARIANT, agree, dtypes, turns
from _operands import PLATFORM, attributes, compiled, groups, operands, same
from _variants import CONTRACT

from te_flax.ops._choice import kernels
from te_flax.ops._lowering import why_reference

SIZES = (1, 19, 111, 1024)
each = pytest.mark.parametrize("name", OPS)


@pytest.mark.parametrize(
    ("name", "i"),
    [
        pytest.param(n, i, marks=mark)
        for n in OPS
        for i, mark in enumerate(turns(n, len(dtypes(n))))
    ],
)
def test_dtypes_and_sizes(name, i):
    """Every dtype with every odd size along each group, and an empty batch.

    Nightly. Else the ops of a family, which is code that they share, take turns.
    """
    op, dtype, attrs = OPS[name], dtypes(name)[i], attributes(OPS[name], i)
    pairs = [*zip(SIZES, (1024, 111, 19, 1), strict=True), (0, 33)]
    if op.handler is None and name not in VARIANT:  # the reference against itself
        pairs = pairs[::2]
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


@pytest.mark.parametrize(
    ("name", "nightly"),
    [(n, False) for n in OPS]
    + [pytest.param(n, True, marks=pytest.mark.slow) for n in OPS],
)
def test_vmap(name, nightly):
    """A batch of all operands, and of every single one as the family takes turns."""
    op, attrs, n = OPS[name], attributes(OPS[name]), 2
    arrays = operands(op, groups((4,), (40,)), None, attrs)
    count = len(arrays)
    masks = [
        tuple(i == j for i in range(count))
        for j, mark in enumerate(turns(name, count))
        if bool(mark) == nightly
    ]
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
