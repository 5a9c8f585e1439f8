"""Tables, JSON and text on stdout and stderr."""

import io
import json
import subprocess
import sys

import pytest

from rag_service.cli.output import print_json, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_and_lines_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    long = "x" * 300
    print_table(("id", "file"), [("1", "a.pdf"), (None, "請求書.pdf"), ("22222", long)])
    assert screen.getvalue().splitlines() == [
        "id     file", "1      a.pdf", "       請求書.pdf", f"22222  {long}",
    ]  # fmt: skip


def test_wide_letters_count_as_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    print_table(("file", "id"), [("請求書", "1"), ("abcdef", "2")], to_stderr=True)
    assert screen.getvalue().splitlines() == ["file    id", "請求書  1", "abcdef  2"]


def test_a_pipe_gets_tabs_and_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "file", "error"), [("1", "a\tb.pdf", None), ("22222", "c.pdf", "bad")])
    assert capsys.readouterr().out.splitlines() == [
        "id\tfile\terror", "1\ta b.pdf\t", "22222\tc.pdf\tbad",
    ]  # fmt: skip


def test_control_characters_of_a_cell_are_removed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("file",), [("a\x1b[31m\nb",)])
    assert capsys.readouterr().out == "file\na [31m b\n"


def test_an_empty_table_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id",), [])
    assert capsys.readouterr().out == ""


def test_json_is_one_line_with_unescaped_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"file": "請求書\n", "none": None})
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"file": "請求書\n", "none": None}
    assert "請求書" in line


def test_write_out_returns_false_when_stdout_is_closed() -> None:
    code = (
        "import sys; from rag_service.cli.output import write_out\n"
        "sys.exit(0 if not write_out(['text\\n'] * 100_000) and not sys.stdout.flush() else 9)"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    program.stdout.close()
    _, error_output = program.communicate()
    assert (program.returncode, error_output) == (0, b"")
