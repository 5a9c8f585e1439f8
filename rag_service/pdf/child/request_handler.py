"""Answers the parent's requests inside the render child, one after the other."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rag_service.errors import PageUnrenderable, RagServiceError
from rag_service.pdf import pipe_frames
from rag_service.pdf.child import crops, preflight, recompress, slices
from rag_service.pdf.child.crops import CropSize, Cutter
from rag_service.pdf.child.memory_shortage import is_shortage, too_large
from rag_service.pdf.child.opened_file import OpenedFile, open_file
from rag_service.pdf.child.raster import Raster, RasterCache
from rag_service.pdf.child_limits import ChildLimits
from rag_service.pdf.pipe_frames import Frame
from rag_service.pdf.result_frames import (
    WarningRow,
    crops_frame,
    drawn_head,
    error_head,
    planned_head,
    warning_rows,
)
from rag_service.pdf.results import PdfWarning
from rag_service.states import OcrMode

MIB = 1 << 20
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class RequestHandler:
    """The open document and the requests about it: `do: X` is answered by `_do_X`."""

    def __init__(self, answers: BinaryIO, limits: ChildLimits) -> None:
        self._answers = answers
        self._limits = limits
        self._source: OpenedFile | None = None
        self._rasters = RasterCache(limits.raster_cache_mib * MIB)
        self._cutter = Cutter(
            CropSize(limits.crop_min_pixels, limits.crop_max_side), limits.jpeg_quality
        )
        # Kept open, as it is read for every answer.
        self._memory = os.open("/proc/self/statm", os.O_RDONLY)

    def serve(self, requests: BinaryIO) -> None:
        """Answer requests until the parent closes the pipe."""
        self._answer({})
        while (request := pipe_frames.read(requests)) is not None:
            handle = getattr(self, "_do_" + request.head["do"])
            try:
                handle(request.head)
            except RagServiceError as error:
                self._answer(error_head(error))

    def _do_open(self, head: dict[str, Any]) -> None:
        self._close()
        source = open_file(Path(head["path"]), head["media_type"], head["password"], self._limits)
        self._source = source
        self._answer(
            {
                "pages": source.pages, "media_type": source.media_type,
                "repaired": source.repaired, "warnings": warning_rows(_repair_warnings(source)),
            }
        )  # fmt: skip

    def _do_plan(self, head: dict[str, Any]) -> None:
        mode = OcrMode(head["ocr"])
        for number in head["pages"]:
            try:
                page = self._opened().plan(number, mode, pixels=head["pixels"])
            except RagServiceError as error:
                self._answer(error_head(error))
            except Exception as error:
                self._answer(error_head(self._unexpected(number, error)))
            else:
                self._answer(planned_head(page))

    def _do_render(self, head: dict[str, Any]) -> None:
        with self._page_errors(head["page"]):
            page = crops.whole_page(self._raster(head), self._limits.jpeg_quality)
        self._answer(drawn_head(page), page.jpeg)

    def _do_layout_picture(self, head: dict[str, Any]) -> None:
        with self._page_errors(head["page"]):
            picture = crops.for_layout(self._kept_raster(head), self._limits.jpeg_quality)
        self._answer(drawn_head(picture), picture.jpeg)

    def _do_crops(self, head: dict[str, Any]) -> None:
        cut = self._cutter.for_ocr if head["fit"] else self._cutter.unscaled
        with self._page_errors(head["page"]):
            frame = crops_frame(cut(self._kept_raster(head), head["boxes"]))
        self._answer(frame.head, frame.body)

    def _do_decrypt(self, head: dict[str, Any]) -> None:
        preflight.decrypt(Path(head["path"]), head["password"], Path(head["target"]))
        self._answer({})

    def _do_slice(self, head: dict[str, Any]) -> None:
        """Answer with one frame if pages are copied, else with one more before each drawing."""
        path, pages, target = Path(head["path"]), head["pages"], Path(head["target"])
        warnings: list[WarningRow] = []
        if head["jpeg_quality"] or not slices.select(path, pages, target):
            quality = head["jpeg_quality"] or slices.FINE_QUALITY
            with closing(open_file(path, "", None, self._limits)) as source:
                for drawn in slices.draw(source, pages, head["dpi"], quality, target):
                    self._answer({"page": drawn.number})
                    warnings += warning_rows(drawn.warnings)
        self._answer({"last": True, "warnings": warnings})

    def _do_rewrite_images(self, head: dict[str, Any]) -> None:
        recompress.rewrite_images(Path(head["path"]), head["dpi"], Path(head["target"]))
        self._answer({})

    def _do_compare(self, head: dict[str, Any]) -> None:
        for number in recompress.compare(Path(head["path"]), Path(head["copy"])):
            self._answer({"page": number})
        self._answer({"last": True})

    def _kept_raster(self, head: dict[str, Any]) -> Raster:
        """Return the page and keep it for the next request about it."""
        raster = self._raster(head)
        self._rasters.keep(raster, head["dpi"])
        return raster

    def _raster(self, head: dict[str, Any]) -> Raster:
        number, dpi = head["page"], head["dpi"]
        return self._rasters.get(number, dpi) or self._opened().draw(number, dpi)

    @contextmanager
    def _page_errors(self, number: int) -> Iterator[None]:
        """Turn unexpected errors into the page's own error."""
        try:
            yield
        except RagServiceError:
            raise
        except Exception as error:
            raise self._unexpected(number, error) from error

    def _unexpected(self, number: int, error: Exception) -> RagServiceError:
        """Print a bug's traceback to stderr and return an error that fails only this page."""
        if is_shortage(error):
            return too_large(number, self._limits.max_mib)
        traceback.print_exception(error, file=sys.stderr)
        return PageUnrenderable(
            f"Page {number} cannot be read ({type(error).__name__}).", page=number
        )

    def _opened(self) -> OpenedFile:
        if self._source is None:
            raise PageUnrenderable("No document is open.")
        return self._source

    def _close(self) -> None:
        self._rasters.clear()
        if self._source is not None:
            self._source.close()
            self._source = None

    def _answer(self, head: dict[str, Any], body: bytes = b"") -> None:
        self._answers.write(pipe_frames.encode(Frame({**head, "mib": self._resident_mib()}, body)))
        self._answers.flush()

    def _resident_mib(self) -> float:
        return int(os.pread(self._memory, 128, 0).split()[1]) * PAGE_SIZE / MIB


def _repair_warnings(source: OpenedFile) -> tuple[PdfWarning, ...]:
    if not source.repaired:
        return ()
    return (PdfWarning("repaired_pdf", "The file is damaged and was repaired while opening."),)
