"""Write agreement.pdf (born-digital), scan.pdf and scan.txt: python -m samples.make_samples OUT.

The output is the same on every run, so that the output of the demo can be compared.
"""

import io
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pymupdf
from PIL import Image, ImageChops, ImageFilter

from samples.texts import AGREEMENT, SCAN, Block, Heading, Items, Paragraph, Table

A4 = pymupdf.paper_rect("a4")
MARGIN, FOOT = 64.0, 770.0
SANS, BOLD = "helv", "hebo"
HEADING_SIZE = {1: 20.0, 2: 13.0}
BODY_SIZE = 10.5
# The bullet of WinAnsiEncoding, which the built-in fonts have.
BULLET = "\x95"
SCAN_DPI = 200
# The third page is scanned sideways.
TURNED_PAGE = 3


class Flow:
    """Lays out blocks from top to bottom and starts a new page when one is full."""

    def __init__(self, body_size: float) -> None:
        self.document = pymupdf.open()
        self.size = body_size
        self._new_page()

    def _new_page(self) -> None:
        self.page = self.document.new_page(width=A4.width, height=A4.height)
        self.y = MARGIN

    def add(self, block: Block) -> None:
        match block:
            case Heading(text, level):
                if level == 1 and self.y > FOOT / 2:
                    self._new_page()
                self._heading(text, HEADING_SIZE[level])
            case Paragraph(text):
                self._lines(text, MARGIN, self.size)
                self.y += self.size * 0.8
            case Items(texts):
                self._items(texts)
            case Table():
                self._table(block)

    def _heading(self, text: str, size: float) -> None:
        # A heading stays on the page of the first lines below it.
        self._need(size * 2 + self.size * 5)
        self.y += size * 0.6
        self._lines(text, MARGIN, size, BOLD)
        self.y += size * 0.4

    def _items(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._need(self.size * 3)
            self.page.insert_text((MARGIN + 6, self.y + self.size), BULLET, fontsize=self.size)
            self._lines(text, MARGIN + 22, self.size)
            self.y += self.size * 0.3
        self.y += self.size * 0.6

    def _lines(self, text: str, x: float, size: float, font: str = SANS) -> None:
        for line in wrap(text, A4.width - MARGIN - x, size, font):
            self._need(size * 1.4)
            self.page.insert_text((x, self.y + size), line, fontname=font, fontsize=size)
            self.y += size * 1.4

    def _table(self, table: Table) -> None:
        height = self.size * 2.1
        self._need(height * len(table.rows))
        line = A4.width - 2 * MARGIN
        for number, row in enumerate(table.rows):
            x = MARGIN
            for text, share in zip(row, table.widths, strict=True):
                self._cell(pymupdf.Rect(x, self.y, x + share * line, self.y + height), text, number)
                x += share * line
            self.y += height
        self.y += self.size

    def _cell(self, box: pymupdf.Rect, text: str, row: int) -> None:
        self.page.draw_rect(box, color=(0, 0, 0), width=0.8)
        baseline = (box.x0 + 6, box.y0 + self.size * 1.4)
        font = BOLD if row == 0 else SANS
        self.page.insert_text(baseline, text, fontname=font, fontsize=self.size)

    def _need(self, height: float) -> None:
        if self.y + height > FOOT:
            self._new_page()


def wrap(text: str, width: float, size: float, font: str) -> list[str]:
    """Break the text between words into lines no wider than `width` points."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pymupdf.get_text_length(longer, fontname=font, fontsize=size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def make_agreement(target: Path) -> None:
    flow = Flow(BODY_SIZE)
    for block in AGREEMENT:
        flow.add(block)
    pages = flow.document.page_count
    for number, page in enumerate(flow.document, start=1):
        foot = f"Cold Storage Agreement, page {number} of {pages}"
        page.insert_text((MARGIN, A4.height - 36), foot, fontname=SANS, fontsize=8)
    flow.document.set_metadata({"title": "Cold Storage Agreement"})
    save(flow.document, target)


def make_scan(target: Path) -> None:
    """Write raster pages, as an office scanner does, and a text file with the words by page."""
    dice = random.Random(20260914)
    document = pymupdf.open()
    for number, blocks in enumerate(SCAN, start=1):
        picture = scanned(printed(blocks), dice)
        if number == TURNED_PAGE:
            picture = picture.transpose(Image.Transpose.ROTATE_90)
        jpeg = io.BytesIO()
        picture.save(jpeg, "JPEG", quality=70, dpi=(SCAN_DPI, SCAN_DPI))
        width, height = (pixels * 72 / SCAN_DPI for pixels in picture.size)
        page = document.new_page(width=width, height=height)
        page.insert_image(page.rect, stream=jpeg.getvalue())
    save(document, target)
    words = "\f".join("\n".join(plain(block) for block in blocks) + "\n" for blocks in SCAN)
    target.with_suffix(".txt").write_text(words)


def printed(blocks: Sequence[Block]) -> Image.Image:
    """Return the clean page in grey at SCAN_DPI."""
    flow = Flow(BODY_SIZE + 1.5)
    for block in blocks:
        flow.add(block)
    pixels = flow.document[0].get_pixmap(dpi=SCAN_DPI, colorspace=pymupdf.csGRAY)
    return Image.frombytes("L", (pixels.width, pixels.height), pixels.samples)


def scanned(clean: Image.Image, dice: random.Random) -> Image.Image:
    """Return the page slightly skewed and blurred, on grey paper with grain and a dark edge."""
    angle = dice.uniform(0.3, 0.8) * dice.choice((-1, 1))
    skewed = clean.rotate(angle, Image.Resampling.BICUBIC, fillcolor=255)
    faded = skewed.filter(ImageFilter.GaussianBlur(0.7)).point(
        lambda value: 38 + value * 205 // 255
    )
    grain = Image.frombytes("L", clean.size, dice.randbytes(clean.width * clean.height))
    soft = grain.filter(ImageFilter.GaussianBlur(0.8)).point(lambda value: (value - 128) // 3 + 128)
    paper = ImageChops.add(faded, soft, offset=-128)
    shadow = Image.linear_gradient("L").rotate(90).resize(clean.size)
    edge = shadow.point(lambda value: min(255, 150 + value * 12))
    return ImageChops.multiply(paper, edge)


def plain(block: Block) -> str:
    match block:
        case Heading(text) | Paragraph(text):
            return text
        case Items(texts):
            return "\n".join(texts)
        case Table(rows):
            return "\n".join(" ".join(row) for row in rows)


def save(document: pymupdf.Document, target: Path) -> None:
    """Save without dates and random identifiers, which would differ between runs."""
    document.save(target, garbage=3, deflate=True, no_new_id=True)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    make_scan(folder / "scan.pdf")
    make_agreement(folder / "agreement.pdf")


if __name__ == "__main__":
    main()
