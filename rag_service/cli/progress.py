"""Follows documents until they are finished, with progress bars or lines on stderr."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from rag_service.cli import field_text
from rag_service.cli.output import note, one_line, stderr
from rag_service.errors import NotFound, ServiceUnreachable
from rag_service.states import HELD

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from rag_service.knowledgebase.views import DocumentView

# Documents asked for in one round: with thousands, a round would take minutes.
_WINDOW = 50
_BARS = 12
_UNREACHABLE_SECONDS = 60.0
_LINE_SECONDS = 5.0

Fetch = Callable[[str], "DocumentView"]


class Display(Protocol):
    """Shows the progress of documents."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...

    def update(self, view: DocumentView) -> None:
        """Show the newest state of a document."""


def follow(
    ids: Iterable[str],
    fetch: Fetch,
    *,
    interval: float,
    check: Callable[[], None] = lambda: None,
) -> dict[str, DocumentView]:
    """Poll until every document is finished. Return the last view of each, except deleted ones.

    `check` is called every round and may raise. Raises ServiceUnreachable after a minute
    without an answer.
    """
    waiting = deque(dict.fromkeys(ids))
    ended: dict[str, DocumentView] = {}
    fetcher = _RetryingFetcher(fetch)
    with make_display(len(waiting)) as display:
        while waiting:
            check()
            for _ in range(min(_WINDOW, len(waiting))):
                view = fetcher.get(waiting[0])
                if view is not None:
                    display.update(view)
                    if field_text.ended(view):
                        ended[view.id] = view
                if view is None or field_text.ended(view):
                    waiting.popleft()
                else:
                    waiting.rotate(-1)
            if waiting:
                time.sleep(interval)
    return ended


class _RetryingFetcher:
    """Fetches documents; retries for a minute while the service is unreachable."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._unreachable_since: float | None = None

    def get(self, document_id: str) -> DocumentView | None:
        """Return the document, or None if it was deleted."""
        while True:
            try:
                view = self._fetch(document_id)
            except NotFound:
                note(f"Document {document_id} was deleted.")
                return None
            except ServiceUnreachable as error:
                self._wait(error)
            else:
                self._unreachable_since = None
                return view

    def _wait(self, error: ServiceUnreachable) -> None:
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            note(f"{error.message} Trying again for {_UNREACHABLE_SECONDS:g} s.")
        if now - self._unreachable_since > _UNREACHABLE_SECONDS:
            raise error
        time.sleep(1.0)


def make_display(total: int) -> Display:
    """Return progress bars on a terminal, else lines."""
    return _Bars(total) if stderr().is_terminal else _Lines()


class _Lines:
    """Prints a line when a state changes, and at most every 5 s when pages were read."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._pages: dict[str, tuple[int, float]] = {}

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, view: DocumentView) -> None:
        state = f"{view.latest_run.status} {view.waiting_for} {view.waiting_message}"
        done, now = view.latest_run.pages.done, time.monotonic()
        shown, shown_at = self._pages.get(view.id, (0, 0.0))
        changed = self._states.get(view.id) != state
        if changed or (done != shown and now - shown_at >= _LINE_SECONDS):
            note(f"{view.filename}: {field_text.progress(view)}")
            self._states[view.id], self._pages[view.id] = state, (done, now)


class _Bars:
    """Shows one bar for all documents, and one for each document in progress."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        name, state = "{task.description}", "{task.fields[state]}"
        self._progress: Progress = Progress(
            TextColumn(name, markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(state, markup=False),
            console=stderr(),
            redirect_stdout=False,
        )
        self._all = self._progress.add_task("documents", total=total, state="")
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, view: DocumentView) -> None:
        self._show_outage(view)
        if field_text.ended(view):
            self._end(view)
        elif view.id in self._bars or self._can_add_bar(view):
            self._show(view)

    def _show_outage(self, view: DocumentView) -> None:
        """Say behind the bar of all documents why they wait: no worker holds one meanwhile."""
        message = view.waiting_message
        if message or view.latest_run.status in HELD:
            state = f"waiting: {field_text.waiting(view)}: {one_line(message)}" if message else ""
            self._progress.update(self._all, state=state)

    def _can_add_bar(self, view: DocumentView) -> bool:
        return len(self._bars) < _BARS and view.latest_run.status in HELD

    def _show(self, view: DocumentView) -> None:
        if view.id not in self._bars:
            self._bars[view.id] = self._progress.add_task(view.filename, total=None, state="")
        pages = view.latest_run.pages
        self._progress.update(
            self._bars[view.id], total=pages.total, completed=pages.done,
            state=field_text.progress(view),
        )  # fmt: skip

    def _end(self, view: DocumentView) -> None:
        bar = self._bars.pop(view.id, None)
        if bar is not None:
            self._progress.remove_task(bar)
        self._progress.advance(self._all)
        note(f"{view.filename}: {field_text.progress(view)}")
