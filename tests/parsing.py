"""The parser `glmocr` with everything around it in memory, except the OCR server."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

from rag_service.config.loader import get_settings
from rag_service.errors import LeaseLost
from rag_service.layout.page_layout import PageLayout
from rag_service.parsers.contract import PageTask, ParseJob
from rag_service.parsers.glmocr import GlmOcr
from rag_service.pdf.results import Crop, PagePicture, RenderedPage
from rag_service.states import LayoutMode
from tests.fakes.scans import HEIGHT, WIDTH, Mark, look, new_number, picture


def region_mark(document, number, box):
    """The mark on the picture of a region: its page and its upper edge, in hundreds."""
    return Mark(document, 16 * number + box[1] // 100)


def _size(dpi):
    return WIDTH * dpi // 72, HEIGHT * dpi // 72


class Layouts:
    """Finds the given boxes of each page; the page is known by its picture."""

    def __init__(self):
        self.boxes = {}
        self.error = None
        self.asked = []

    def __call__(self, _settings):
        return contextlib.nullcontext(self)

    async def find(self, jpeg):
        number = look(jpeg).mark.page
        self.asked.append(number)
        if self.error is not None:
            raise self.error
        return PageLayout(tuple(self.boxes.get(number, ())), "given")


class Source:
    """Draws the pages of one scan."""

    def __init__(self, document):
        self.document = document
        self.rendered = []
        self.cropped = []
        self.errors = {}
        self.warnings = ()

    async def render(self, number, dpi):
        self.rendered.append((number, dpi))
        if number in self.errors:
            raise self.errors[number]
        jpeg = picture(Mark(self.document, number), dpi)
        return RenderedPage(number, jpeg, *_size(dpi), dpi, True, self.warnings)

    async def layout_picture(self, number, dpi):
        if number in self.errors:
            raise self.errors[number]
        small = picture(Mark(self.document, number), 72)
        return PagePicture(number, small, *_size(dpi), dpi, True, self.warnings)

    async def crops(self, number, dpi, boxes):
        self.cropped.append((number, dpi, list(boxes)))
        marks = [region_mark(self.document, number, box) for box in boxes]
        return [Crop(picture(mark, dpi), *_size(dpi)) for mark in marks]


class Sink:
    """Keeps pages in memory; raises `stop` when `stop_at` pages have begun."""

    def __init__(self):
        self.begun = []
        self.stored = {}
        self.stop_at = None
        self.stop = None
        self.lost = False

    async def begin_page(self, number):
        if self.stop_at is not None and len(self.begun) >= self.stop_at:
            raise self.stop
        self.begun.append(number)

    async def require_lease(self):
        if self.lost:
            raise LeaseLost

    async def store(self, result):
        assert result.number not in self.stored
        self.stored[result.number] = result

    def state(self, number=1):
        return self.stored[number].state


class Watch:
    """One worker's view of the server, with a clock of its own."""

    def __init__(self, *, up=True):
        self.up = up
        self.last = None
        self.loads = []

    async def is_up(self):
        return self.up

    async def last_answer(self):
        return self.last

    async def answered(self):
        self.up = True
        self.last = (self.last or datetime(1999, 1, 1, tzinfo=UTC)) + timedelta(seconds=1)

    async def good_limit(self):
        return None

    async def processes(self):
        return 1

    async def report(self, load):
        self.loads.append(load)


class Reader:
    """A parser with everything around it in memory; waits are recorded, not slept."""

    def __init__(self, server):
        self.server = server
        self.document = new_number()
        self.source, self.sink, self.watch = Source(self.document), Sink(), Watch()
        self.layouts = Layouts()
        self.layout = LayoutMode.PAGE
        self.waits = []
        self.in_flight = 3
        self.changes = {}

    def mark(self, page=1):
        return Mark(self.document, page)

    async def sleep(self, seconds):
        self.waits.append(seconds)

    def read(self, pages=1, tries=0):
        """Parse this number of pages and return the stored results by number."""
        asyncio.run(self.parsing(pages, tries))
        return self.sink.stored

    async def parsing(self, pages=1, tries=0):
        """Parse this number of pages."""
        base = get_settings()
        changes = {"base_url": self.server.url, "pages_in_flight": self.in_flight, **self.changes}
        chosen = base.model_copy(update={"ocr": base.ocr.model_copy(update=changes)})
        tasks = [PageTask(number, tries) for number in range(1, pages + 1)]
        job = ParseJob("a-run", chosen.ocr.model, 72, self.layout, tasks)
        parser = GlmOcr(chosen, sleep=self.sleep, open_layout=self.layouts)
        await parser.parse(job, self.source, self.sink, self.watch)

    def requests(self, page=1):
        return self.server.of(self.mark(page))
