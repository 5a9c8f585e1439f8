"""Decides how each page of a PDF is read: its own text, the OCR server, or not at all.

Runs in the render child; called by sources.py.
"""

from __future__ import annotations

from typing import Any

from rag_service.pdf.child import covered_text, ink, page_markdown, text_layer
from rag_service.pdf.child.extraction import PageContent, extract
from rag_service.pdf.child.mupdf import pymupdf
from rag_service.pdf.child.render import look_at
from rag_service.pdf.child.text_layer import TextLayerHealth
from rag_service.pdf.results import PdfWarning, PlannedPage
from rag_service.states import OcrMode, PagePlan


class PagePlanner:
    """Plans pages of an open pymupdf Document under one set of options.

    `pixels` off: nothing is drawn, for a page that hung when it was.
    """

    def __init__(self, mode: OcrMode, *, trust_hidden_text: bool, pixels: bool = True) -> None:
        self._mode = mode
        self._trust_hidden_text = trust_hidden_text
        self._pixels = pixels

    def plan(self, page: Any, number: int) -> PlannedPage:
        """Plan a pymupdf Page; raises what MuPDF raises."""
        pymupdf.TOOLS.reset_mupdf_warnings()
        content = extract(page)
        if self._mode is OcrMode.FORCE:
            return self._unread(page, content, number, "OCR of every page was asked for")
        verdict = self._judge(page, content)
        if verdict.healthy:
            return self._native(content, number, "healthy text layer")
        if self._mode is OcrMode.OFF and not verdict.empty:
            warning = PdfWarning(
                "text_layer_rejected", f"OCR is off; the text was kept: {verdict.reason}.", number
            )
            return self._native(content, number, verdict.reason, warning)
        return self._unread(page, content, number, verdict.reason)

    def _judge(self, page: Any, content: PageContent) -> TextLayerHealth:
        raw = content.raw_text
        picture = covered_text.covers_page(content.pictures, content.width, content.height)
        if not picture:
            return text_layer.assess_text_layer(raw)
        hidden = covered_text.hidden_share(page, content)
        if self._trust_hidden_text and hidden > text_layer.HIDDEN_SHARE:
            return text_layer.assess_text_layer(raw)
        verdict = text_layer.assess_text_layer(raw, picture=True, hidden=hidden)
        if verdict.healthy and self._pixels and self._ink_beyond_text(page, content):
            return TextLayerHealth("a picture of the page shows more than its text")
        return verdict

    @staticmethod
    def _ink_beyond_text(page: Any, content: PageContent) -> bool:
        boxes = [line.box for block in content.blocks for line in block.lines]
        return ink.has_ink_outside(look_at(page), boxes)

    def _native(
        self, content: PageContent, number: int, reason: str, *warnings: PdfWarning
    ) -> PlannedPage:
        return PlannedPage(
            number, PagePlan.NATIVE, reason, content.width, content.height,
            page_markdown.to_markdown(content), warnings,
        )  # fmt: skip

    def _unread(self, page: Any, content: PageContent, number: int, reason: str) -> PlannedPage:
        size = (content.width, content.height)
        if self._pixels and ink.is_blank(look_at(page).image):
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
    """A page may be blank because its drawing could not be understood; that must show."""
    complaints = pymupdf.TOOLS.mupdf_warnings()
    if not complaints:
        return ()
    return (PdfWarning("repaired_pdf", "The page is damaged; nothing on it can be drawn.", number),)
