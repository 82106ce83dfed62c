"""Norms, and a norm fused with the linear layer behind it."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import te_flax as te
from te_flax.testing.numerics import close_to
from tests._models import Block, at, data, model

RULES = [("*", None), ("blocks/*", te.Fuse("norm", "wi"))]


NORMS = {
    "layernorm": lambda r: nnx.LayerNorm(16, epsilon=1e-3, rngs=r),
    "plain": lambda r: nnx.LayerNorm(16, use_bias=False, use_scale=False, rngs=r),
    "rmsnorm": lambda r: nnx.RMSNorm(16, epsilon=1e-3, rngs=r),
}


def _close(got, want):
    """Sums of 16 terms: 16 + 8 roundings of each of the two, on values below 8."""
    close_to(got, np.asarray(want, np.float64), 2 * 24 * 2.0**-24 * 8)


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_replaced_and_come_back(name):
    norm, x = NORMS[name](nnx.Rngs(0)), data(4, 16)
    converted = te.convert(norm)
    assert type(converted).__name__ == type(norm).__name__
    assert type(converted) is not type(norm)
    assert converted.scale is norm.scale
    assert getattr(converted, "bias", None) is getattr(norm, "bias", None)
    _close(converted(x), norm(x))
    assert nnx.graphdef(te.revert(converted)) == nnx.graphdef(norm)


def test_another_variance_is_reported():
    net = nnx.List([nnx.LayerNorm(4, use_fast_variance=f, rngs=nnx.Rngs(0))
                    for f in (True, False)])  # fmt: skip
    rows = te.report(te.convert(net), file=io.StringIO()).rows
    assert rows[0].why == (
        "it has no GEMM; its variance is not nnx's fast, less exact one"
    )
    assert rows[1].why == "it has no GEMM"


REFUSED = {
    "its reduction_axes is (1, 2)": {"reduction_axes": (1, 2)},
    "its feature_axes is 0": {"feature_axes": 0},
    "it has axis_name": {"axis_name": "batch"},
    "it has axis_index_groups": {"axis_index_groups": ((0, 1),)},
    "its promote_dtype is not": {"promote_dtype": lambda a, dtype=None: a},
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("kind", [nnx.LayerNorm, nnx.RMSNorm])
def test_norms_that_cannot_be_honoured(kind, reason):
    norm = kind(16, **REFUSED[reason], rngs=nnx.Rngs(0))
    converted = te.convert(nnx.List([norm]))
    assert type(converted[0]) is kind
    (row,) = te.report(converted, file=io.StringIO()).rows
    assert row.why.startswith(f"not converted: {reason}")


def test_a_pair_is_fused_with_the_same_variables():
    plain, x = model(), data(2, 8, 16)
    fused = te.convert(plain, RULES)
    block, layer = plain.blocks[0], fused.blocks[0].wi
    assert type(layer) is te.LayerNormDenseGeneral
    assert layer.norm.scale is block.norm.scale
    assert layer.norm.bias is block.norm.bias
    assert layer.norm.epsilon == block.norm.epsilon
    assert layer.kernel is block.wi.kernel
    assert type(fused.blocks[0].wo) is te.DenseGeneral
    assert fused.blocks[0].norm(x) is x
    # Three layers, and a norm, of at most 33 roundings each, on values below 16.
    got, want = fused.blocks[0](x), block(x)
    close_to(got, np.asarray(want, np.float64), 2 * 4 * 33 * 2.0**-24 * 16)
    paths = {"/".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.state(fused))}
    assert "blocks/0/wi/norm/scale" in paths
    assert "blocks/0/norm/scale" not in paths
    rows = {r.path: r.why for r in te.report(fused, file=io.StringIO()).rows}
    assert rows["blocks/0/norm"] == "fused into wi"


def test_a_fused_pair_comes_back():
    plain, x = model(), data(2, 8, 16)
    fused = te.convert(plain, RULES)
    for net in (fused, nnx.merge(*nnx.split(fused))):
        reverted = te.revert(net)
        assert nnx.graphdef(reverted) == nnx.graphdef(plain)
        assert (reverted(x) == plain(x)).all()
        assert reverted.blocks[1].norm.scale is plain.blocks[1].norm.scale
    part = te.revert(fused.blocks[0])
    assert (part(x) == plain.blocks[0](x)).all()
    with pytest.raises(ValueError, match="revert: model must hold wi beside"):
        te.revert(nnx.List([fused.blocks[0].norm]))


def test_rms_norm_and_options():
    plain = nnx.Dict(norm=nnx.RMSNorm(4, rngs=nnx.Rngs(0)),
                     wi=nnx.LinearGeneral(4, 8, rngs=nnx.Rngs(0)))  # fmt: skip
    recipe = te.MXFP8BlockScaling()
    fused = te.convert(plain, [("", te.Fuse("norm", "wi", recipe))])
    assert fused["wi"].recipe == recipe
    assert isinstance(fused["wi"].norm, te.RMSNorm)
    x = data(2, 4)
    with te.autocast(enabled=False):
        _close(fused["wi"](fused["norm"](x)), plain["wi"](plain["norm"](x)))


class Parallel(nnx.Module):
    """One norm in front of two layers."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.query = nnx.Linear(16, 4, rngs=rngs)
        self.key = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        return self.query(x) * self.key(x)


