"""Scans as large as those of a real scanner, and a replacement for Ghostscript that fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pymupdf
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageFont

LETTER = (612, 792)
# A stub has to find its output file among the options, and every tool by its full path.
_STUB = """#!/bin/sh
if [ "$1" = --version ]; then echo 10.00.0; exit; fi
for option in "$@"; do
  case $option in -sOutputFile=*) out=${option#*=};; esac
done
"""


def picture(text: str, dpi: int = 300, quality: int = 95, *, noise: int = 24) -> bytes:
    """A grey page with a line of large letters under a scanner's noise, as a JPEG."""
    size = (LETTER[0] * dpi // 72, LETTER[1] * dpi // 72)
    page = Image.new("L", size, 245)
    draw = ImageDraw.Draw(page)
    draw.text((dpi // 2, dpi), text, fill=0, font=ImageFont.load_default(dpi // 4))
    grain = Image.effect_noise(size, noise) if noise else Image.new("L", size, 128)
    out = BytesIO()
    ImageChops.add(page, grain, offset=-128).save(out, "JPEG", quality=quality)
    return out.getvalue()


def scan(path: Path, pages: int, *, dpi: int = 300, quality: int = 95) -> Path:
    """A PDF of this number of such pages, each of which shows its number."""
    with pymupdf.open() as document:
        for number in range(1, pages + 1):
            page = document.new_page(width=LETTER[0], height=LETTER[1])
            page.insert_image(page.rect, stream=picture(f"Sheet {number}", dpi, quality))
        document.save(path)
    return path


def picture_sizes(path: Path) -> list[tuple[int, int]]:
    """Width and height of the pictures of each page, in pixels."""
    with pymupdf.open(path, filetype="pdf") as document:
        return [tuple(image[2:4]) for page in document for image in page.get_images()]


def need_ghostscript() -> None:
    """Skip on a machine without Ghostscript, but fail in CI, which has all tools."""
    if shutil.which("gs") is None:
        if os.environ.get("CI"):
            pytest.fail("Ghostscript (gs) is not installed.")
        pytest.skip("Ghostscript (gs) is not installed.")


def stub_ghostscript(folder: Path, commands: Sequence[str]) -> Path:
    """A folder for PATH whose gs runs these commands; `$out` is the path of its result."""
    folder.mkdir(exist_ok=True)
    program = folder / "gs"
    program.write_text(_STUB + "\n".join(commands) + "\n")
    program.chmod(0o755)
    return folder
