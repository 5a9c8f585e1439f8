"""Small PDF files written by hand that no library would write: pages that hang, damaged files."""

from __future__ import annotations

from pathlib import Path

import pymupdf

PROSE = (
    "The keeper of the house was not at home when they came to the door in the evening, "
    "and so they had to wait for an hour by the side of the road with all of their things."
)
FONT = b"/Font<</F1 5 0 R>>"
HELVETICA = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"


def prose_stream(text: str = PROSE) -> bytes:
    """A content stream with the text in lines of 80 letters."""
    lines = [text[start : start + 80] for start in range(0, len(text), 80)]
    shown = b" T* ".join(b"(%s) Tj" % line.encode("latin-1") for line in lines)
    return b"BT /F1 12 Tf 14 TL 72 700 Td " + shown + b" ET\n"


def stream(entries: bytes, data: bytes) -> bytes:
    return b"<<%s/Length %d>>stream\n%s\nendstream" % (entries, len(data), data)


def pdf_bytes(*objects: bytes) -> bytes:
    """A PDF of these objects, numbered from 1; the first is the catalog."""
    out, offsets = b"%PDF-1.7\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return (
        out
        + b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
        + b"trailer<</Size %d/Root 1 0 R>>\n" % (len(objects) + 1)
        + b"startxref\n%d\n%%%%EOF\n" % len(out)
    )


def one_page(content: bytes, resources: bytes, *more: bytes) -> bytes:
    """A one-page PDF; `more` objects are numbered from 6; F1, number 5, is the usual font."""
    return pdf_bytes(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<<%s>>>>" % (resources if b"/Font" in resources else FONT + resources),
        stream(b"", content),
        HELVETICA,
        *more,
    )


def endless_page() -> bytes:
    """Forms that call the next one ten times, ten deep: reading and drawing never end."""
    forms = []
    for depth in range(10):
        body = b"/X%d Do " % (depth - 1) * 10 if depth else prose_stream()
        inner = b"/XObject<</X%d %d 0 R>>" % (depth - 1, 5 + depth) if depth else b""
        forms.append(
            stream(
                b"/Type/XObject/Subtype/Form/BBox[0 0 612 792]"
                b"/Resources<</Font<</F1 5 0 R>>%s>>" % inner,
                body,
            )
        )
    return one_page(b"/X9 Do", b"/XObject<</X9 15 0 R>>", *forms)


def undrawable_page() -> bytes:
    """Good text over a page-wide picture and a pattern of endless tiles: only drawing hangs."""
    content = b"q 612 0 0 792 0 0 cm /I Do Q /Pattern cs /P scn 0 0 612 792 re f " + prose_stream()
    return one_page(
        content,
        b"/XObject<</I 6 0 R>>/Pattern<</P 7 0 R>>",
        stream(
            b"/Type/XObject/Subtype/Image/Width 1/Height 1/ColorSpace/DeviceGray"
            b"/BitsPerComponent 8",
            b"\xff",
        ),
        stream(
            b"/Type/Pattern/PatternType 1/PaintType 1/TilingType 1/BBox[0 0 9 9]"
            b"/XStep 0.001/YStep 0.001/Resources<<>>",
            b"1 0 0 rg 0 0 5 5 re f",
        ),
    )


def joined(path: Path, *files: bytes) -> Path:
    """One PDF of the pages of several."""
    with pymupdf.open() as whole:
        for data in files:
            with pymupdf.open(stream=data, filetype="pdf") as part:
                whole.insert_pdf(part)
        whole.save(path)
    return path


def prose_page(text: str = PROSE) -> bytes:
    return one_page(prose_stream(text), b"")


def text_document(path: Path, pages: int, **save: object) -> Path:
    """Pages of prose, each of which shows its number."""
    with pymupdf.open() as document:
        for number in range(1, pages + 1):
            page = document.new_page()
            page.insert_text((72, 90), f"This is page {number} of the whole document.")
            page.insert_textbox((72, 120, 500, 400), PROSE)
        document.save(path, **save)
    return path
