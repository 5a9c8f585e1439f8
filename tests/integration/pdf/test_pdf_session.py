"""The render child: hangs, crashes, cancelled calls, replacement, the death of its parent."""

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
from rag_service.errors import CorruptPdf, PageTimeout, PageUnrenderable, ProcessInTrouble
from rag_service.pdf.planned_queue import BATCH
from rag_service.pdf.results import PlannedPage
from rag_service.pdf.session import PdfSession
from rag_service.states import OcrMode, PagePlan
from tests.fakes import pdf_samples as samples

PDF = "application/pdf"


def limits(**changes: Any) -> PdfOptions:
    return load_settings().pdf.model_copy(update=changes)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def planned(session: PdfSession, pages: range | list[int], mode: OcrMode = OcrMode.AUTO):
    return [page async for page in session.plan(mode, pages)]


async def busy_child(session: PdfSession) -> int:
    """Return the child's process id once it uses CPU time."""
    pid = await child_pid(session)
    before = cpu_ticks(pid)
    while cpu_ticks(pid) < before + 5:
        await asyncio.sleep(0.02)
    return pid


async def child_pid(session: PdfSession) -> int:
    while session._child.pid is None:
        await asyncio.sleep(0.02)
    return session._child.pid


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def ends(pid: int) -> bool:
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


def test_planned_pages_come_in_the_given_order_with_their_text(tmp_path: Path) -> None:
    count = 3 * BATCH + 5
    path = samples.text_document(tmp_path / "long.pdf", count)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            preflight = await session.open(path, PDF)
            assert (preflight.pages, preflight.media_type) == (count, PDF)
            pages = await planned(session, range(1, count + 1))
            assert [page.number for page in pages] == list(range(1, count + 1))
            assert all(f"This is page {page.number} of" in page.markdown for page in pages)
            some = await planned(session, [9, 2, 5])
            assert [page.number for page in some] == [9, 2, 5]
            assert "This is page 2 of" in some[1].markdown

    run(work())


def test_a_child_without_processor_time_gets_more_time(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1), 1000) as session:
            await session.open(path, PDF)
            pid = await child_pid(session)
            os.kill(pid, signal.SIGSTOP)
            planning = asyncio.create_task(planned(session, [1]))
            await asyncio.sleep(2.5)
            os.kill(pid, signal.SIGCONT)
            assert [outcome(page) for page in await planning] == ["native"]
            assert await child_pid(session) == pid

    run(work())


def test_a_page_that_hangs_fails_alone(tmp_path: Path) -> None:
    path = samples.joined(
        tmp_path / "hang.pdf", samples.prose_page(), samples.endless_page(), samples.prose_page()
    )

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1.5), 1000) as session:
            await session.open(path, PDF)
            pages = await planned(session, range(1, 4))
            assert [outcome(page) for page in pages] == ["native", "page_timeout", "native"]
            assert "page_time_limit" in str(pages[1].error)
            with pytest.raises(PageTimeout):
                await session.render(2, 72)
            assert (await session.render(3, 72)).width == 612

    run(work())


async def kill_when_busy(session: PdfSession, times: int) -> None:
    for _ in range(times):
        pid = await busy_child(session)
        os.kill(pid, signal.SIGSEGV)
        while session._child.pid == pid:
            await asyncio.sleep(0.02)


def test_a_page_that_kills_the_child_fails_alone(tmp_path: Path) -> None:
    path = samples.joined(
        tmp_path / "crash.pdf", samples.prose_page(), samples.endless_page(), samples.prose_page()
    )

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=60), 1000) as session:
            await session.open(path, PDF)
            planning = asyncio.create_task(planned(session, range(1, 4)))
            # First the page, then the page again, then its text alone.
            await kill_when_busy(session, times=3)
            pages = await planning
            assert [outcome(page) for page in pages] == ["native", "page_unrenderable", "native"]
            rendering = asyncio.create_task(session.render(2, 72))
            await kill_when_busy(session, times=2)
            with pytest.raises(PageUnrenderable):
                await rendering

    run(work())


