"""The command line as a user runs it: real processes, embedded servers, real documents."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pymupdf
import pytest

from rag_service.config.option_list import PREFIXES
from rag_service.embedded.folder import free_port

# The limit only ends a broken test: it leaves time for a machine that is busy with other work.
PATIENCE = 240.0
SETTING_PREFIXES = (*PREFIXES, "DATABASE_URL", "REDIS_URL")
COMMAND = [str(Path(sys.executable).with_name("rag-service"))]
PROSE = (
    "The keeper of the cold store was not at home when they came to the door in the evening,",
    "and so they had to wait for an hour by the side of the road with all of their goods.",
)
WORDS = ("Delivery note 4471", "Twelve crates of apples", "Received in good order")

pytestmark = pytest.mark.timeout(600)


def environment(**changes: str) -> dict[str, str]:
    """Return this environment without settings of the service, so that all servers are embedded."""
    bare = {
        name: value for name, value in os.environ.items() if not name.startswith(SETTING_PREFIXES)
    }
    return bare | {"OMP_NUM_THREADS": "2"} | changes


def cli(
    *arguments: object, env: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip


def objects(done: subprocess.CompletedProcess[str]) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def native_pdf(*, pages: int = 2, password: str | None = None, title: str = "Agreement") -> bytes:
    document = pymupdf.open()
    for number in range(1, pages + 1):
        page = document.new_page()
        page.insert_text((72, 72), f"{title} part {number}", fontsize=20)
        for line, text in enumerate(PROSE * 3):
            page.insert_text((72, 110 + 16 * line), text, fontsize=11)
    if password is None:
        return document.tobytes()
    encryption = pymupdf.PDF_ENCRYPT_AES_256
    return document.tobytes(encryption=encryption, user_pw=password, owner_pw=password)


def scan_png(*words: str) -> bytes:
    page = pymupdf.open().new_page(width=420, height=300)
    for line, text in enumerate(words or WORDS):
        page.insert_text((40, 70 + 50 * line), text, fontsize=22)
    return page.get_pixmap(dpi=110).tobytes("png")


def photo_png() -> bytes:
    """Return a picture without any text."""
    page, rng = pymupdf.open().new_page(width=300, height=300), random.Random(1)
    for _ in range(60):
        colour = [rng.random() for _ in range(3)]
        centre = (rng.uniform(0, 300), rng.uniform(0, 300))
        page.draw_circle(centre, rng.uniform(20, 80), fill=colour, color=colour)
    return page.get_pixmap(dpi=100).tobytes("png")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a PDF that has text, a scan, and a file that is neither."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "agreement.pdf").write_bytes(native_pdf())
    (folder / "note.png").write_bytes(scan_png())
    (folder / "broken.pdf").write_text("this is no PDF")
    return folder


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The folder for temporary files. `run` must leave it empty."""
    folder = tmp_path / "t"
    folder.mkdir(mode=0o755)
    return folder


def test_run_processes_files_and_leaves_no_temporary_file(files: Path, temporary: Path) -> None:
    # A module of this name in the current folder must not be imported.
    (files / "workers.py").write_text("raise SystemExit('not these workers')")
    done = cli(
        "run", "agreement.pdf", "note.png", env=environment(TMPDIR=str(temporary)), cwd=files
    )
    assert done.returncode == 0, done.stderr
    agreement, _, note = done.stdout.partition("<!-- document: note.png, processed -->")
    assert agreement.startswith("<!-- document: agreement.pdf, processed -->")
    assert agreement.index("<!-- page 1 -->") < agreement.index("Agreement part 1")
    assert agreement.index("<!-- page 2 -->") < agreement.index("Agreement part 2")
    assert "cold store was not at home" in agreement
    assert "Twelve crates of apples" in note
    records = [line.split() for line in done.stderr.splitlines()[-2:]]
    assert [(record[0], *record[2:6]) for record in records] == [
        ("agreement.pdf", "processed", "2", "0", "0"),
        ("note.png", "processed", "0", "1", "0"),
    ]
    assert list(temporary.iterdir()) == []


