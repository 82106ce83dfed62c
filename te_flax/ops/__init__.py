"""Fused ops: one declaration each, with its reference in pure JAX."""

from te_flax.ops import activation as activation  # declared: kernels() knows its ops
from te_flax.ops import norm as norm