def test_a_child_killed_from_outside_loses_no_page(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "two.pdf", 2)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            # The session sends the next request before it notices.
            os.kill(await child_pid(session), signal.SIGKILL)
            assert (await session.open(path, PDF)).pages == 2
            os.kill(await child_pid(session), signal.SIGKILL)
            assert [outcome(page) for page in await planned(session, [1, 2])] == ["native"] * 2
            os.kill(await child_pid(session), signal.SIGKILL)
            assert (await session.render(2, 50)).number == 2

    run(work())


def test_many_pages_that_hang_are_given_up_by_name(tmp_path: Path) -> None:
    """Without the bound, 40 pages would take 40 limits. The first pages arrive before the last."""
    path = samples.joined(tmp_path / "hang.pdf", *[samples.endless_page()] * 40)

    async def work() -> tuple[list[PlannedPage], int]:
        async with PdfSession(limits(page_time_limit=1.0), 1000) as session:
            await session.open(path, PDF)
            tries, stream = 0, session._stream

            async def counted(*args: Any, **options: Any) -> None:
                nonlocal tries
                tries += 1
                await stream(*args, **options)

            session._stream = counted  # type: ignore[method-assign]
            return await planned(session, range(1, 41)), tries

    pages, tries = run(work())
    assert [page.number for page in pages] == list(range(1, 41))
    assert {page.error.code for page in pages if page.error} == {"page_timeout"}
    assert tries <= 10
    assert "took longer" in str(pages[0].error)
    assert str(pages[-1].error).startswith("Page 40 was not tried: several pages in a row")


def test_a_few_pages_that_hang_among_good_ones_cost_no_other_page(tmp_path: Path) -> None:
    kinds = [samples.prose_page(), samples.prose_page(), samples.endless_page()] * 8
    path = samples.joined(tmp_path / "some.pdf", *kinds)

    async def work() -> list[PlannedPage]:
        async with PdfSession(limits(page_time_limit=1.0), 1000) as session:
            await session.open(path, PDF)
            return await planned(session, range(1, 25))

    pages = run(work())
    failed = [page.number for page in pages if page.error]
    assert failed == list(range(3, 25, 3))
    assert all(page.markdown for page in pages if not page.error)


def test_pages_that_hang_when_drawn_are_given_up(tmp_path: Path) -> None:
    path = samples.joined(
        tmp_path / "hang.pdf", *[samples.endless_page()] * 9, samples.prose_page()
    )

    async def work() -> list[str]:
        async with PdfSession(limits(page_time_limit=0.5), 1000) as session:
            await session.open(path, PDF)
            messages = []
            for number in range(1, 11):
                with pytest.raises(PageTimeout) as late:
                    await session.render(number, 72)
                messages.append(late.value.message)
            await session.open(path, PDF)
            assert (await session.render(10, 72)).jpeg
            return messages

    messages = run(work())
    assert sum("was not tried" in message for message in messages) == 5


def test_good_text_survives_a_drawing_that_hangs(tmp_path: Path) -> None:
    path = tmp_path / "undrawable.pdf"
    path.write_bytes(samples.undrawable_page())

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=1.5), 1000) as session:
            await session.open(path, PDF)
            (page,) = await planned(session, [1])
            assert outcome(page) == "native"
            assert "keeper of the house" in page.markdown
            (forced,) = await planned(session, [1], OcrMode.FORCE)
            assert outcome(forced) == "page_timeout"

    run(work())


