"""The children's log files on the terminal of `up`."""

from pathlib import Path

import pytest

from rag_service.cli.log_follower import LogFollower


def test_what_is_appended_is_shown_under_the_name(
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


def test_a_rotated_file_loses_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "ocr.log"
    log.touch()
    with LogFollower(tmp_path, ["ocr"]):
        log.write_text("old\n")
        log.rename(tmp_path / "ocr.log.1")
        log.write_text("new\n")
    assert [line.split(" | ")[1] for line in capsys.readouterr().err.splitlines()] == ["old", "new"]
