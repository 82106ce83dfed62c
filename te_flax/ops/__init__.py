"""Fused ops: one declaration each, with its reference in pure JAX."""
