"""The render child under fire: hangs, crashes, cancelled callers, wear, and its parent's death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rag_service.config.loader import load_settings
from rag_service.config.options import PdfOptions
from rag_service.errors import CorruptPdf, Internal, PageTimeout, PageUnrenderable
from rag_service.pdf.results import PlannedPage
from rag_service.pdf.session import BATCH, PdfSession
from rag_service.states import OcrMode, PagePlan
from tests.fakes import pdf_samples as samples

PDF = "application/pdf"


def limits(**changes: Any) -> PdfOptions:
    return load_settings().pdf.model_copy(update=changes)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def planned(worker: PdfSession, pages: range | list[int], mode: OcrMode = OcrMode.AUTO):
    return [page async for page in worker.plan(mode, pages)]


async def busy_child(worker: PdfSession) -> int:
    """The child's id once it computes."""
    pid = await child_pid(worker)
    before = cpu_ticks(pid)
    while cpu_ticks(pid) < before + 5:
        await asyncio.sleep(0.02)
    return pid


async def child_pid(worker: PdfSession) -> int:
    while worker._child is None:
        await asyncio.sleep(0.02)
    return worker._child.pid


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def outcome(page: PlannedPage) -> str:
    return page.error.code if page.error else page.plan


def test_plans_come_in_the_order_asked_and_say_what_each_page_holds(tmp_path: Path) -> None:
    count = 3 * BATCH + 5
    path = samples.text_document(tmp_path / "long.pdf", count)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            preflight = await worker.open(path, PDF)
            assert (preflight.pages, preflight.media_type) == (count, PDF)
            pages = await planned(worker, range(1, count + 1))
            assert [page.number for page in pages] == list(range(1, count + 1))
            assert all(f"This is page {page.number} of" in page.markdown for page in pages)
            some = await planned(worker, [9, 2, 5])
            assert [page.number for page in some] == [9, 2, 5]
            assert "This is page 2 of" in some[1].markdown

    run(work())


def test_a_child_that_gets_no_processor_is_waited_for(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1), 1000) as worker:
            await worker.open(path, PDF)
            pid = await child_pid(worker)
            os.kill(pid, signal.SIGSTOP)
            planning = asyncio.create_task(planned(worker, [1]))
            await asyncio.sleep(2.5)
            os.kill(pid, signal.SIGCONT)
            assert [outcome(page) for page in await planning] == ["native"]
            assert await child_pid(worker) == pid

    run(work())


def test_a_page_that_hangs_costs_itself_only(tmp_path: Path) -> None:
    path = samples.joined(
        tmp_path / "hang.pdf", samples.prose_page(), samples.endless_page(), samples.prose_page()
    )

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1.5), 1000) as worker:
            await worker.open(path, PDF)
            pages = await planned(worker, range(1, 4))
            assert [outcome(page) for page in pages] == ["native", "page_timeout", "native"]
            assert "page_time_limit" in str(pages[1].error)
            with pytest.raises(PageTimeout):
                await worker.render(2, 72)
            assert (await worker.render(3, 72)).width == 612

    run(work())


async def kill_when_busy(worker: PdfSession, times: int) -> None:
    for _ in range(times):
        pid = await busy_child(worker)
        os.kill(pid, signal.SIGSEGV)
        while worker._child is not None and worker._child.pid == pid:
            await asyncio.sleep(0.02)


def test_a_page_that_kills_the_child_costs_itself_only(tmp_path: Path) -> None:
    path = samples.joined(
        tmp_path / "crash.pdf", samples.prose_page(), samples.endless_page(), samples.prose_page()
    )

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=60), 1000) as worker:
            await worker.open(path, PDF)
            planning = asyncio.create_task(planned(worker, range(1, 4)))
            # The page, the page once more, its text alone.
            await kill_when_busy(worker, times=3)
            pages = await planning
            assert [outcome(page) for page in pages] == ["native", "page_unrenderable", "native"]
            rendering = asyncio.create_task(worker.render(2, 72))
            await kill_when_busy(worker, times=2)
            with pytest.raises(PageUnrenderable):
                await rendering

    run(work())


def test_a_child_that_something_else_killed_costs_nothing(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "two.pdf", 2)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            # Too late for the worker to see it before it asks.
            os.kill(await child_pid(worker), signal.SIGKILL)
            assert (await worker.open(path, PDF)).pages == 2
            os.kill(await child_pid(worker), signal.SIGKILL)
            assert [outcome(page) for page in await planned(worker, [1, 2])] == ["native"] * 2
            os.kill(await child_pid(worker), signal.SIGKILL)
            assert (await worker.render(2, 50)).number == 2

    run(work())


def test_good_text_survives_a_drawing_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "undrawable.pdf"
    path.write_bytes(samples.undrawable_page())

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1.5), 1000) as worker:
            await worker.open(path, PDF)
            (page,) = await planned(worker, [1])
            assert outcome(page) == "native"
            assert "keeper of the house" in page.markdown
            (forced,) = await planned(worker, [1], OcrMode.FORCE)
            assert outcome(forced) == "page_timeout"

    run(work())


