"""The log files of children as `up` shows them."""

from pathlib import Path

import pytest

from rag_service.cli.log_follower import LogFollower


def test_appended_lines_are_shown_with_the_programs_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ocr.log"
    log.write_text("from an earlier start\n")
    with LogFollower(tmp_path, ["ocr", "api"]), log.open("a") as file:
        file.write("one\ntwo\n")
        file.flush()
        (tmp_path / "api.log").write_text("begins now\n")
    shown = capsys.readouterr().err
    assert "earlier" not in shown
    assert [line.split(" | ") for line in shown.splitlines()] == [
        ["ocr           ", "one"],
        ["ocr           ", "two"],
        ["api           ", "begins now"],
    ]


def test_no_line_of_a_rotated_file_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "ocr.log"
    log.touch()
    with LogFollower(tmp_path, ["ocr"]):
        log.write_text("old\n")
        log.rename(tmp_path / "ocr.log.1")
        log.write_text("new\n")
    assert [line.split(" | ")[1] for line in capsys.readouterr().err.splitlines()] == ["old", "new"]