def test_one_norm_in_front_of_two_layers():
    plain, x = Parallel(nnx.Rngs(0)), data(4, 16)
    fused = te.convert(plain, [("", te.Fuse("norm", n)) for n in ("query", "key")])
    assert fused.query.norm.scale is fused.key.norm.scale is plain.norm.scale
    close_to(fused(x), np.asarray(plain(x), np.float64), 4 * 50 * 2.0**-24 * 64)
    assert nnx.graphdef(te.revert(fused)) == nnx.graphdef(plain)


def test_later_rules_and_counts_undo_a_fusion():
    skipped = te.convert(model(), [*RULES, ("blocks/0/wi", "skip")])
    assert type(skipped.blocks[0].wi) is nnx.Linear
    assert type(skipped.blocks[0].norm) is te.LayerNorm
    assert type(skipped.blocks[1].wi) is te.LayerNormDenseGeneral
    first = te.convert(model(), RULES, skip_first=2)
    assert type(first.blocks[0].wi) is nnx.Linear
    assert type(first.blocks[0].norm) is te.LayerNorm


def _pair(norm, linear):
    return nnx.Dict(n=norm, w=linear)


def _linear(features=16, **options):
    return nnx.LinearGeneral(features, 4, **options, rngs=nnx.Rngs(0))


def _norm(**options):
    return nnx.LayerNorm(16, **options, rngs=nnx.Rngs(0))


PAIRS = {
    "n is a nnx.LinearGeneral": lambda: _pair(_linear(), _linear()),
    "w is a nnx.LayerNorm": lambda: _pair(_norm(), _norm()),
    "n cannot be replaced: it has axis_name": lambda: _pair(
        _norm(axis_name="b"), _linear()
    ),
    "w cannot be replaced: it has a batch_axis": lambda: _pair(
        _norm(), _linear(batch_axis={0: 2})
    ),
    "the norm has no scale": lambda: _pair(_norm(use_scale=False), _linear()),
    "contracts other axes": lambda: _pair(_norm(), _linear(axis=1)),
    "they differ in the number of features": lambda: _pair(_norm(), _linear(8)),
    "they differ in dtype": lambda: _pair(_norm(dtype=jnp.bfloat16), _linear()),
}


@pytest.mark.parametrize("reason", PAIRS)
def test_pairs_that_cannot_be_fused(reason):
    with pytest.raises(ValueError, match=r"te\.Fuse must name layers") as error:
        te.convert(PAIRS[reason](), [("*", te.Fuse("n", "w"))])
    assert f"n and w: {reason}" in str(error.value).replace("the linear layer ", "")


def test_the_fused_model_runs_in_the_block():
    fused = te.convert(Block(nnx.Rngs(0)), [("", te.Fuse("norm", "wi"))])
    assert type(at(fused, "wi")) is te.LayerNormDenseGeneral
    assert type(fused.wo) is nnx.LinearGeneral
