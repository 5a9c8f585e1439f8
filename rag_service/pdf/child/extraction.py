"""One pass over a PDF page: text lines, pictures and drawings. Runs in the render child.

MuPDF writes its structured text as JSON in C, which costs about as much as plain text;
building the same in Python objects costs twice as much.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from rag_service.pdf.child.mupdf import mupdf, pymupdf

# The JSON is in tenths of a point, as MuPDF writes whole numbers.
_SCALE = 10
# Codes of glyphs without Unicode are often the letters themselves; text_layer.py checks them.
_FLAGS = (
    mupdf.FZ_STEXT_PRESERVE_WHITESPACE
    | mupdf.FZ_STEXT_PRESERVE_IMAGES
    | mupdf.FZ_STEXT_COLLECT_VECTORS
    | mupdf.FZ_STEXT_MEDIABOX_CLIP
    | mupdf.FZ_STEXT_USE_CID_FOR_UNKNOWN_UNICODE
)
_VECTOR = re.compile(rb'<vector bbox="([^"]+)" stroke="\d" rectangle="(\d)"')
_MONO_NAME = re.compile(r"courier|mono(?!type)|consol|menlo|typewriter|[cl]mtt|sftt", re.IGNORECASE)


class PdfBox(NamedTuple):
    """A rectangle in points, origin at the shown page's top left."""

    x0: float
    y0: float
    x1: float
    y1: float

    @property
    def width(self) -> float:
        return self.x1 - self.x0

    @property
    def height(self) -> float:
        return self.y1 - self.y0


class Line(NamedTuple):
    """Text on one baseline, with the font of its first letter; `raw` is not cleaned up."""

    box: PdfBox
    size: float
    bold: bool
    mono: bool
    raw: str


class Block(NamedTuple):
    """Lines that MuPDF groups into one paragraph."""

    box: PdfBox
    lines: list[Line]


class Stroke(NamedTuple):
    """A drawn path's bounds; `rectangle`: it is a rectangle, as an outline or filled."""

    box: PdfBox
    rectangle: bool


class Word(NamedTuple):
    """A word and its box."""

    box: PdfBox
    text: str


@dataclass
class PageContent:
    """The text and the pictures of a page, in the order of its content stream."""

    width: float
    height: float
    blocks: list[Block]
    pictures: list[PdfBox]
    drawings: int
    _structured: Any

    @cached_property
    def raw_text(self) -> str:
        return "\n".join(line.raw for block in self.blocks for line in block.lines)

    def strokes(self) -> list[Stroke]:
        """Return the bounds of everything drawn. Slow: call it only if a grid is likely."""
        xml = _print(self._structured, mupdf.fz_print_stext_page_as_xml_with_flags, 1, 0)
        return [
            Stroke(PdfBox(*map(float, bounds.split())), rectangle == b"1")
            for bounds, rectangle in _VECTOR.findall(xml)
        ]

    def words(self) -> list[Word]:
        """Return every word with its own box, for lines that span several table cells."""
        words = pymupdf.TextPage(self._structured).extractWORDS()
        return [Word(PdfBox(*word[:4]), word[4]) for word in words]


def extract(page: Any) -> PageContent:
    """Read a pymupdf Page. Raises MUPDF_ERRORS."""
    bounds = mupdf.fz_bound_page(page.this)
    structured = _structured(page.this, bounds)
    written = _print(structured, mupdf.fz_print_stext_page_as_json, _SCALE)
    blocks: list[Block] = []
    pictures: list[PdfBox] = []
    drawings = 0
    # A broken encoding must not lose the page.
    for entry in json.loads(written.decode("utf-8", "replace"))["blocks"]:
        kind = entry["type"]
        if kind == "text":
            blocks.append(Block(_box(entry["bbox"]), [_line(line) for line in entry["lines"]]))
        elif kind == "image":
            pictures.append(_box(entry["bbox"]))
        elif kind == "vector":
            drawings += 1
    width, height = bounds.x1 - bounds.x0, bounds.y1 - bounds.y0
    return PageContent(width, height, blocks, pictures, drawings, structured)


def _structured(page: Any, bounds: Any) -> Any:
    """Read the page with its annotations and form fields, unlike FzStextPage(page, options)."""
    structured = mupdf.FzStextPage(bounds)
    device = mupdf.fz_new_stext_device(structured, mupdf.FzStextOptions(_FLAGS))
    mupdf.fz_run_page(page, device, mupdf.FzMatrix(), mupdf.FzCookie())
    mupdf.fz_close_device(device)
    return structured


def _print(structured: Any, printer: Any, *arguments: int) -> bytes:
    buffer = mupdf.FzBuffer(8192)
    output = mupdf.FzOutput(buffer)
    printer(output, structured, *arguments)
    output.fz_close_output()
    return bytes(buffer.fz_buffer_extract())


def _box(bbox: dict[str, int]) -> PdfBox:
    x, y = bbox["x"] / _SCALE, bbox["y"] / _SCALE
    return PdfBox(x, y, x + bbox["w"] / _SCALE, y + bbox["h"] / _SCALE)


@lru_cache(maxsize=1024)
def _is_mono(name: str, family: str) -> bool:
    # Embedded fonts seldom set the flag from which MuPDF takes the family.
    return family == "monospace" or _MONO_NAME.search(name) is not None


def _line(entry: dict[str, Any]) -> Line:
    font = entry["font"]
    return Line(
        _box(entry["bbox"]),
        font["size"] / _SCALE,
        font["weight"] == "bold",
        _is_mono(font["name"], font["family"]),
        entry["text"],
    )
