"""Generated scans: each page carries a mark that the fake OCR server reads from its picture.

A mark is a row of black and white cells under the page's upper edge. It survives JPEG and scaling.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

WIDTH, HEIGHT = 612, 792
_START = (1, 0, 1, 1)
_DOCUMENT_BITS, _PAGE_BITS = 16, 8
_CELLS = len(_START) + _DOCUMENT_BITS + _PAGE_BITS + 1
_CELL, _LEFT, _TOP, _DEEP = 16, 72, 48, 24
_numbers = itertools.count(1)


class Mark(NamedTuple):
    """Which page of which scan a picture shows."""

    document: int
    page: int

    @property
    def text(self) -> str:
        """What the fake server reads on this page."""
        return f"Document {self.document}, page {self.page}."


def new_number() -> int:
    """Return a document number that no other scan of this process has."""
    return next(_numbers)


def scan(document: int, pages: int | Sequence[int]) -> bytes:
    """A PDF without a text layer; `pages` is their count, or the numbers in their marks."""
    numbers = range(1, pages + 1) if isinstance(pages, int) else pages
    return pdf([_drawing(Mark(document, number)) for number in numbers])


def pdf(contents: Sequence[bytes]) -> bytes:
    """A PDF with one content stream per page; Helvetica is /F."""
    count = len(contents)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(count))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {count} /Kids [{kids}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, content in enumerate(contents):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {WIDTH} {HEIGHT}] "
            f"/Resources << /Font << /F 3 0 R >> >> /Contents {5 + 2 * index} 0 R >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    return _assembled(objects)


def _assembled(objects: Sequence[bytes]) -> bytes:
    out = io.BytesIO()
    out.write(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    table = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    for offset in offsets:
        out.write(b"%010d 00000 n \n" % offset)
    out.write(
        b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, table)
    )
    return out.getvalue()


def picture(mark: Mark, dpi: float = 72) -> bytes:
    """One page of a scan as a JPEG, as a worker would render it."""
    scale = dpi / 72
    image = Image.new("L", (round(WIDTH * scale), round(HEIGHT * scale)), "white")
    for index, bit in enumerate(_bits(mark)):
        left = _LEFT + index * _CELL
        box = (left, _TOP, left + _CELL, _TOP + _DEEP)
        image.paste(0 if bit else 255, tuple(round(edge * scale) for edge in box))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=80)
    return out.getvalue()


def _drawing(mark: Mark) -> bytes:
    """The mark's black cells, and some lines that look like writing."""
    bottom = HEIGHT - _TOP - _DEEP
    cells = [
        f"{_LEFT + index * _CELL} {bottom} {_CELL} {_DEEP} re f"
        for index, bit in enumerate(_bits(mark))
        if bit
    ]
    lines = [f"72 {700 - 40 * line} {468 - 20 * line} 8 re f" for line in range(1, 12)]
    return "\n".join(["0 g", *cells, *lines]).encode()


def _bits(mark: Mark) -> list[int]:
    value = mark.document << _PAGE_BITS | mark.page
    size = _DOCUMENT_BITS + _PAGE_BITS
    data = [value >> place & 1 for place in reversed(range(size))]
    return [*_START, *data, sum(data) % 2]


class Picture(NamedTuple):
    """What a received picture is: its mark, or None, its digest and its size."""

    mark: Mark | None
    sha256: str
    width: int
    height: int


def look(jpeg: bytes) -> Picture:
    """Read a picture's mark. Raises OSError if it is not a picture."""
    image = Image.open(io.BytesIO(jpeg))
    size = image.size
    image.draft("L", (WIDTH // 2, HEIGHT // 2))
    mark = _read_mark(image.convert("L"))
    return Picture(mark, hashlib.sha256(jpeg).hexdigest(), *size)


def _read_mark(image: Image.Image) -> Mark | None:
    y = int((_TOP + _DEEP / 2) / HEIGHT * image.height)
    xs = [int((_LEFT + (i + 0.5) * _CELL) / WIDTH * image.width) for i in range(_CELLS)]
    bits = [int(image.getpixel((x, y)) < 128) for x in xs]
    data = bits[len(_START) : -1]
    if tuple(bits[: len(_START)]) != _START or sum(data) % 2 != bits[-1]:
        return None
    value = int("".join(map(str, data)), 2)
    return Mark(value >> _PAGE_BITS, value & (1 << _PAGE_BITS) - 1)
