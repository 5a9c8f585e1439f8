"""A page by its regions: layout, crops, a reading of each. Used by pages.py."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rag_service.config.options import LayoutOptions
from rag_service.errors import RagServiceError
from rag_service.layout.labels import task_of
from rag_service.layout.page_layout import LayoutBox, PageLayout, Task
from rag_service.ocr.ocr_client import Rejected, RejectedForSize
from rag_service.parsers.answer_reader import SMALLER, Flaw, Reader, Reading, Subject
from rag_service.parsers.block_markdown import content_for
from rag_service.parsers.contract import PageSource, Region
from rag_service.parsers.page_request import PageAtWork, PagePart
from rag_service.pdf.results import Crop

T = TypeVar("T")
# Pages between their look and their crops; the render child keeps about so many rasters.
_LOOKING = 4


class LayoutFinder(Protocol):
    """What finds the blocks of a page: the layout server's client."""

    async def find(self, jpeg: bytes) -> PageLayout:
        """The layout of the page that the picture shows. Raises LayoutUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A region that is wanted: where it is and what is done with it."""

    index: int
    box: LayoutBox
    task: Task

    @property
    def name(self) -> str:
        """As warnings call it; people count from 1."""
        return f"Region {self.index + 1} ({self.box.label})"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A page's regions in reading order, and the readings of those that were read, by index."""

    parts: Sequence[Part]
    readings: Mapping[int, Reading]

    @property
    def text(self) -> str:
        """All that was read."""
        return "\n".join(reading.text for reading in self.readings.values()).strip()

    @property
    def only_loops(self) -> bool:
        """Whether all that was read are loops."""
        return all(reading.only_loop for reading in self.readings.values() if reading.text)

    def having(self, flaw: Flaw) -> list[str]:
        """The names of the regions whose reading has this flaw."""
        return [
            part.name
            for part in self.parts
            if part.index in self.readings and self.readings[part.index].flaw is flaw
        ]

    def regions(self) -> list[Region]:
        """The regions with their Markdown."""
        return [self._region(part) for part in self.parts]

    def shown(self) -> list[Region]:
        """Those that Markdown shows: pictures, and what has text."""
        regions = zip(self.parts, self.regions(), strict=True)
        return [it for part, it in regions if it.content or part.task is Task.PICTURE]

    def _region(self, part: Part) -> Region:
        read = self.readings.get(part.index)
        content = content_for(part.box.label, part.task, read.text if read else "")
        return Region(part.index, part.box.label, part.box.bbox, content)


class RegionReader:
    """Reads pages of one job by their regions."""

    def __init__(
        self,
        settings: LayoutOptions,
        layout: LayoutFinder,
        source: PageSource,
        reader: Reader,
        dpi: int,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._source = source
        self._reader = reader
        self._dpi = dpi
        self._looking = asyncio.Semaphore(_LOOKING)

    async def read(self, page: PageAtWork) -> Blocks | None:
        """The page's regions, each read; None where the layout has none that is to be read.

        Raises LayoutUnavailable, PageError of drawing, and what Reader.read raises.
        """
        async with self._looking:
            parts = await self._parts(page)
            to_read = [part for part in parts if part.task is not Task.PICTURE]
            if not to_read:
                return None
            boxes = [part.box.bbox for part in to_read]
            crops = await self._source.crops(page.number, self._dpi, boxes)
        work = [self._read(page, part, crop) for part, crop in zip(to_read, crops, strict=True)]
        readings = await _all_or_none(work)
        found = {part.index: reading for part, reading in zip(to_read, readings, strict=True)}
        return Blocks(parts, found)

    async def _parts(self, page: PageAtWork) -> list[Part]:
        picture = await self._source.layout_picture(page.number, self._dpi)
        page.drawn(picture.dpi, picture.warnings)
        layout = await self._layout.find(picture.jpeg)
        tasks = [(box, task_of(box.label, self._settings)) for box in layout.boxes]
        wanted = [(box, task) for box, task in tasks if task is not Task.DROP]
        return [Part(index, box, task) for index, (box, task) in enumerate(wanted)]

    async def _read(self, page: PageAtWork, part: Part, crop: Crop) -> Reading:
        async def smaller() -> PagePart:
            dpi = int(self._dpi * SMALLER)
            return _picture((await self._source.crops(page.number, dpi, [part.box.bbox]))[0])

        try:
            return await self._reader.read(page, Subject(_picture(crop), part.task, smaller))
        except Rejected as error:
            raise _naming(part, error) from error


def _picture(crop: Crop) -> PagePart:
    return PagePart(crop.jpeg, crop.width, crop.height)


def _naming(part: Part, error: RagServiceError) -> Rejected:
    kind = RejectedForSize if isinstance(error, RejectedForSize) else Rejected
    return kind(f"{part.name}: {error.message}")


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error the others are stopped and waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
