"""Uploads on a full disk, simulated by the kernel's limit on a file's size."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.documents.incoming_file import IncomingFile, remove_stale, scratch_file
from rag_service.errors import StorageUnavailable, TooLarge

LIMIT = 4096


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RAG_SERVICE_LIMITS_MAX_BYTES", "1000000")
    return load_settings()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let no file grow beyond LIMIT bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def folder(settings: Settings) -> Path:
    found = settings.data_dir / "incoming"
    found.mkdir(parents=True, exist_ok=True)
    return found


def upload(settings: Settings, *chunks: bytes) -> None:
    with IncomingFile(settings, folder(settings)) as file:
        for chunk in chunks:
            file.write(chunk)
        file.finish()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("size", [LIMIT + 1, 200_000])
def test_a_full_disk_is_named_and_the_file_is_removed(settings: Settings, size: int) -> None:
    with pytest.raises(StorageUnavailable, match="File too large") as caught:
        upload(settings, b"x" * size)
    assert caught.value.retryable
    assert list((settings.data_dir / "incoming").iterdir()) == []


@pytest.mark.usefixtures("full_disk")
def test_another_error_is_not_hidden_by_the_full_disk(settings: Settings) -> None:
    with pytest.raises(TooLarge, match=r"limits\.max_bytes \(1000000 bytes\)"):
        upload(settings, b"x" * (LIMIT + 1), b"x" * 1_000_000)
    assert list((settings.data_dir / "incoming").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(settings: Settings) -> None:
    settings.data_dir.write_text("a file in its place")
    with pytest.raises(StorageUnavailable, match="Not a directory"):
        IncomingFile(settings, settings.data_dir / "incoming")
    scratch = scratch_file(settings.data_dir / "incoming")
    with pytest.raises(StorageUnavailable, match="Not a directory"), scratch:
        pass


def test_only_files_that_no_process_writes_are_swept(settings: Settings) -> None:
    """By the file system's clock: those of a killed process are old and not locked."""
    where = folder(settings)
    left, young = where / "upload-left", where / "upload-young"
    for path in (left, young):
        path.touch()
    with IncomingFile(settings, where) as slow:
        for path in (left, slow.path):
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - 3600))
        assert remove_stale(where) == 1
        assert set(where.iterdir()) == {young, slow.path}
    assert remove_stale(where / "absent") == 0