def test_a_file_that_hangs_while_opening_is_corrupt(tmp_path: Path) -> None:
    endless = tmp_path / "endless.pdf"
    os.mkfifo(endless)
    good = samples.text_document(tmp_path / "good.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(open_time_limit=1), 1000) as worker:
            with pytest.raises(CorruptPdf, match="open_time_limit"):
                await worker.open(endless, PDF)
            assert (await worker.open(good, PDF)).pages == 1

    run(work())


def test_a_file_that_kills_the_child_while_opening_is_corrupt(tmp_path: Path) -> None:
    endless = tmp_path / "endless.pdf"
    os.mkfifo(endless)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            opening = asyncio.create_task(worker.open(endless, PDF))
            for _ in range(2):
                pid = await child_pid(worker)
                os.kill(pid, signal.SIGSEGV)
                while worker._child is not None and worker._child.pid == pid:
                    await asyncio.sleep(0.02)
            with pytest.raises(CorruptPdf):
                await opening

    run(work())


def test_a_cancelled_call_leaves_no_answer_behind(tmp_path: Path) -> None:
    path = samples.joined(tmp_path / "hang.pdf", samples.endless_page(), samples.prose_page())

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=60), 1000) as worker:
            await worker.open(path, PDF)
            rendering = asyncio.create_task(worker.render(1, 72))
            pid = await busy_child(worker)
            rendering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rendering
            assert gone(pid)
            (page,) = await planned(worker, [2])
            assert page.number == 2
            assert "keeper of the house" in page.markdown

    run(work())


def test_a_plan_that_is_given_up_does_not_reach_the_next_document(tmp_path: Path) -> None:
    first = samples.text_document(tmp_path / "first.pdf", 5 * BATCH)
    second = tmp_path / "second.pdf"
    second.write_bytes(samples.prose_page("All of the second document stands on this one page."))

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(first, PDF)
            async for page in worker.plan(OcrMode.AUTO, range(1, 5 * BATCH + 1)):
                if page.number == 3:
                    break
            assert (await worker.open(second, PDF)).pages == 1
            pages = await planned(worker, [1])
            assert [page.markdown for page in pages] == [
                "All of the second document stands on this one page."
            ]

    run(work())


def test_rendering_between_planned_pages_takes_its_turn(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "long.pdf", 4 * BATCH)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            seen = []
            async for page in worker.plan(OcrMode.AUTO, range(1, 4 * BATCH + 1)):
                seen.append(page.number)
                if page.number % 50 == 0:
                    assert (await worker.render(page.number, 50)).number == page.number
            assert seen == list(range(1, 4 * BATCH + 1))

    run(work())


def test_the_child_is_replaced_when_worn_or_large(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 2)

    async def pids(**changes: Any) -> list[int]:
        async with PdfSession(limits(**changes), 1000) as worker:
            found = []
            for _ in range(3):
                await worker.open(path, PDF)
                found.append(await child_pid(worker))
            return found

    async def between_pages() -> tuple[int, int]:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            before = await child_pid(worker)
            worker._child.mib = limits().child_max_mib + 1
            await worker.render(2, 50)
            return before, await child_pid(worker)

    assert len(set(run(pids()))) == 1
    worn = run(pids(child_max_documents=2))
    assert worn[0] == worn[1] != worn[2]
    before, after = run(between_pages())
    assert before != after


def test_an_idle_child_that_died_is_replaced_without_a_word(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            pid = await child_pid(worker)
            os.kill(pid, signal.SIGKILL)
            assert gone(pid)
            assert (await worker.render(1, 50)).number == 1

    run(work())


def test_closing_ends_the_child(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> int:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            return await child_pid(worker)

    assert gone(run(work()))


PARENT = """
import asyncio, sys
from pathlib import Path
from rag_service.pdf.session import PdfSession
from rag_service.config.loader import load_settings

async def main():
    worker = PdfSession(load_settings().pdf, 1000)
    await worker.open(Path(sys.argv[1]), "application/pdf")
    print(worker._child.pid, flush=True)
    await worker.render(1, 72)

asyncio.run(main())
"""


def test_the_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "hang.pdf"
    path.write_bytes(samples.endless_page())
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    assert gone(pid)


def test_the_child_does_not_outlive_a_parent_that_is_already_dead() -> None:
    started = subprocess.run(
        [sys.executable, "-m", "rag_service.pdf.child", str(os.getppid()), "not even read"],
        input=b"", capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (started.returncode, started.stdout, started.stderr) == (1, b"", b"")


def test_a_child_that_cannot_start_is_nobodys_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            with pytest.raises(Internal):
                await worker.open(path, PDF)

    run(work())


def test_the_child_sees_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)
    monkeypatch.setenv("RUNPOD_API_KEY", "a-very-secret-key")

    async def work() -> bytes:
        async with PdfSession(limits(), 1000) as worker:
            await worker.open(path, PDF)
            return Path(f"/proc/{await child_pid(worker)}/environ").read_bytes()

    environment = run(work())
    assert b"PATH=" in environment
    assert b"a-very-secret-key" not in environment


def test_what_a_library_prints_stays_out_of_the_frames() -> None:
    program = (
        "from rag_service.pdf.child import __main__ as child\n"
        "answers = child._take_stdout()\n"
        "print('an advert', flush=True)\n"
        "answers.write(b'frame')\n"
        "answers.flush()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"frame"
    assert b"an advert" in done.stderr


def test_the_parent_loads_neither_mupdf_nor_pillow() -> None:
    program = (
        "import sys, rag_service.pdf.session\n"
        "print(sorted({'pymupdf', 'fitz', 'PIL', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_plan_without_an_open_document_is_an_error_of_the_page() -> None:
    async def work() -> None:
        async with PdfSession(limits(), 1000) as worker:
            (page,) = await planned(worker, [1])
            assert outcome(page) == "page_unrenderable"
            assert page.plan is PagePlan.OCR

    run(work())
