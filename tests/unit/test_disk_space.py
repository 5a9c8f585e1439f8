"""A disk is low if it is short of bytes or of inodes."""

import os
from types import SimpleNamespace

import pytest

from rag_service.config.loader import load_settings
from rag_service.monitoring import disk_space

SPACE = {"f_bavail": 1 << 20, "f_blocks": 1 << 20, "f_bfree": 1 << 20, "f_frsize": 4096}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RAG_SERVICE_STORAGE_MIN_FREE_BYTES", "1")
    return load_settings()


def disk(monkeypatch, files, free):
    found = SimpleNamespace(f_files=files, f_favail=free, f_fsid=7, **SPACE)
    monkeypatch.setattr(disk_space.os, "statvfs", lambda _: found)


@pytest.mark.parametrize(("files", "free", "is_low"), [
    (1_000_000, 9_999, True), (1_000_000, 0, True), (1_000_000, 10_000, False),
    # A file system that makes inodes as it needs them.
    (0, 0, False),
])  # fmt: skip
def test_a_disk_without_inodes_is_low(settings, tmp_path, monkeypatch, files, free, is_low):
    disk(monkeypatch, files, free)
    low = list(disk_space.low_disks(settings, tmp_path / "documents"))
    # One disk, one sentence.
    assert len(low) == is_low
    if is_low:
        assert f"Only {free} more files fit" in low[0]


def test_this_disk_is_read(settings):
    assert os.statvfs(settings.data_dir).f_bsize > 0
    assert list(disk_space.low_disks(settings, None)) == []
