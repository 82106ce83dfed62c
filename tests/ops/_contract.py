"""The ops under contract, which of their calls run nightly only, and the comparison."""

import importlib
import pkgutil
import re

import jax.numpy as jnp
import numpy as np
import pytest
from _operands import gemm_oracle, main_operand, reference, same
from _variants import CONTRACT, HANDLERS, check

import te_flax.ops
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


def dtypes(name):
    """Of the operand that is data, without float64."""
    op = OPS[name]
    found = op.dtypes[op.dims.ins[main_operand(op)].name]
    return [t for t in found if t != jnp.float64]


def _family(name):
    """What computes the op: its handler and scaling, or the reference of its kind."""
    op, (_, scaling, _) = OPS[name], VARIANT.get(name, (None,) * 3)
    return op.handler or re.split("_(row|col)", name)[0], scaling


def turns(name, count):
    """Per case of ``count`` no mark, or "slow": the ops of a family share them out."""
    family = [n for n in OPS if _family(n) == _family(name)]
    step = min(len(family), count)
    own = family.index(name) % step
    return [() if i % step == own else pytest.mark.slow for i in range(count)]


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