def test_run_continues_after_a_bad_file_and_writes_into_a_folder(
    files: Path, tmp_path: Path
) -> None:
    output, password = tmp_path / "out", tmp_path / "password"
    password.write_text("sesame\n")
    (files / "locked.pdf").write_bytes(native_pdf(password="sesame", title="Locked"))
    same = files / "more" / "locked.pdf"
    same.parent.mkdir()
    same.write_bytes((files / "locked.pdf").read_bytes())
    done = cli(
        "run", "--ocr", "off", "--format", "json", "--output", output,
        "--password-file", password, files / "broken.pdf", files / "locked.pdf", same,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "unsupported_type" in done.stderr
    written = sorted(output.iterdir())
    assert [path.name for path in written] == ["locked-2.json", "locked.json"]
    second, first = (json.loads(path.read_text()) for path in written)
    assert second["document"]["id"] == first["document"]["id"]
    assert second["document"]["filename"] == str(same)
    assert f"\n{same}\t" in done.stderr
    assert "no worker" not in done.stderr
    assert first["document"]["status"] == "processed", first
    assert [page["status"] for page in first["pages"]] == ["native", "native"]
    assert "Locked part 2" in first["pages"][1]["markdown"]


def test_a_worker_that_ends_at_its_start_ends_run_with_its_last_log_lines(
    files: Path, tmp_path: Path, temporary: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.orig_argv[-2:] == ['worker', 'prepare']:\n"
        "    os.write(2, b'the paint is not dry\\n')\n"
        "    os._exit(1)\n"
    )
    done = cli(
        "run", "--ocr", "off", files / "agreement.pdf",
        env=environment(PYTHONPATH=str(broken), TMPDIR=str(temporary)),
    )  # fmt: skip
    assert done.returncode == 3
    assert "prepare ended at its start" in done.stderr
    assert "the paint is not dry" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(temporary.iterdir()) == []


def test_an_interrupted_run_stops_what_it_started(
    files: Path, temporary: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        program = subprocess.Popen(
            [*COMMAND, "run", files / "note.png"],
            env=environment(TMPDIR=str(temporary)), stdout=subprocess.DEVNULL, stderr=output,
        )  # fmt: skip
    wait_until(lambda: "note.png: " in log.read_text() or program.poll() is not None)
    family = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(signal.SIGINT)
    assert program.wait(PATIENCE) == 130, log.read_text()
    assert len(family) >= 5
    assert not any(process.is_running() for process in family)
    assert list(temporary.iterdir()) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Up:
    """`rag-service up` over one data folder."""

    def __init__(self, folder: Path) -> None:
        ports = {"API": free_port(), "FLOWER": free_port(), "CPU_OCR": free_port()}
        self.url = f"http://127.0.0.1:{ports['API']}"
        self.flower = f"http://127.0.0.1:{ports['FLOWER']}"
        self.log = folder / "up.log"
        self.env = environment(
            RAG_SERVICE_DATA_DIR=str(folder / "data"),
            RAG_SERVICE_URL=self.url,
            **{f"RAG_SERVICE_{name}_PORT": str(port) for name, port in ports.items()},
        )

    def start(self) -> None:
        with self.log.open("w") as output:
            self.program = subprocess.Popen([*COMMAND, "up"], env=self.env, stderr=output)
        wait_until(lambda: "The service is up" in self.text or self.program.poll() is not None)
        assert self.program.poll() is None, self.text

    def stop(self, number: signal.Signals) -> int:
        self.program.send_signal(number)
        return self.program.wait(PATIENCE)

    def kill(self) -> None:
        """Kill what a failed test has left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.family():
                process.kill()
        self.program.kill()
        self.program.wait(PATIENCE)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.program.pid).children(recursive=True)

    def cli(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return cli(*arguments, env=self.env)

    def ingest(self, *arguments: object) -> list[dict]:
        return objects(self.cli("ingest", "--json", *arguments))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    service = Up(tmp_path_factory.mktemp("up"))
    service.start()
    try:
        yield service
    finally:
        service.kill()


def test_up_prints_its_addresses_and_folders(up: Up) -> None:
    for text in (up.url, up.flower, up.env["RAG_SERVICE_DATA_DIR"]):
        assert text in up.text
    assert httpx.get(f"{up.url}/health/ready", trust_env=False).status_code == 200


def test_flower_without_credentials_shows_pages_but_no_api(up: Up) -> None:
    wait_until(lambda: "Visit me at" in up.text)
    assert httpx.get(up.flower, trust_env=False).status_code == 200
    assert httpx.get(f"{up.flower}/api/workers", trust_env=False).status_code == 401


def test_a_second_up_over_the_same_folder_names_the_first(up: Up) -> None:
    """Not the port, which the first has in use too."""
    done = cli("up", env=up.env)
    assert done.returncode == 2
    assert f"process {up.program.pid}" in done.stderr


def test_a_port_in_use_is_refused_with_its_setting(up: Up, tmp_path: Path) -> None:
    done = cli("up", env=up.env | {"RAG_SERVICE_DATA_DIR": str(tmp_path)})
    assert done.returncode == 2
    assert "api.port" in done.stderr


def test_a_folder_is_ingested_and_waited_for(up: Up, files: Path) -> None:
    done = up.cli("ingest", files, "--wait", "--collection", "folder")
    assert done.returncode == 1
    rows = {Path(line.split()[0]).name: line for line in done.stdout.splitlines()[1:]}
    assert list(rows) == ["agreement.pdf", "broken.pdf", "note.png"]
    assert "processed" in rows["agreement.pdf"]
    assert "processed" in rows["note.png"]
    assert "unsupported_type" in rows["broken.pdf"]
    assert "note.png: processed, page 1 of 1" in done.stderr

    listed = objects(up.cli("status", "--collection", "folder", "--json"))
    assert {one["filename"] for one in listed} == {"agreement.pdf", "note.png"}
    table = up.cli("status", "--collection", "folder")
    assert table.returncode == 0
    assert "2 documents: 2 processed" in table.stdout.splitlines()


def test_the_same_file_again_is_a_duplicate(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "twice.pdf"
    path.write_bytes(native_pdf(title="Twice"))
    [first], [second] = up.ingest(path, "--wait"), up.ingest(path)
    assert (first["duplicate"], second["duplicate"]) == (False, True)
    assert first["id"] == second["id"]
    assert second["status"] == "processed"


def test_show_prints_a_document_or_a_page(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "shown.pdf"
    path.write_bytes(native_pdf(title="Shown"))
    [one] = up.ingest(path, "--wait")
    whole = up.cli("show", one["id"]).stdout
    assert whole.index("Shown part 1") < whole.index("<!-- page 2 -->")
    second = up.cli("show", one["id"], "--page", 2, "--format", "text").stdout
    assert second.startswith("Shown part 2\n")
    [shown] = objects(up.cli("show", one["id"], "--json"))
    assert shown["document"]["id"] == one["id"]
    assert up.cli("show", one["id"], "--page", 9).returncode == 1


def test_reprocess_reports_that_there_is_nothing_to_redo(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "again.pdf"
    path.write_bytes(native_pdf(title="Again"))
    [one] = up.ingest(path, "--wait")
    nothing = up.cli("reprocess", one["id"])
    assert (nothing.returncode, nothing.stdout.splitlines()[-1]) == (0, "1 nothing to redo.")
    dry = up.cli("reprocess", one["id"], "--all-pages", "--dry-run")
    assert dry.stdout.splitlines()[-1] == "1 would be queued."
    redone = up.cli("reprocess", one["id"], "--all-pages", "--wait", "--json")
    assert redone.returncode == 0
    redo, view = objects(redone)
    assert (redo["action"], redo["pages_redone"]) == ("queued", 2)
    assert view["latest_run"]["id"] == redo["run_id"]
    assert up.cli("reprocess").returncode == 2


def test_reprocess_reads_only_chosen_pages(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "chosen.pdf"
    path.write_bytes(native_pdf(title="Chosen"))
    [one] = up.ingest(path, "--wait")
    pages = up.cli("reprocess", one["id"], "--pages", "2-9", "--ocr", "force", "--wait", "--json")
    assert pages.returncode == 0, pages.stderr
    redo, view = objects(pages)
    assert (redo["pages_reused"], redo["pages_redone"]) == (1, 1)
    assert (view["pages"]["native"], view["pages"]["ocr"]) == (1, 1)
    [read] = objects(up.cli("show", one["id"], "--page", 2, "--format", "json"))
    choice = ("--model-was", read["model"], "--version-was", read["parser_version"])
    again = up.cli("reprocess", one["id"], *choice, "--dry-run", "--json")
    [planned] = objects(again)
    assert (planned["action"], planned["pages_redone"]) == ("would_queue", 1)
    none = up.cli("reprocess", one["id"], "--model-was", "another", "--dry-run")
    assert (none.returncode, none.stdout) == (0, "Nothing to redo.\n")


def test_an_encrypted_document_waits_for_its_password(up: Up, tmp_path: Path) -> None:
    path, password = tmp_path / "locked.pdf", tmp_path / "password"
    path.write_bytes(native_pdf(password="sesame", title="Locked"))
    done = up.cli("ingest", path, "--wait", "--json")
    assert done.returncode == 1
    [one] = objects(done)
    assert one["document"]["error"]["code"] == "encrypted_pdf"
    [listed] = objects(up.cli("status", "--error", "encrypted_pdf", "--json"))
    assert listed["id"] == one["id"]

    password.write_text("wrong\n")
    assert "password" in up.cli("reprocess", one["id"], "--password-file", password).stderr
    password.write_text("sesame\n")
    opened = up.cli("reprocess", one["id"], "--password-file", password, "--wait")
    assert opened.returncode == 0, opened.stderr
    assert "Locked part 2" in up.cli("show", one["id"]).stdout


def test_cancel_and_delete_print_a_result_for_each_document(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "gone.pdf"
    path.write_bytes(native_pdf(title="Gone"))
    [one] = up.ingest(path, "--wait")
    unknown = "0" * 32
    ended = up.cli("cancel", one["id"], unknown, "--json")
    assert ended.returncode == 1
    assert [one["result"] for one in objects(ended)] == ["no run to cancel", "not found"]
    assert up.cli("delete", one["id"]).returncode == 2
    assert up.cli("delete", one["id"], "--yes").returncode == 0
    assert up.cli("status", one["id"]).returncode == 1
    [again] = up.ingest(path)
    assert (again["duplicate"], again["id"] != one["id"]) == (False, True)


def test_strict_fails_on_a_page_without_text(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(photo_png())
    done = up.cli("ingest", path, "--strict")
    assert done.returncode == 1
    assert "page_without_text" in done.stdout
    assert up.cli("ingest", path, "--wait").returncode == 0


def test_a_killed_worker_is_restarted_and_goes_on(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "after.png"
    path.write_bytes(scan_png("Written after the restart"))
    [worker] = [
        process
        for process in psutil.Process(up.program.pid).children()
        if {"worker", "ocr"} <= set(process.cmdline())
    ]
    worker.kill()
    [one] = up.ingest(path, "--wait")
    assert one["document"]["status"] == "processed", up.text
    assert "ocr was restarted (restart 1)" in up.text


def test_documents_survive_a_restart_of_the_service(up: Up, tmp_path: Path) -> None:
    path = tmp_path / "kept.pdf"
    path.write_bytes(native_pdf(title="Kept"))
    [one] = up.ingest(path, "--wait")
    family = up.family()
    assert up.stop(signal.SIGTERM) == 0, up.text
    assert not any(process.is_running() for process in family)
    data = Path(up.env["RAG_SERVICE_DATA_DIR"])
    assert [path for path in data.iterdir() if not path.is_dir()] == []
    assert up.cli("status").returncode == 3
    up.start()
    [view] = objects(up.cli("status", one["id"], "--json"))
    assert view["status"] == "processed"
    assert "Kept part 1" in up.cli("show", one["id"]).stdout
    assert up.stop(signal.SIGINT) == 0, up.text
