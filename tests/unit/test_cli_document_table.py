"""The table of documents: it fits a terminal, and is whole in a pipe and with --wide."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from rag_service.cli.document_table import Found, print_documents
from rag_service.knowledgebase.views import ErrorView, PageCounts, RunView, WarningView
from rag_service.states import RunState, WaitingFor
from tests.views import view

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=120)
ERROR = ErrorView(code="remote_result_missing", message="Long sentence. " * 9, retryable=True)


@st.composite
def documents(draw: st.DrawFn) -> list[Found]:
    found: list[Found] = []
    for one in draw(st.lists(IDS, min_size=1, max_size=6, unique_by=lambda one: one[:8])):
        pages = PageCounts(total=5000, done=draw(st.integers(0, 5000)), failed=0)
        error = draw(st.sampled_from([None, ERROR]))
        shown = draw(st.sampled_from([RunState.FAILED, RunState.PROCESSED, RunState.PREPARING]))
        run = RunView(id="r", status=shown, error=error, pages=pages)
        waits = draw(st.sampled_from([None, WaitingFor.OCR_SERVER, WaitingFor.QUEUE]))
        warned = draw(st.integers(0, 9))
        warnings = [WarningView(code="page_truncated", message="x", page=n) for n in range(warned)]
        changes = {"waiting_for": waits, "queue_position": 9999 if waits else None}
        known = view(
            RunState.FAILED, id=one, filename=draw(NAMES), latest_run=run, warnings=warnings,
            incomplete=draw(st.booleans()), **changes,
        )  # fmt: skip
        found.append((one, draw(st.sampled_from([known, None]))))
    return found


def printed(
    found: list[Found],
    capsys: pytest.CaptureFixture[str],
    *,
    width: int = 80,
    tty: bool = True,
    wide: bool = False,
) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: tty)
        patch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((width, 24)))
        print_documents(found, wide=wide)
    return capsys.readouterr().out.splitlines()


@given(found=documents(), width=st.integers(80, 200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], found: list[Found], width: int
) -> None:
    lines = printed(found, capsys, width=width)
    assert len(lines) == len(found) + 1
    assert max(map(cell_len, lines)) <= width
    for (document_id, _), line in zip(found, lines[1:], strict=True):
        first = line.split()[0]
        assert document_id.startswith(first)
        assert [one for one, _ in found if one.startswith(first)] == [document_id]


def test_a_narrow_table_keeps_status_pages_and_error_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = RunView(
        id="r", status=RunState.FAILED, error=ERROR, pages=PageCounts(total=9, done=4, failed=1)
    )
    known = view(RunState.FAILED, id="ab" * 16, filename="long name " * 9 + ".pdf", latest_run=run)
    [head, line] = printed([(known.id, known)], capsys)
    assert head.split() == ["id", "file", "status", "pages", "note"]
    assert line.startswith("abababab  long name")
    for text in ("…", "failed", "3/9, 1 failed", "remote_result_missing"):
        assert text in line


@pytest.mark.parametrize(("tty", "wide"), [(False, False), (True, True), (False, True)])
def test_a_pipe_and_wide_get_everything(
    capsys: pytest.CaptureFixture[str], tty: bool, wide: bool
) -> None:
    run = RunView(id="r", status=RunState.FAILED, error=ERROR, pages=PageCounts(total=9))
    known = view(RunState.FAILED, id="ab" * 16, filename="x" * 90 + ".pdf", latest_run=run)
    [_, line] = printed([(known.id, known)], capsys, tty=tty, wide=wide)
    assert known.id in line
    assert known.filename in line
    assert ERROR.message.strip() in line


def test_similar_ids_keep_more_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = ["0123456789" + "a" * 22, "0123456789" + "b" * 22]
    found: list[Found] = [(one, view(id=one, filename="f" * 90)) for one in ids]
    lines = printed(found, capsys)
    assert [line.split()[0] for line in lines[1:]] == ["0123456789a", "0123456789b"]


def test_an_unknown_document_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([("n" * 40, None), ("a" * 32, view(id="a" * 32, filename="x" * 90))], capsys)
    assert "not found" in lines[1]
