"""A transformer encoder for sentences: ``python -m examples.encoder.train``."""
