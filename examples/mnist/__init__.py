"""Handwritten digits with FP8 dense layers: ``python examples/mnist/train.py``."""
