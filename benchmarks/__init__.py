"""Benchmarks of te_flax, each run as ``python -m benchmarks.<name>``."""
