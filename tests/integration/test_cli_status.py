"""`status` and short IDs, with an API in this process and a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from rag_service.errors import CorruptPdf, OcrUnavailable
from rag_service.jobs import live_workers
from rag_service.states import RunState, Stage
from tests.conftest import Api

Make = Callable[..., bytes]
WorkOff = Callable[..., RunState]


def terminal(api: Api, *arguments: str, columns: int = 80) -> tuple[int, list[str]]:
    """Run a command on a terminal; return its exit status and the lines it showed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "rag_service.cli.main", *arguments],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env=environment | {"RAG_SERVICE_URL": api.url, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(timeout=100), shown.decode().splitlines()


def command(api: Api, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rag_service.cli.main", *arguments],
        env=os.environ | {"RAG_SERVICE_URL": api.url},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.fixture
def pile(api: Api, make_pdf: Make, work_off: WorkOff) -> dict[str, str]:
    """Return the IDs of a read, two failed and a waiting document by name."""
    good = api.add(make_pdf("a"), filename=f"{'a long name ' * 9}.pdf")
    work_off("a")
    corrupt = api.add(make_pdf("b"), filename="b.pdf")
    work_off(error=CorruptPdf("The file is damaged."))
    unread = api.add(make_pdf("c"), filename="c.pdf")
    work_off(error=OcrUnavailable("The server did not answer."))
    waiting = api.add(make_pdf("d"), filename="d.pdf")
    return {"good": good, "corrupt": corrupt, "unread": unread, "waiting": waiting}


def test_status_fits_a_terminal_of_80_columns(api: Api, pile: dict[str, str]) -> None:
    status, lines = terminal(api, "status")
    assert status == 0
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    for one in pile.values():
        assert one[:8] in text
        assert one not in text
    assert "corrupt_pdf" in text
    assert "Waiting: 1 document; 1 not opened yet." in text


def test_status_groups_failures_by_cause_with_a_command_that_works(
    api: Api, pile: dict[str, str]
) -> None:
    done = command(api, "status")
    assert "corrupt_pdf\t1\trag-service status --error corrupt_pdf" in done.stdout
    assert "ocr_unavailable\t1\trag-service reprocess --error ocr_unavailable" in done.stdout
    listed = command(api, "status", "--error", "corrupt_pdf").stdout
    assert pile["corrupt"] in listed
    assert pile["unread"] not in listed
    redone = command(api, "reprocess", "--error", "ocr_unavailable").stdout
    assert pile["unread"] in redone
    assert "ocr_unavailable\t" not in command(api, "status").stdout


def test_every_command_accepts_the_first_digits_of_an_id(api: Api, pile: dict[str, str]) -> None:
    short = {name: one[:8] for name, one in pile.items()}
    assert pile["good"] in command(api, "status", short["good"]).stdout
    assert command(api, "show", short["good"]).stdout == command(api, "show", pile["good"]).stdout
    assert "cancelled" in command(api, "cancel", short["waiting"]).stdout
    assert api.get(pile["waiting"])["status"] == "cancelled"
    assert "1 queued" in command(api, "reprocess", short["unread"]).stdout
    assert "deleted" in command(api, "delete", "--yes", short["corrupt"]).stdout
    gone = command(api, "status", short["corrupt"])
    assert gone.returncode == 1
    assert f"No document {short['corrupt']}." in gone.stderr


def test_delete_asks_about_known_documents_only(api: Api, pile: dict[str, str]) -> None:
    unknown = command(api, "delete", pile["good"], "0" * 32)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert f"No document {'0' * 32}." in unknown.stderr
    known = command(api, "delete", pile["good"])
    assert (known.returncode, known.stdout) == (2, "")
    assert "--yes" in known.stderr
    assert api.get(pile["good"])["status"] == "processed"


def test_first_digits_of_several_documents_are_refused_with_the_ids(
    api: Api, make_pdf: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(f"abcd{n}".ljust(32, "0") for n in range(9))
    monkeypatch.setattr("rag_service.documents.intake.new_id", lambda: next(ids), raising=False)
    monkeypatch.setattr("rag_service.database.document_rows.new_id", lambda: next(ids))
    first, second = api.add(make_pdf("a")), api.add(make_pdf("b"))
    done = command(api, "cancel", "abcd")
    assert done.returncode == 2
    assert first in done.stderr
    assert second in done.stderr
    assert "cancelled" in command(api, "cancel", first).stdout


def test_a_wrong_id_is_not_taken_for_first_digits(api: Api, pile: dict[str, str]) -> None:
    for wrong in ("nope", "abc", "ab/cd", pile["good"].upper()):
        done = command(api, "show", wrong)
        assert (done.returncode, done.stdout) == (1, ""), wrong
        assert "No document" in done.stderr, wrong


def test_help_shows_no_type_beside_a_flag(api: Api) -> None:
    for name in ("status", "reprocess", "ingest", "run", "show", "delete", "probe"):
        _, lines = terminal(api, name, "--help")
        assert "<bool>" not in "\n".join(lines), name


def test_status_says_what_is_wrong_with_the_processes(api: Api, pile: dict[str, str]) -> None:
    trouble = "5 processes in a row ended without a result, the last: no descriptors"
    live_workers.heartbeat("prepare@a", Stage.PREPARE, 4, fork_deaths=5, trouble=trouble)
    shown = command(api, "status").stdout
    assert f"prepare_worker: prepare@a: {trouble}" in shown
    assert "maintenance: No heartbeat of maintenance" in shown
    assert max(map(cell_len, terminal(api, "status")[1])) <= 80
