"""Recipes, the context that chooses one, and the FP8 state."""
