"""Reads a page by its regions: layout, crops, a reading of each."""

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
from rag_service.parsers.answer_reader import (
    SMALLER,
    Flaw,
    PictureReader,
    PictureToRead,
    Reading,
)
from rag_service.parsers.block_markdown import content_for
from rag_service.parsers.contract import PageSource, Region
from rag_service.parsers.page_request import PageInProgress, PagePart
from rag_service.pdf.results import Crop

T = TypeVar("T")
# Pages between their layout and their crops; the render child keeps about as many rasters.
_PAGES_IN_LAYOUT = 4


class LayoutFinder(Protocol):
    """Finds the blocks of a page, as the layout server's client does."""

    async def find(self, jpeg: bytes) -> PageLayout:
        """Return the layout of the page in the picture. Raises LayoutUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """A region of a page: its box and what is done with it."""

    index: int
    box: LayoutBox
    task: Task

    @property
    def name(self) -> str:
        """The region's name in warnings, counted from 1."""
        return f"Region {self.index + 1} ({self.box.label})"


@dataclass(frozen=True, slots=True)
class RegionReadings:
    """A page's regions in reading order, and by index the readings of those that were read."""

    planned: Sequence[PlannedRegion]
    readings: Mapping[int, Reading]

    @property
    def text(self) -> str:
        """All text that was read."""
        return "\n".join(reading.text for reading in self.readings.values()).strip()

    @property
    def only_loops(self) -> bool:
        """Whether all text that was read is loops."""
        return all(reading.only_loop for reading in self.readings.values() if reading.text)

    def names_with(self, flaw: Flaw) -> list[str]:
        """Return the names of the regions whose reading has this flaw."""
        return [
            planned.name
            for planned in self.planned
            if planned.index in self.readings and self.readings[planned.index].flaw is flaw
        ]

    def regions(self) -> list[Region]:
        """Return the regions with their Markdown."""
        return [self._region(planned) for planned in self.planned]

    def visible(self) -> list[Region]:
        """Return the regions that the page's Markdown shows: pictures, and those with text."""
        pairs = zip(self.planned, self.regions(), strict=True)
        return [
            region for planned, region in pairs if region.content or planned.task is Task.PICTURE
        ]

    def _region(self, planned: PlannedRegion) -> Region:
        reading = self.readings.get(planned.index)
        box = planned.box
        content = content_for(box.label, planned.task, reading.text if reading else "")
        return Region(planned.index, box.label, box.bbox, content)


class RegionReader:
    """Reads pages of one job by their regions."""

    def __init__(
        self,
        settings: LayoutOptions,
        layout: LayoutFinder,
        source: PageSource,
        reader: PictureReader,
        dpi: int,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._source = source
        self._reader = reader
        self._dpi = dpi
        self._in_layout = asyncio.Semaphore(_PAGES_IN_LAYOUT)

    async def read(self, page: PageInProgress) -> RegionReadings | None:
        """Read each region of the page. Return None if the layout has no region to read.

        Raises LayoutUnavailable, PageError of drawing, and what PictureReader.read raises.
        """
        async with self._in_layout:
            planned = await self._planned(page)
            to_read = [region for region in planned if region.task is not Task.PICTURE]
            if not to_read:
                return None
            boxes = [region.box.bbox for region in to_read]
            crops = await self._source.crops(page.number, self._dpi, boxes)
        work = [self._read(page, *pair) for pair in zip(to_read, crops, strict=True)]
        readings = await _all_or_none(work)
        indexes = (region.index for region in to_read)
        return RegionReadings(planned, dict(zip(indexes, readings, strict=True)))

    async def _planned(self, page: PageInProgress) -> list[PlannedRegion]:
        picture = await self._source.layout_picture(page.number, self._dpi)
        page.note_render(picture.dpi, picture.warnings)
        layout = await self._layout.find(picture.jpeg)
        tasks = [(box, task_of(box.label, self._settings)) for box in layout.boxes]
        kept = [(box, task) for box, task in tasks if task is not Task.DROP]
        return [PlannedRegion(index, box, task) for index, (box, task) in enumerate(kept)]

    async def _read(self, page: PageInProgress, region: PlannedRegion, crop: Crop) -> Reading:
        async def smaller() -> PagePart:
            dpi = int(self._dpi * SMALLER)
            return _picture((await self._source.crops(page.number, dpi, [region.box.bbox]))[0])

        try:
            picture = PictureToRead(_picture(crop), region.task, smaller)
            return await self._reader.read(page, picture)
        except Rejected as error:
            raise _with_region_name(region, error) from error


def _picture(crop: Crop) -> PagePart:
    return PagePart(crop.jpeg, crop.width, crop.height)


def _with_region_name(region: PlannedRegion, error: RagServiceError) -> Rejected:
    kind = RejectedForSize if isinstance(error, RejectedForSize) else Rejected
    return kind(f"{region.name}: {error.message}")


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; at the first error, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
