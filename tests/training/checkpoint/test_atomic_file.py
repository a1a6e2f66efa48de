"""Files that are replaced at once or not at all."""

import os

import pytest

from unisono_models.training.checkpoint.atomic_file import atomic_path, atomic_write


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a", "old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_that_a_library_writes_is_old_or_new(tmp_path):
    (tmp_path / "a.bin").write_text("old")
    with pytest.raises(TypeError), atomic_path(tmp_path / "a.bin") as temporary:
        temporary.write_text(None)
    assert (tmp_path / "a.bin").read_text() == "old"
    with atomic_path(tmp_path / "a.bin") as first, atomic_path(tmp_path / "a.bin") as second:
        assert first != second and first.parent == tmp_path
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a.bin").read_text() == "first"  # its block ended last
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"] and os.stat(tmp_path / "a.bin").st_mode & 0o777 == 0o644
