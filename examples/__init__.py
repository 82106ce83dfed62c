"""Runnable examples of te_flax, one folder each."""
