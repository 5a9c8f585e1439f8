"""What commands write."""

import json

import pytest

from rag_service.cli.output import print_json, print_table


def test_columns_are_aligned_and_lines_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    print_table(("id", "file"), [("1", "a.pdf"), (None, "請求書.pdf"), ("22222", long)])
    assert capsys.readouterr().out.splitlines() == [
        "id     file", "1      a.pdf", "       請求書.pdf", f"22222  {long}",
    ]  # fmt: skip


def test_wide_letters_count_as_two(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("file", "id"), [("請求書", "1"), ("abcdef", "2")], to_stderr=True)
    assert capsys.readouterr().err.splitlines() == ["file    id", "請求書  1", "abcdef  2"]


def test_no_cell_speaks_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("file",), [("a\x1b[31m\nb",)])
    assert capsys.readouterr().out == "file\na [31m b\n"


def test_an_empty_table_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id",), [])
    assert capsys.readouterr().out == ""


def test_json_is_one_line_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"file": "請求書\n", "none": None})
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"file": "請求書\n", "none": None}
    assert "請求書" in line
