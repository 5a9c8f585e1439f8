"""Pictures of pages with a layout: a title, columns of prose, a wide paragraph."""

from __future__ import annotations

from collections.abc import Sequence

import pymupdf

PROSE = (
    "The harbour master wrote his report on the evening of the fourth of May. Nine ships had "
    "come in with timber, two with salt, and one with oranges for the merchants of the town. "
) * 4
# What a layout model should call the blocks of two_columns(), in reading order.
TWO_COLUMNS = ["paragraph_title", "text", "text", "text"]


def two_columns(dpi: int = 100) -> bytes:
    """A4 as a JPEG: a title, two columns of prose side by side, prose over the whole width."""
    with pymupdf.open() as document:
        page = document.new_page()
        page.insert_text((70, 80), "A Report on the Harbour", fontsize=20, fontname="hebo")
        for box in ((50, 120, 290, 420), (310, 120, 550, 420), (50, 450, 550, 560)):
            page.insert_textbox(box, PROSE, fontsize=10)
        picture: bytes = page.get_pixmap(dpi=dpi).tobytes("jpeg")
    return picture


def blank(dpi: int = 100) -> bytes:
    """An empty A4 page as a JPEG."""
    with pymupdf.open() as document:
        picture: bytes = document.new_page().get_pixmap(dpi=dpi).tobytes("jpeg")
    return picture


def paragraphs(count: int, name: str = "This", dpi: int = 100) -> bytes:
    """A4 as a JPEG with `count` paragraphs, well apart; at most six, not two.

    Each has its own words, so that no two parts of pages with different names are alike.
    """
    with pymupdf.open() as document:
        page = document.new_page()
        for number in range(count):
            top = 50 + 130 * number
            text = f"{name} {number}: {PROSE}"[:480]
            page.insert_textbox((60, top, 540, top + 90), text, fontsize=11)
        picture: bytes = page.get_pixmap(dpi=dpi).tobytes("jpeg")
    return picture


def scanned(counts: Sequence[int]) -> bytes:
    """A PDF of pictures only: one page for each count of paragraphs."""
    with pymupdf.open() as document:
        for number, count in enumerate(counts, start=1):
            page = document.new_page()
            picture = paragraphs(count, f"Page {number}, part")
            page.insert_image(page.rect, stream=picture)
        content: bytes = document.tobytes()
    return content


def numbered_scan(pages: int, blocks: int = 4) -> bytes:
    """A PDF of pictures: each page with `blocks` paragraphs, no two alike in the document."""
    with pymupdf.open() as drawn, pymupdf.open() as scan:
        for number in range(1, pages + 1):
            page = drawn.new_page()
            for block in range(blocks):
                top = 60 + 170 * block
                words = f"Sheet {number}, paragraph {block + 1}. {PROSE[: 500 + 30 * block]}"
                page.insert_textbox((60, top, 540, top + 120), words, fontsize=11)
            picture = page.get_pixmap(dpi=100, colorspace=pymupdf.csGRAY).tobytes("jpeg")
            scanned_page = scan.new_page()
            scanned_page.insert_image(scanned_page.rect, stream=picture)
        content: bytes = scan.tobytes()
    return content
