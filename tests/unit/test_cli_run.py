"""The table of `run`: each file has a row."""

from pathlib import Path

import pytest

from rag_service.cli.run import _Input, _report, labelled
from rag_service.errors import EmptyFile
from rag_service.knowledgebase.views import PageCounts
from tests.views import view


def test_files_with_equal_names_get_different_labels_and_a_file_is_taken_once() -> None:
    files = [Path("a/x.pdf"), Path("b/x.pdf"), Path("b/y.pdf"), Path("a/x.pdf")]
    assert [label for _, label in labelled(files)] == ["a/x.pdf", "b/x.pdf", "y.pdf"]


def rows(sent: list[_Input], capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    _report(sent)
    head, *lines = [line.split("\t") for line in capsys.readouterr().err.splitlines()]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_files_with_equal_bytes_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (_Input(Path(name), name, id="d", view=view()) for name in ("x.pdf", "same.pdf"))
    assert [(row["file"], row["id"]) for row in rows([one, two], capsys)] == [
        ("x.pdf", "d"), ("same.pdf", "d"),
    ]  # fmt: skip


def test_the_pages_of_a_row_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    pages = PageCounts(total=6, done=6, native=1, ocr=1, blank=1, no_text=1, truncated=1, failed=1)
    sent = [
        _Input(Path("a.pdf"), "a.pdf", id="d", view=view(pages=pages)),
        _Input(Path("b.pdf"), "b.pdf", error=EmptyFile()),
    ]
    good, refused = rows(sent, capsys)
    kinds = ("native", "ocr", "blank", "no_text", "truncated", "failed")
    assert [good[kind] for kind in kinds] == ["1"] * 6
    assert (refused["status"], refused["failed"]) == ("refused", "")


def test_rare_page_states_have_a_column_only_if_needed(capsys: pytest.CaptureFixture[str]) -> None:
    pages = PageCounts(total=3, done=3, native=2, truncated=1)
    [row] = rows([_Input(Path("a.pdf"), "a.pdf", id="d", view=view(pages=pages))], capsys)
    assert set(row) >= {"native", "ocr", "blank", "truncated"}
    assert {"no_text", "failed"}.isdisjoint(row)
