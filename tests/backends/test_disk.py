"""Kernels on disk: found by the next process, not trusted when they are not ours."""

import os

import pytest
from _fake import TARGET, Filed, X, configure, text

import te_flax as te
from te_flax.backends import disk, register_backend, registry
from te_flax.ops.amax import AMAX


def run() -> Filed:
    """A process of its own: nothing is remembered but what is on disk."""
    registry._entries.clear()
    registry._targets.clear()
    backend = Filed()
    register_backend(backend, ("amax",))
    with te.kernels("amax=jit"):
        assert TARGET in text(AMAX, X)
    assert len(backend.named) == 1
    return backend


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "jit").glob("*"))


def test_a_second_process_builds_nothing(tmp_path):
    first = run()
    assert len(first.built) == 1
    (file,) = kept(tmp_path)
    assert file.name.startswith(TARGET)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    second = run()
    assert not second.built
    assert "1 config: 1 from disk" in registry.describe("amax", "cpu")[1]


@pytest.mark.parametrize("size", [0, 3, 40])
def test_a_truncated_file_is_replaced(tmp_path, caplog, size):
    run()
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert run().built
    assert "be a kernel of this user, got a damaged one" in caplog.text
    assert kept(tmp_path)[0].read_bytes() == whole
    assert not run().built


def test_a_file_that_does_not_load_is_replaced(tmp_path):
    run()
    (file,) = kept(tmp_path)
    file.unlink()
    other = tmp_path / file.name
    other.write_bytes(b"something else")
    assert disk.keep(other) == file
    backend = run()
    assert (len(backend.built), backend.loads) == (1, 2)


def test_a_folder_of_someone_else_is_not_used(tmp_path, monkeypatch, caplog):
    run()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 4711)
        assert run().built
    assert "be a folder that this user alone can write, got one of user" in caplog.text
    assert not run().built


def test_a_folder_or_file_that_others_can_write_is_not_used(tmp_path, caplog):
    run()
    (file,) = kept(tmp_path)
    file.chmod(0o622)
    assert run().built
    file.parent.chmod(0o770)
    assert run().built
    assert "got mode 770" in caplog.text


def test_a_folder_that_others_can_replace_is_not_used(tmp_path, caplog):
    run()
    base = tmp_path / "cache"
    assert base.stat().st_mode & 0o777 == 0o700
    base.chmod(0o777)
    assert run().built
    assert "got one in a folder of mode 777" in caplog.text
    base.chmod(0o1777)
    assert not run().built


def test_a_link_of_someone_else_is_not_followed(tmp_path, monkeypatch, caplog):
    run()
    (tmp_path / "cache" / "jit").rename(tmp_path / "kernels")
    (tmp_path / "cache" / "jit").symlink_to(tmp_path / "kernels")
    assert not run().built
    if os.getuid() == 0:
        os.lchown(tmp_path / "cache" / "jit", 4711, -1)
        assert run().built
        assert "got one of user 4711" in caplog.text


def test_a_folder_that_cannot_be_read_costs_nothing_but_time(
    tmp_path, monkeypatch, caplog
):
    def locked(*_):
        raise PermissionError("no search permission")

    with monkeypatch.context() as patch:
        patch.setattr(disk.Path, "exists", locked)
        assert run().built
    assert "no search permission" in caplog.text


def test_without_a_folder_kernels_are_built_in_every_process(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "cache").write_text("a file")
    assert run().built
    assert run().built
    assert "be a folder that this user alone can write" in caplog.text


def test_a_disk_that_takes_no_file_costs_nothing_but_time(
    tmp_path, monkeypatch, caplog
):
    def full(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(disk.Path, "replace", full)
        assert run().built
    assert not kept(tmp_path)
    assert "take a kernel, got no space left" in caplog.text


def test_switched_off(tmp_path, monkeypatch):
    configure(monkeypatch, jit_cache="0")
    assert run().built
    assert run().built
    assert not (tmp_path / "cache").exists()


def test_ensure_loads_by_name(tmp_path):
    name = run().named[0]
    registry._entries.clear()
    registry._targets.clear()
    backend = Filed()
    register_backend(backend, ("amax",))
    te.backends.ensure([name, name])
    assert backend.named == [name]
    assert run().loads == 1


@pytest.mark.parametrize("name", ["../kernel", "/tmp/kernel", 3])
def test_ensure_takes_no_path(tmp_path, name):
    run()
    kept(tmp_path)[0].rename(tmp_path / "cache" / "kernel.k")
    with pytest.raises(ValueError, match="ensure: names must be a kernel on disk in"):
        te.backends.ensure([name])
