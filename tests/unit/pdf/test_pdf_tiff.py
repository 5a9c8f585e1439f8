"""Pages of a TIFF file: a linked list, which must not be followed from its start for each page."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, TiffImagePlugin

from rag_service.config.loader import load_settings
from rag_service.pdf.child.image_files import ImageSource
from rag_service.pdf.child_limits import ChildLimits
from rag_service.states import OcrMode

PAGES = 60


def limits() -> ChildLimits:
    pdf = load_settings().pdf
    return ChildLimits(
        max_pixels=pdf.max_pixels,
        jpeg_quality=pdf.jpeg_quality,
        crop_min_pixels=pdf.crop_min_pixels,
        crop_max_side=pdf.crop_max_side,
        raster_cache_mib=pdf.raster_cache_mib,
        trust_hidden_text=pdf.trust_hidden_text,
        max_mib=pdf.child_max_mib,
    )


def test_each_page_of_a_tiff_file_costs_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.tiff"
    frames = [Image.new("L", (40 + number, 60), number) for number in range(PAGES)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    source = ImageSource(path, "image/tiff", limits())
    read = 0
    load = TiffImagePlugin.ImageFileDirectory_v2.load

    def counted(*args: object) -> object:
        nonlocal read
        read += 1
        return load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(TiffImagePlugin.ImageFileDirectory_v2, "load", counted)
    for number in range(1, PAGES + 1):
        assert source.plan(number, OcrMode.AUTO, pixels=True).width_pt == 39 + number
        assert source.draw(number, 150).image.width > 0
    assert read <= 3 * PAGES
    source.close()
