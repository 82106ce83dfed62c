"""Flax NNX modules: parameters, and one call into functional."""
