"""Which files `ingest` takes from the paths it is given."""

from pathlib import Path

from rag_service.cli.files import find_files


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_folders_give_known_kinds_sorted_and_nothing_hidden(tmp_path: Path) -> None:
    make(tmp_path, "b.PDF", "a.txt", "c/d.tiff", "c/.e.pdf", ".git/f.pdf", "a.jpeg", "g.webp")
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])]
    assert found == ["a.jpeg", "b.PDF", "g.webp", "c/d.tiff"]


def test_a_named_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    make(tmp_path, ".hidden", "notes.txt")
    named = [tmp_path / "notes.txt", tmp_path / ".hidden"]
    assert find_files(named) == named


def test_a_file_is_taken_once(tmp_path: Path) -> None:
    make(tmp_path, "a.pdf")
    assert find_files([tmp_path / "a.pdf", tmp_path]) == [tmp_path / "a.pdf"]


def test_an_empty_folder_gives_nothing(tmp_path: Path) -> None:
    assert find_files([tmp_path]) == []
