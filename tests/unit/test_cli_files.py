"""Which files `ingest` takes from the given paths, and how it reports the others."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_service.cli.input_files import find_files, require_regular
from rag_service.errors import Unreadable


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_folders_give_known_types_sorted_and_no_hidden_files(tmp_path: Path) -> None:
    make(tmp_path, "b.PDF", "a.txt", "c/d.tiff", "c/.e.pdf", ".git/f.pdf", "a.jpeg", "g.webp")
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path]).files]
    assert found == ["a.jpeg", "b.PDF", "g.webp", "c/d.tiff"]


def test_a_named_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    make(tmp_path, ".hidden", "notes.txt")
    named = [tmp_path / "notes.txt", tmp_path / ".hidden"]
    assert find_files(named).files == named


def test_a_file_is_taken_once(tmp_path: Path) -> None:
    make(tmp_path, "a.pdf")
    assert find_files([tmp_path / "a.pdf", tmp_path]).files == [tmp_path / "a.pdf"]


def test_an_empty_folder_gives_nothing(tmp_path: Path) -> None:
    found = find_files([tmp_path])
    assert (found.files, found.refused, found.skipped) == ([], [], [])


def test_skipped_files_are_listed(tmp_path: Path) -> None:
    make(tmp_path, "a.pdf", "notes.txt", "c/table.csv", ".hidden.txt")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    found = find_files([tmp_path])
    assert found.files == [tmp_path / "a.pdf"]
    names = {str(path.relative_to(tmp_path)) for path in found.skipped}
    assert names == {"notes.txt", "c/table.csv", "link"}
    assert found.refused == []


def test_a_file_that_is_not_regular_is_refused_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pdf")
    (tmp_path / "broken.pdf").symlink_to(tmp_path / "nowhere")
    in_folder = find_files([tmp_path])
    assert [one.path.name for one in in_folder.refused] == ["broken.pdf", "pipe.pdf"]
    named = find_files([tmp_path / "pipe.pdf", Path(os.devnull)])
    assert (named.files, len(named.refused)) == ([], 2)
    with pytest.raises(Unreadable, match="not a regular file"):
        require_regular(tmp_path / "pipe.pdf")


def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a.pdf", "closed/b.pdf")
    list_folder = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        # Root may list every folder, so the refusal is simulated.
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = find_files([tmp_path])
    assert found.files == [tmp_path / "a.pdf"]
    [refused] = found.refused
    assert (refused.path, str(refused.error)) == (
        tmp_path / "closed", "Cannot be read: Permission denied.",
    )  # fmt: skip
