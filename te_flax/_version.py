"""The version of te_flax: pyproject.toml and the compiled modules read it here."""

__version__ = "0.1.0"
