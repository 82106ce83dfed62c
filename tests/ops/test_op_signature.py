"""Signatures: the grammar, and errors that name operand and dimension."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from _rmsnorm import RMS_BWD, RMS_FWD, rmsnorm

from te_flax.ops._dims import Block, Signature
from te_flax.ops._op import KernelOp


def signature(text, groups=None):
    return Signature("op", text, groups or {})


def test_layout_of_groups_blocks_and_literals():
    text = "x: M.. K.. k, s: K../32 M.. -> y: K.. M.., e: M../32 k, a: 2"
    s = signature(text, {"K": "n"})
    layout = s.layout(((4, 5, 6, 7, 8), (2, 4, 5)), (), (("n", 2),))
    assert layout.ins == (
        ("M0", "M1", "K0", "K1", "k"),
        (Block(("K0", "K1"), 32), "M0", "M1"),
    )
    assert layout.outs == (
        ("K0", "K1", "M0", "M1"),
        (Block(("M0", "M1"), 32), "k"),
        (2,),
    )
    assert layout.sizes == {"M0": 4, "M1": 5, "K0": 6, "K1": 7, "k": 8}
    assert [layout.shape(d) for d in layout.outs] == [(6, 7, 4, 5), (1, 8), (2,)]
    assert layout.shape(layout.ins[1]) == (2, 4, 5)
    assert layout.blocks_of("M0") == {Block(("M0", "M1"), 32)}


def test_layout_of_vmap_levels():
    s = signature("x: M.. k, g: k -> y: M.. k")
    maps = ((True, False), (True, True))
    layout = s.layout(((2, 3, 4, 5), (3, 5)), maps, ())
    assert layout.ins == (("map0", "map1", "M0", "k"), ("map1", "k"))
    assert layout.outs == (("map0", "map1", "M0", "k"),)
    assert layout.sizes == {"map0": 2, "map1": 3, "M0": 4, "k": 5}


def test_blocks_over_a_dim_and_the_group_behind_it():
    text = "x: M.. A K.. -> s: M.. A+K../32, t: A+K../32, u: M../32 A K.."
    s = signature(text, {"K": "n"})
    layout = s.layout(((4, 2, 5, 9),), (), (("n", 2),))
    block = Block(("A", "K0", "K1"), 32)
    assert layout.ins == (("M0", "A", "K0", "K1"),)
    assert layout.outs[:2] == (("M0", block), (block,))
    assert [layout.shape(d) for d in layout.outs] == [(4, 3), (3,), (1, 2, 5, 9)]
    assert layout.blocks_of("A") == layout.blocks_of("K1") == {block}
    assert layout.blocks_of("M0") == {Block(("M0",), 32)}
    assert str(s.outs[0]) == "[M.. A+K../32]"
    with pytest.raises(TypeError, match="is no dim"):
        signature("x: M.. A K.. -> s: A+K..", {"K": "n"})
    with pytest.raises(TypeError, match=re.escape("no operand defines B+K../32 of s")):
        signature("x: M.. K.. -> s: M.. B+K../32", {"K": "n"})


@pytest.mark.parametrize(
    ("text", "groups", "shapes", "attrs", "error"),
    [
        ("x: M.. k, g: k -> y: k", {}, ((2, 8), (7,)), {},
         "op: g must have k = 8 like x, got 7 in shape (7,); g has dims [k]"),
        ("x: M.. k, g: k -> y: k", {}, ((), (7,)), {},
         "op: x must have at least 1 dims [M.. k], got shape (); reshape it"),
        ("x: M.. k, g: k -> y: k", {}, ((2, 8), (7, 1)), {},
         "op: g must have 1 dims [k], got shape (7, 1); reshape it"),
        ("x: M.. k, y: M.. -> z: k", {}, ((2, 3, 8), (2, 4)), {},
         "op: y must have M.. = (2, 3) like x, got (2, 4) in shape (2, 4)"),
        ("x: M.. K.., y: K.. -> z: M..", {"K": "n"}, ((2, 3), (3,)), {"n": 3},
         "op: x must have at least 3 dims [M.. K..], got shape (2, 3); with n=3"),
        ("x: M.. K.., y: K.. -> z: M..", {"K": "n"}, ((2, 3), (3,)), {"n": -1},
         "op: n must be >= 0, got -1; it counts the dims of K.."),
        ("x: k, s: k/32 -> z: k", {}, ((40,), (1,)), {},
         "op: s must have k/32 = 2 (one per 32 of k = 40 of x), got 1 in shape (1,)"),
        ("x: M.. A K.., s: A+K../32 -> z:", {"K": "n"}, ((3, 2, 40), (2,)), {"n": 1},
         "op: s must have A+K../32 = 3 (one per 32 of K = (2, 40) of x), got 2"),
        ("s: M../32, x: M.. k -> z: k", {}, ((2,), (2, 16, 3)), {},
         "op: s must have M../32 = 1 (one per 32 of M = (2, 16) of x), got 2"),
        ("n: 1, x: k -> z: k", {}, ((2,), (3,)), {},
         "op: n must have 1 = 1, got 2 in shape (2,); n has dims [1]"),
    ],
)  # fmt: skip
def test_misfits(text, groups, shapes, attrs, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        signature(text, groups).check(shapes, attrs)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x: k", "must be 'operands -> results'"),
        ("x: k? -> y: k", "'k?' in 'x: k?' is no dim"),
        ("x: map -> y: map", "'map' in 'x: map' is no dim"),
        ("x k -> y: k", "'x k' is no 'name: dims'"),
        ("x: A.. B.. -> y: A..", "leaves"),
        ("x: k -> y: j", "no operand defines j of y"),
        ("x: k/32 -> y: k/32", "no operand defines k/32 of x"),
    ],
)
def test_declarations_that_cannot_be(text, error):
    with pytest.raises(TypeError, match=re.escape(error)):
        signature(text)


def test_a_result_without_a_dim_says_how_it_is_reduced():
    with pytest.raises(TypeError, match=r"result y lacks .*'k'.*give reduce="):
        KernelOp(name="test_bad", signature="x: k -> y:", reference=lambda x: (x[0],))
    assert "test_bad" not in KernelOp.registry


def test_a_name_is_taken_once():
    with pytest.raises(TypeError, match="declared already"):
        KernelOp(name="amax", signature="x: k -> y: k", reference=lambda x: (x,))


def test_the_reference_must_keep_its_word():
    op = KernelOp(
        name="test_liar", signature="x: k -> y: k", reference=lambda x: (x[:1],)
    )
    try:
        with pytest.raises(
            TypeError, match=r"the reference returns .*the signature says"
        ):
            op(np.ones(3, np.float32))
    finally:
        del KernelOp.registry["test_liar"]


def test_errors_name_the_operand():
    x, gamma = jnp.ones((8, 16, 128)), jnp.ones(128)
    for f, kind, text in (
        (lambda: rmsnorm(x, gamma[:31]), ValueError,
         "test_rmsnorm_fwd: gamma must have h = 128 like x, got 31 in shape (31,)"),
        (lambda: rmsnorm(x, x), ValueError,
         "test_rmsnorm_fwd: gamma must have 1 dims [h], got shape (8, 16, 128)"),
        (lambda: RMS_BWD(x, x[:2], gamma, x[..., 0]), ValueError,
         "test_rmsnorm_bwd: x must have B.. = (8, 16) like dy, got (2, 16)"),
        (lambda: RMS_FWD(x.astype(int), gamma, eps=1e-6), TypeError,
         "x must be float32 or bfloat16 or float16, got int32; cast it first"),
        (lambda: RMS_FWD(x, gamma), TypeError,
         "test_rmsnorm_fwd: call must be (x, gamma, *, eps), got 2 arrays and []"),
        (lambda: RMS_FWD(x, gamma, eps="1"), TypeError,
         "test_rmsnorm_fwd: eps must be of type float, got '1' of str"),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(text)):
            f()


def test_attributes_keep_their_type():
    x, gamma = jnp.ones((2, 4)), jnp.ones(4)
    assert RMS_FWD(x, gamma, eps=1)[0].shape == (2, 4)  # an int serves as a float
    with pytest.raises(TypeError, match="eps must be of type float, got True of bool"):
        RMS_FWD(x, gamma, eps=True)
