"""Every test starts without backends of its own and leaves none behind."""

import pytest

from te_flax.backends import disk, registry


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    from _fake import configure

    configure(monkeypatch, cache=str(tmp_path / "cache"), jit="", jit_warn="")
    for name in ("_registered", "_entries", "_everywhere", "_targets", "_agreed"):
        kept = getattr(registry, name)
        monkeypatch.setattr(registry, name, type(kept)())
    disk.warn.cache_clear()
    yield
    disk.warn.cache_clear()
