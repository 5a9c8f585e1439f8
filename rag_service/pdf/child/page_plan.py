"""Decides how each page of a PDF is read: by its own text, by OCR, or not at all.

Runs in the render child.
"""

from __future__ import annotations

from typing import Any

from rag_service.pdf.child import covered_text, ink, page_markdown, text_layer
from rag_service.pdf.child.extraction import PageContent, extract
from rag_service.pdf.child.mupdf import pymupdf
from rag_service.pdf.child.render import preview_of
from rag_service.pdf.child.text_layer import TextLayerHealth
from rag_service.pdf.results import PdfWarning, PlannedPage
from rag_service.states import OcrMode, PagePlan


class PagePlanner:
    """Plans pages of an open pymupdf Document under one set of options.

    `pixels` off: nothing is drawn, for a page that hangs when it is drawn.
    """

    def __init__(self, mode: OcrMode, *, trust_hidden_text: bool, pixels: bool = True) -> None:
        self._mode = mode
        self._trust_hidden_text = trust_hidden_text
        self._pixels = pixels

    def plan(self, page: Any, number: int) -> PlannedPage:
        """Plan a pymupdf Page. Raises MUPDF_ERRORS."""
        pymupdf.TOOLS.reset_mupdf_warnings()
        content = extract(page)
        if self._mode is OcrMode.FORCE:
            return self._without_text(page, content, number, "OCR of every page was requested")
        health = self._assess(page, content)
        if health.healthy:
            return self._native(content, number, "healthy text layer")
        if self._mode is OcrMode.OFF and not health.empty:
            warning = PdfWarning(
                "text_layer_rejected", f"OCR is off; the text was kept: {health.reason}.", number
            )
            return self._native(content, number, health.reason, warning)
        return self._without_text(page, content, number, health.reason)

    def _assess(self, page: Any, content: PageContent) -> TextLayerHealth:
        raw = content.raw_text
        picture = covered_text.covers_page(content.pictures, content.width, content.height)
        if not picture:
            return text_layer.assess_text_layer(raw)
        hidden = covered_text.hidden_share(page, content)
        if self._trust_hidden_text and hidden > text_layer.HIDDEN_SHARE:
            return text_layer.assess_text_layer(raw)
        health = text_layer.assess_text_layer(raw, picture=True, hidden=hidden)
        if health.healthy and self._pixels and self._ink_outside_text(page, content):
            return TextLayerHealth("a picture of the page shows more than its text")
        return health

    @staticmethod
    def _ink_outside_text(page: Any, content: PageContent) -> bool:
        boxes = [line.box for block in content.blocks for line in block.lines]
        return ink.has_ink_outside(preview_of(page), boxes)

    def _native(
        self, content: PageContent, number: int, reason: str, *warnings: PdfWarning
    ) -> PlannedPage:
        return PlannedPage(
            number, PagePlan.NATIVE, reason, content.width, content.height,
            page_markdown.to_markdown(content), warnings,
        )  # fmt: skip

    def _without_text(
        self, page: Any, content: PageContent, number: int, reason: str
    ) -> PlannedPage:
        size = (content.width, content.height)
        if self._pixels and ink.is_blank(preview_of(page).image):
            return PlannedPage(
                number, PagePlan.BLANK, "nothing is drawn", *size, warnings=_damage(number)
            )
        if self._mode is OcrMode.OFF:
            warning = PdfWarning(
                "page_without_text", "OCR is off and the page has no text layer.", number
            )
            return PlannedPage(
                number, PagePlan.NATIVE, reason, *size, warnings=(warning,), no_text=True
            )
        return PlannedPage(number, PagePlan.OCR, reason, *size)


def _damage(number: int) -> tuple[PdfWarning, ...]:
    """Return a warning if MuPDF warned: a page may be blank because it is damaged."""
    if not pymupdf.TOOLS.mupdf_warnings():
        return ()
    return (PdfWarning("repaired_pdf", "The page is damaged; nothing on it can be drawn.", number),)