def test_a_file_that_hangs_while_opening_is_corrupt(tmp_path: Path) -> None:
    endless = tmp_path / "endless.pdf"
    os.mkfifo(endless)
    good = samples.text_document(tmp_path / "good.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(open_time_limit=1), 1000) as session:
            with pytest.raises(CorruptPdf, match="open_time_limit"):
                await session.open(endless, PDF)
            assert (await session.open(good, PDF)).pages == 1

    run(work())


def test_a_file_that_kills_the_child_while_opening_is_corrupt(tmp_path: Path) -> None:
    endless = tmp_path / "endless.pdf"
    os.mkfifo(endless)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            opening = asyncio.create_task(session.open(endless, PDF))
            for _ in range(2):
                pid = await child_pid(session)
                os.kill(pid, signal.SIGSEGV)
                while session._child.pid == pid:
                    await asyncio.sleep(0.02)
            with pytest.raises(CorruptPdf):
                await opening

    run(work())


def test_a_cancelled_call_leaves_no_answer_behind(tmp_path: Path) -> None:
    path = samples.joined(tmp_path / "hang.pdf", samples.endless_page(), samples.prose_page())

    async def work() -> None:
        async with PdfSession(limits(page_time_limit=60), 1000) as session:
            await session.open(path, PDF)
            rendering = asyncio.create_task(session.render(1, 72))
            pid = await busy_child(session)
            rendering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rendering
            assert ends(pid)
            (page,) = await planned(session, [2])
            assert page.number == 2
            assert "keeper of the house" in page.markdown

    run(work())


def test_an_abandoned_plan_does_not_reach_the_next_document(tmp_path: Path) -> None:
    first = samples.text_document(tmp_path / "first.pdf", 5 * BATCH)
    second = tmp_path / "second.pdf"
    second.write_bytes(samples.prose_page("All of the second document is on this one page."))

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            await session.open(first, PDF)
            async for page in session.plan(OcrMode.AUTO, range(1, 5 * BATCH + 1)):
                if page.number == 3:
                    break
            assert (await session.open(second, PDF)).pages == 1
            pages = await planned(session, [1])
            assert [page.markdown for page in pages] == [
                "All of the second document is on this one page."
            ]

    run(work())


def test_pages_can_be_rendered_between_planned_pages(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "long.pdf", 4 * BATCH)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            numbers = []
            async for page in session.plan(OcrMode.AUTO, range(1, 4 * BATCH + 1)):
                numbers.append(page.number)
                if page.number % 50 == 0:
                    assert (await session.render(page.number, 50)).number == page.number
            assert numbers == list(range(1, 4 * BATCH + 1))

    run(work())


def test_the_child_is_replaced_after_many_documents_or_when_large(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 2)

    async def pids(**changes: Any) -> list[int]:
        async with PdfSession(limits(**changes), 1000) as session:
            found = []
            for _ in range(3):
                await session.open(path, PDF)
                found.append(await child_pid(session))
            return found

    async def between_pages() -> tuple[int, int]:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            before = await child_pid(session)
            session._child._child.mib = limits().child_max_mib + 1
            await session.render(2, 50)
            return before, await child_pid(session)

    assert len(set(run(pids()))) == 1
    first, second, third = run(pids(child_max_documents=2))
    assert first == second != third
    before, after = run(between_pages())
    assert before != after


def test_an_idle_child_that_died_is_replaced(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            pid = await child_pid(session)
            os.kill(pid, signal.SIGKILL)
            assert ends(pid)
            assert (await session.render(1, 50)).number == 1

    run(work())


def test_closing_ends_the_child(tmp_path: Path) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)

    async def work() -> int:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            return await child_pid(session)

    assert ends(run(work()))


PARENT = """
import asyncio, sys
from pathlib import Path
from rag_service.config.loader import load_settings
from rag_service.pdf.session import PdfSession

async def main():
    session = PdfSession(load_settings().pdf, 1000)
    await session.open(Path(sys.argv[1]), "application/pdf")
    print(session._child.pid, flush=True)
    await session.render(1, 72)

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
    assert ends(pid)


def test_the_child_does_not_outlive_a_parent_that_is_already_dead() -> None:
    started = subprocess.run(
        [sys.executable, "-m", "rag_service.pdf.child", str(os.getppid()), "not even read"],
        input=b"", capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (started.returncode, started.stdout, started.stderr) == (1, b"", b"")


def test_a_child_that_cannot_start_is_not_blamed_on_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def work() -> None:
        async with PdfSession(limits(), 1000) as session:
            with pytest.raises(ProcessInTrouble):
                await session.open(path, PDF)

    run(work())


def test_the_child_gets_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.text_document(tmp_path / "one.pdf", 1)
    monkeypatch.setenv("RUNPOD_API_KEY", "a-very-secret-key")

    async def work() -> bytes:
        async with PdfSession(limits(), 1000) as session:
            await session.open(path, PDF)
            return Path(f"/proc/{await child_pid(session)}/environ").read_bytes()

    environment = run(work())
    assert b"PATH=" in environment
    assert b"a-very-secret-key" not in environment


def test_output_of_a_library_does_not_get_into_the_frames() -> None:
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
        async with PdfSession(limits(), 1000) as session:
            (page,) = await planned(session, [1])
            assert outcome(page) == "page_unrenderable"
            assert page.plan is PagePlan.OCR

    run(work())
