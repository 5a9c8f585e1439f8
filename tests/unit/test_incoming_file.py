"""Uploads on a disk that does not take them, made by the kernel's limit on a file's size."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.documents.incoming_file import IncomingFile, scratch_file
from rag_service.errors import StorageUnavailable, TooLarge

ROOM = 4096


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RAG_SERVICE_LIMITS_MAX_BYTES", "1000000")
    return load_settings()


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file may grow beyond ROOM, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def upload(settings: Settings, *chunks: bytes) -> None:
    with IncomingFile(settings) as spool:
        for chunk in chunks:
            spool.write(chunk)
        spool.finish()


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("size", [ROOM + 1, 200_000])
def test_a_full_disk_is_named_and_nothing_is_left_on_it(settings: Settings, size: int) -> None:
    with pytest.raises(StorageUnavailable, match="File too large") as caught:
        upload(settings, b"x" * size)
    assert caught.value.retryable
    assert list((settings.data_dir / "incoming").iterdir()) == []


@pytest.mark.usefixtures("little_room")
def test_an_upload_given_up_for_another_reason_keeps_that_reason(settings: Settings) -> None:
    with pytest.raises(TooLarge, match=r"limits\.max_bytes \(1000000 bytes\)"):
        upload(settings, b"x" * (ROOM + 1), b"x" * 1_000_000)
    assert list((settings.data_dir / "incoming").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(settings: Settings) -> None:
    settings.data_dir.write_text("a file in its place")
    with pytest.raises(StorageUnavailable, match="Not a directory"):
        IncomingFile(settings)
    with pytest.raises(StorageUnavailable, match="Not a directory"), scratch_file(settings):
        pass
